"""Prompts of kconv's own: templates and words, so that nothing of another owner's is handed out.

Their categories are MT-Bench's, of which none of its questions is here. What the target itself would ask comes beside
them: templates alone are a narrow world.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator

import httpx

from kconv.serving.client import Client
from kconv.targets.prompts import Prompt
from kconv.targets.tokenizer import Tokenizer

SUBJECTS = """the water cycle; photosynthesis; volcanoes; the printing press; gravity; vaccines; the Silk Road;
inflation; plate tectonics; black holes; the French Revolution; supply and demand; evolution; electric motors; coral
reefs; the Roman aqueducts; antibiotics; the immune system; solar panels; the nitrogen cycle; democracy; jazz;
sleep; migration of birds; bees; glaciers; earthquakes; the steam engine; DNA; the periodic table; tides; rainbows;
compound interest; the Renaissance; the human heart; public libraries; chess; sourdough bread; recycling; wind
turbines; the Great Wall; rivers; memory; vitamins; lightning; satellites; the Moon; batteries; the internet;
encryption; bicycles; bridges; soil; forests; the ancient Olympic Games; maps; clocks; coffee; tea; rice farming;
desert plants; whales; octopuses; wolves; ants; salt; glass; paper; steel; cement; music theory; opera; photography;
cinema; novels; poetry; myths; cities; railways; harbors; airports; nuclear power; hydropower; the ozone layer; acid
rain; carbon dioxide; enzymes; cells; viruses; bacteria; taxes; unemployment; insurance; stock markets; the gold
standard; trade unions; constitutions; courts; elections; Buddhism; Stoicism; ethics; logic; probability;
statistics; prime numbers; geometry; algebra; calculus; algorithms"""
PLACES = """Lisbon; Kyoto; Nairobi; Iceland; Peru; the Scottish Highlands; Vienna; Morocco; New Zealand; Hanoi;
Montreal; Istanbul; the Alps; Cape Town; Buenos Aires; Norway; Athens; Mexico City; Prague; Bali; Seville; Vermont;
Sicily; Jordan"""
THINGS = """a lighthouse keeper; a lost dog; an old violin; a clockmaker; a robot gardener; a night train; two rival
bakers; a mapmaker; a talking river; a retired astronaut; a library at midnight; a snowstorm; a stubborn mule; a
forgotten letter; a street musician; a glass city; a young beekeeper; a ship's cook; a paper boat; a mountain
village; a broken radio; a secret staircase; a traveling circus; a fox and a crow; a school play; an island without
sound"""
PEOPLE = """a doctor; a chef; a detective; a history teacher; a fitness coach; a gardener; a museum guide; a pilot;
a career adviser; an astronomer; a carpenter; a librarian; a financial planner; a marine biologist; a blacksmith of
the Middle Ages; a ship captain; a journalist; a kind grandmother; a software architect; a weather forecaster; a
pirate; a tour guide in ancient Rome; a chemist; a piano teacher"""
ASKED = """how to sleep better; how to start a small vegetable garden; how to prepare for an interview; how to cook
for ten guests; how to learn a language; how to save money each month; how to train for a first 10k run; how to
repair a squeaky door; how to choose a telescope; how to write a resume; how to keep houseplants alive; how to plan
a road trip; how to teach a child to read; how to stay calm before a speech; how to bake bread without a mixer; how
to organize a garage"""
TASKS = """reverse a string; check whether a number is prime; count the words of a text; find the largest number of
a list; merge two sorted lists; compute the factorial of a number; remove duplicates from a list; sort a list of
dictionaries by a key; read a CSV file and sum a column; check whether a word is a palindrome; find the common
elements of two lists; convert Celsius to Fahrenheit; flatten a nested list; compute the Fibonacci numbers up to n;
find the longest word of a sentence; count each letter of a string; rotate a list by k places; compute the mean and
the median of a list; validate an email address; generate a random password; transpose a matrix; implement a stack;
implement a queue; implement binary search; implement bubble sort; find the greatest common divisor; convert a
number to binary; parse a date"""
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "Rust")
NAMES = (
    "Anna Ben Carla David Elena Farid Grace Hiro Ines Jonas Kira Liam Maya Noah Olga Pedro Rosa Sam Tara Victor".split()
)
GOODS = "apples pencils books cookies marbles tickets stamps bottles chairs oranges shirts candles postcards".split()
FORMS = """a short story; a poem of three stanzas; a limerick; a letter to a friend; a blog post; the opening of a
novel; a dialogue between two people; a product description; a speech of one minute; a news report; a diary entry; a
fairy tale"""

WRITING = (
    "Write {form} about {thing}.",
    "Write {form} about {subject}.",
    "Write a travel blog post about {place}, with what to see and what to eat.",
    "Write a polite email to a colleague asking for help with a project about {subject}.",
    "Describe a morning in {place} with vivid details.",
    "Write an introduction for an essay on {subject}.",
    "Compose a short advertisement for a course on {subject}.",
    "Write a review of a book about {subject}.",
    "Write {form} about {thing}, set in {place}.",
    "Write a persuasive paragraph on why everyone should learn about {subject}.",
)
ROLEPLAY = (
    "You are {person}. A visitor asks you {asked}. Answer in your own voice.",
    "Pretend to be {person} and explain {subject} to a curious child.",
    "Act as {person}. Give me advice on {asked}.",
    "Imagine you are {person} in {place}. Describe your day.",
    "Play the role of {person} and tell me what you think about {subject}.",
    "You are {thing}. Introduce yourself.",
)
REASONING = (
    "{name} is taller than {name2}, and {name2} is taller than {name3}. Who is the shortest? Explain.",
    "If all {goods} are in the box and the box is in {place}, where are the {goods}? Explain step by step.",
    "What would happen if there were no {subject}? Give your reasons.",
    "Compare {subject} and {subject2}. What do they have in common, and how do they differ?",
    "Is {subject} more important than {subject2}? Argue for both sides.",
    "What are the causes and the effects of {subject}?",
    "{name} walks {n} blocks north and then {m} blocks south. How far is {name} from the start, and in which "
    "direction?",
    "{name} is {n} years old. In {m} years {name} will be twice as old as {name2} is now. How old is {name2}?",
    "Think of three arguments for and three against {subject}.",
)
MATH = (
    "{name} has {n} {goods} and gives {m} to {name2}. How many {goods} are left? Show the steps.",
    "A shop sells {goods} for {n} dollars each. How much do {m} of them cost with a discount of 10 percent?",
    "What is {n} times {m}? Show how you calculate it.",
    "A train travels {n}0 kilometers in {m} hours. What is its average speed?",
    "Solve the equation {m}x + {n} = {k} for x.",
    "The sides of a rectangle are {n} and {m} meters. What are its area and its perimeter?",
    "What is the average of {n}, {m}, {k} and {j}?",
    "{name} saves {n} dollars a week. How many weeks does it take to save {k}0 dollars?",
    "What is the probability of rolling a {d} twice in a row with a fair die?",
    "Find the least common multiple of {n} and {m}, and explain how.",
)
CODING = (
    "Write a {language} function to {task}.",
    "Write a {language} program to {task}, with comments.",
    "Explain how to {task} in {language}, with an example.",
    "Write a {language} function to {task}, and unit tests for it.",
    "What is the time complexity of a program to {task}? Show it in {language}.",
    "Write a class in {language} that manages a list of {goods}.",
    "Write an HTML page about {subject} with a heading and a list.",
    "Write a SQL query that counts the {goods} of each customer.",
)
EXTRACTION = (
    "{name} moved to {place} in {year}, where {name2}, {person}, had lived since {year2}. Make a table of names, "
    "places and years.",
    "Summarize in three bullet points what you know about {subject}.",
    "List the key terms of {subject}, each with a definition.",
    "Extract the numbers of this text as JSON: {name} sold {n} {goods} on Monday, {m} on Tuesday and {k} on Wednesday.",
    "Make a list of five facts about {place}.",
    "Give a timeline of {subject} with dates.",
    "Classify these as living or not living: {goods}, {thing}, {subject}.",
    "Rewrite as a table: {name} likes {goods}; {name2} likes {goods2}; {name3} likes {subject}.",
)
STEM = (
    "Explain {subject} in simple terms.",
    "How does {subject} work? Give an example.",
    "What are the main parts of {subject}, and what does each do?",
    "Explain the science behind {subject}.",
    "What are the most common misconceptions about {subject}?",
    "How is {subject} related to {subject2}?",
    "Design an experiment that a student could make about {subject}.",
    "What are the practical uses of {subject}?",
)
HUMANITIES = (
    "What is the history of {subject}?",
    "Why does {subject} matter for society?",
    "How has {subject} changed over the last hundred years?",
    "Discuss the role of {subject} in culture and art.",
    "What can we learn from {subject}?",
    "Write a short essay about {subject} and {subject2}.",
    "What should a visitor know about the history of {place}?",
    "Explain the ethical questions around {subject}.",
)
TEMPLATES = {
    "writing": WRITING, "roleplay": ROLEPLAY, "reasoning": REASONING, "math": MATH, "coding": CODING,
    "extraction": EXTRACTION, "stem": STEM, "humanities": HUMANITIES,
}  # fmt: skip
FOLLOW_UPS = (
    "Now make it shorter.", "Can you give an example?", "Rewrite it for a child of ten.", "Now list the main points.",
    "Explain the second point further.", "Write a title for it.", "What is the most important part, and why?",
)  # fmt: skip


def _words(text: str) -> list[str]:
    return [" ".join(word.split()) for word in text.split(";")]


def _fill(template: str, draw: random.Random) -> str:
    subject, subject2 = draw.sample(_words(SUBJECTS), 2)
    name, name2, name3 = draw.sample(NAMES, 3)
    goods, goods2 = draw.sample(GOODS, 2)
    year = draw.randint(1850, 1990)
    return template.format(
        subject=subject, subject2=subject2, name=name, name2=name2, name3=name3, goods=goods, goods2=goods2,
        form=draw.choice(_words(FORMS)), thing=draw.choice(_words(THINGS)), place=draw.choice(_words(PLACES)),
        person=draw.choice(_words(PEOPLE)), asked=draw.choice(_words(ASKED)), task=draw.choice(_words(TASKS)),
        language=draw.choice(LANGUAGES), n=draw.randint(11, 60), m=draw.randint(2, 10), k=draw.randint(61, 99),
        j=draw.randint(2, 99), d=draw.randint(1, 6), year=year + draw.randint(1, 30), year2=year,
    )  # fmt: skip


def draw_prompts(seed: int = 0) -> Iterator[Prompt]:
    """Yield prompts without end, the categories in turn, none twice; one in four has a second turn."""
    draw, seen = random.Random(seed), set()
    for number in itertools.count():
        category = tuple(TEMPLATES)[number % len(TEMPLATES)]
        text = _fill(draw.choice(TEMPLATES[category]), draw)
        more = (draw.choice(FOLLOW_UPS),) if draw.random() < 0.25 else ()
        while text in seen:
            text = _fill(draw.choice(TEMPLATES[category]), draw)
        seen.add(text)
        yield Prompt(f"{category}-{number}", category, (text, *more))


# Cleaner questions than those of 1.0, and hardly fewer of them. At once, as many as a CPU's memory of keys holds.
ASK_TEMPERATURE, ASK_TOKENS, AT_ONCE, SHORTEST = 0.8, 56, 256, 20


def ask_target(client: Client, tokenizer: Tokenizer, count: int, known: Collection[str]) -> list[Prompt]:
    """Return questions that a target writes itself where a chat begins with a user's turn (Magpie, arXiv 2406.08464).

    Args:
        client: of a server with completions as OpenAI has them.
        tokenizer: the target's, with its chat template.
        count: how many.
        known: turns that are not asked again.
    """
    mark = "KCONV"
    before, _, _ = tokenizer.render_chat([{"role": "user", "content": mark}], answer=False).partition(mark)
    body = {"model": client.model, "prompt": before, "n": AT_ONCE, "max_tokens": ASK_TOKENS}
    draw, found = random.Random(count), dict[str, None]()
    with httpx.Client(base_url=client.url, timeout=1800) as server:
        # Of several answers to a seeded request vLLM seeds each, the i-th with seed + i:
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/parallel_sampling.py#L69-L82
        for seed in itertools.count(step=AT_ONCE):
            answer = server.post("/v1/completions", json=body | {"temperature": ASK_TEMPERATURE, "seed": seed})
            for choice in answer.raise_for_status().json()["choices"]:
                text = choice["text"].strip()
                if choice["finish_reason"] == "stop" and len(text) >= SHORTEST and text not in known:
                    found[text] = None
            if len(found) >= count:
                break
    return [
        Prompt(f"own-{number}", "own", (text, draw.choice(FOLLOW_UPS)) if draw.random() < 0.25 else (text,))
        for number, text in enumerate(itertools.islice(found, count))
    ]
