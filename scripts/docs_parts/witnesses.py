"""Write what vLLM and SGLang themselves do with right heads, and with silent faults.

The page is docs/evidence/witnesses.md; parts of it are in README.md and docs/engines/.

    scripts/docs witnesses                       write the page from what is recorded
    scripts/docs witnesses --check               exit 1 where the page says something else
    scripts/docs witnesses --measure sglang      serve each head first, right or not
    scripts/docs witnesses --validate sglang     first call kconv validate --engine on each right head
    scripts/docs witnesses --sweep sglang        first call kconv bench --draft-tokens 1-8

Each of the three also accepts vllm, and takes minutes: validate starts two servers per head, bench one per
K. Results are recorded head by head, in witnesses.json and sweep.json of docs/evidence. The environments that they
serve from (scripts/engine-env) and the demo are created if missing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
PAGE, RECORD = EVIDENCE / "witnesses.md", EVIDENCE / "witnesses.json"
SWEEP, SWEPT = EVIDENCE / "sweep.json", 12  # prompts
README, ENGINES = ROOT / "README.md", ROOT / "docs" / "engines"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
# Those that the engines' pages show, and first those of README, the worst first.
SHORT = (
    "kv_b_proj lost",
    "max_position_embeddings below the text's length",
    "fc.weight lost",
    "a different rope_theta, GQA",
    "each captured layer listed one too early, GQA",
    "up_proj lost",
    "no captured layers listed",
)
IN_README = SHORT[:5]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    for work in WORK:
        parser.add_argument(f"--{work}", choices=TITLES, action="append", default=[], help="see above")
    parser.add_argument("--demo", type=Path, help="the demo's folder, where it is there already")
    options = parser.parse_args()
    for work, do in WORK.items():
        for engine in getattr(options, work):
            with tempfile.TemporaryDirectory() as name:
                root = Path(name)
                made = subprocess.run(
                    [ROOT / "scripts" / "engine-env", engine], stdout=subprocess.PIPE, text=True, check=True
                )
                do(engine, Path(made.stdout.strip()), options.demo or make_demo(root / "demo"), root)
    rows = read_rows()
    fresh = True
    blocks = page_blocks(rows) | {"sweep": sweeps(json.loads(SWEEP.read_text()) if SWEEP.exists() else {})}
    pages = [(PAGE, blocks), (README, {"silent faults": shortest(rows)})]
    pages += [(ENGINES / f"{engine}.md", {"faults": engine_faults(rows, engine)}) for engine in TITLES]
    for page, blocks in pages:
        old = new = page.read_text()
        for name, lines in blocks.items():
            before, begin, rest = new.partition(BEGIN.format(name))
            _, end, after = rest.partition(END.format(name))
            if not (begin and end):
                raise SystemExit(f"{page.name} has no block {name!r}")
            new = "\n".join([before + begin, *lines, end]) + after
        if new != old:
            fresh = False
            if not options.check:
                page.write_text(new)
    return 0 if fresh or not options.check else 1


def read_rows() -> list[dict]:
    """Return what is recorded of heads."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else []


def record(rows: list[dict], whole: str = "") -> None:
    """Write rows in the place of those of the same engines and heads; of `whole`, an engine, keep no others."""
    old = {(row["engine"], row["head"]): row for row in read_rows() if row["engine"] != whole}
    known = old | {(row["engine"], row["head"]): row for row in rows}
    ordered = sorted(known.values(), key=lambda row: list(TITLES).index(row["engine"]))
    RECORD.write_text("[\n" + ",\n".join(json.dumps(row) for row in ordered) + "\n]\n")


def right_ones(engine: str, demo: Path, root: Path) -> dict[str, tuple[Path, Path]]:
    """Write all right heads of an engine's, and return each one's folder and its target's, by name."""
    from support import families, witness

    from kconv.tiny.recipe import TEST, cache_root
    from kconv.tiny.target import make_target

    for part in ("right", "converted"):
        (root / part).mkdir()
    made = witness.write_right(demo, root / "right", engine) | witness.write_converted(demo, root / "converted", engine)
    found = {name: (head, demo / "target") for name, head in made.items()}
    trained = families.train_families(cache_root(), make_target(TEST, cache_root()))
    for kind, heads in families.convert_families(trained, engine, root / "families").items():
        found |= {name: (head, trained[kind] / "target") for name, head in heads.items()}
    return found


def measure(engine: str, python: Path, demo: Path, root: Path) -> None:
    """Serve every head of an engine's, and record what it accepts."""
    from dataclasses import replace

    from support import families, witness

    right = right_ones(engine, demo, root)
    own_target = {name: head for name, (head, target) in right.items() if target == demo / "target"}
    (root / "broken").mkdir()
    broken = witness.write_broken(own_target, root / "broken", engine)
    (root / "served").mkdir()
    serve = {"vllm": witness.serve_vllm, "sglang": witness.serve_sglang}[engine]
    found, own = serve(python, demo, own_target | broken, root / "served")
    model = witness.load(demo)
    by_name = {fault.name: fault for fault in witness.SILENT}
    findings = {row["head"]: row.get("found") for row in read_rows() if row["engine"] == engine}

    def write(rows: list[witness.Witnessed], whole: str = "") -> None:
        record([replace(one, found=findings.get(one.head)).to_json() for one in rows], whole)

    rows = []
    for head, one in found.items():
        if head in own_target:
            one = witness.expect(one, own_target[head], model, demo / "target", own)
        elif head == witness.LONG:
            one = witness.expect(one, own_target["mla sglang"], model, demo / "target", own, witness.LONGER)
        elif head in broken:
            one = replace(one, rules=witness.rules_that_name(by_name[head], broken[head], engine, demo))
        if head:
            rows.append(one)
    write(rows, whole=engine)
    trained = {kind: right[f"{kind} target"][1].parent for kind in families.KINDS[engine]}
    (root / "others").mkdir()
    write(list(witness.serve_families(engine, python, trained, root / "others").values()))
    measure_blocks(engine, python, root)


def measure_blocks(engine: str, python: Path, root: Path) -> None:
    """Serve every block drafter of an engine's, and record what it accepts."""
    from dataclasses import replace

    from support import silent_faults, trained_blocks, witness

    from kconv.tiny.recipe import TEST, cache_root
    from kconv.tiny.target import make_target

    targets, trained = trained_blocks.train_blocks(cache_root(), make_target(TEST, cache_root()))
    (root / "blocks").mkdir()
    right = trained_blocks.convert_blocks(trained, engine, root / "blocks" / "right")
    broken = witness.write_broken_blocks(right, engine, root / "blocks" / "broken")
    found = witness.serve_blocks(engine, python, targets, right, root / "blocks", broken)
    for fault in silent_faults.SILENT_BLOCKS:
        if fault.name in broken:
            asked = fault, broken[fault.name], engine, targets["qwen3"], trained[fault.kind]
            found[fault.name] = replace(found[fault.name], rules=witness.rules_of(*asked))
    record([one.to_json() for one in found.values()])


def validate(engine: str, python: Path, demo: Path, root: Path) -> None:
    """Call kconv validate with the engine at work on each right head, and record what it finds."""
    from support import witness

    right = right_ones(engine, demo, root)
    if "mla sglang" in right:
        right[witness.LONG] = right["mla sglang"]
    with one_plain_server():
        for name, (head, target) in right.items():
            steps = witness.LONGER if name == witness.LONG else witness.STEPS
            found = witness.found_in(head, engine, python, target, demo / "held-out.jsonl", steps)
            print(f"{engine}, {name}: {', '.join(found) or 'nothing'}", flush=True)
            known = {(row["engine"], row["head"]): row for row in read_rows()}
            new = asdict(witness.Witnessed(engine, name))
            record([known.get((engine, name), new) | {"found": found}])


@contextmanager
def one_plain_server() -> Iterator[None]:
    """Let kconv validate keep the server of a target without a head, which each head of that target is held against."""
    from kconv.serving.start import serve
    from kconv.validate.engines import check

    with ExitStack() as open_:
        running: dict[str, object] = {}

        def once(serving, engine):
            if serving.head is not None:
                return serve(serving, engine)
            if (key := str(serving)) not in running:
                open_.close()
                running.clear()
                running[key] = open_.enter_context(serve(serving, engine))
            return nullcontext(running[key])

        check.serve = once
        yield


def sweep(engine: str, python: Path, demo: Path, root: Path) -> None:
    """Measure a head of the demo's at each K, in the engine and by kconv's own forward, and record both."""
    from click.testing import CliRunner

    from kconv.bench.acceptance import read_acceptance
    from kconv.cli import main as kconv
    from kconv.tiny.text import read_corpus

    def call(*words: object) -> None:
        ran = CliRunner().invoke(kconv, [str(word) for word in words])
        assert ran.exit_code == 0, ran.output

    texts = [" ".join(text.split()[:24]) for text in read_corpus().held_out if len(text.split()) > 24]
    (suite := root / "held-out.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts[:SWEPT]))
    asked = ["bench", "--head", demo / "mla" / "vllm", "--target", demo / "target", "--suite", suite, "--draft-tokens",
             "1-8", "--max-tokens", 48, "--reasoning", "off"]  # fmt: skip
    served = ["--engine", engine, "--engine-python", python, "--target-name", "tiny-kimi-k2", "--ready-seconds", 1800]
    if engine == "sglang":
        call("to-sglang", demo / "mla" / "trained", root / "head")
        asked[2] = root / "head"
    call(*asked, *served, "--out", root / "served.json")
    call(*asked, "--target-name", "tiny-kimi-k2", "--out", root / "own.json")
    call("curve", root / "served.json", "--category", "", "--out", root / "curve.yaml")
    found, own = (read_acceptance(root / f"{name}.json") for name in ("served", "own"))
    whole = [{r.draft_tokens: r for r in one.rows if r.averaging == "micro_steps" and not r.category}
             for one in (found, own)]  # fmt: skip
    runs = dict(zip(sorted(whole[0]), found.provenance["runs"], strict=True))
    rows = [
        {"k": k, "value": row.value, "drafts": row.drafts, "own_value": whole[1][k].value,
         "own_drafts": whole[1][k].drafts} | {name: runs[k][name] for name in ("by_request", "by_counters")}
        for k, row in whole[0].items()
    ]  # fmt: skip
    curve = (root / "curve.yaml").read_text().replace(str(asked[2]), "demo/mla")
    known = json.loads(SWEEP.read_text()) if SWEEP.exists() else {}
    known[engine] = {"prompts": SWEPT, "rows": rows, "curve": curve}
    SWEEP.write_text(json.dumps({name: known[name] for name in TITLES if name in known}, indent=1) + "\n")


WORK = {"measure": measure, "validate": validate, "sweep": sweep}


def make_demo(out: Path) -> Path:
    """Train the demo's target and heads, as the engine tests have them."""
    from dataclasses import replace

    from kconv.pipeline.demo import RECIPE, run_demo
    from kconv.tiny.recipe import cache_root

    @contextmanager
    def quiet(_):
        yield lambda *_: None

    run_demo(out, cache_root(), quiet, replace(RECIPE, prompts=4))
    return out


def page_blocks(rows: list[dict]) -> dict[str, list[str]]:
    """Return the page's tables, by the names of their blocks."""
    from support.silent_faults import SILENT, SILENT_BLOCKS

    return {
        "right heads": right_heads(rows),
        "silent faults": faults(rows, SILENT),
        "silent faults of block drafters": faults(rows, SILENT_BLOCKS),
        "trees": trees(rows),
    }


def right_heads(rows: list[dict]) -> list[str]:
    """Return the table of heads that are right: those whose counts agree in a row, and what does not agree below."""
    from kconv.validate.markdown import table

    served = [row for row in rows if row["expected_drafts"] is not None]
    equal = [
        row for row in served if (row["drafts"], row["places"]) == (row["expected_drafts"], row["expected_places"])
    ]
    called = [row for row in served if row.get("found") is not None]
    same = [row for row in equal if row["same"] == row["prompts"]]
    engines_of: dict[tuple[str, str], list[str]] = {}
    for row in same:
        words = (word for word in row["head"].replace(",", " ,").split() if word != row["engine"])
        name = " ".join(words).replace(" ,", ",")
        engines_of.setdefault((counts(row["drafts"], row["places"]), name), []).append(TITLES[row["engine"]])
    heads_of: dict[tuple[str, str], list[str]] = {}
    for (counted, name), engines in engines_of.items():
        heads_of.setdefault((counted, ", ".join(engines)), []).append(name)
    lines = [("; ".join(names), engines, counted) for (counted, engines), names in heads_of.items()]
    others = [
        f"- {TITLES[row['engine']]}, {row['head']}: {row['same']} of {row['prompts']} outputs, "
        f"{counts(row['drafts'], row['places'])} instead of {counts(row['expected_drafts'], row['expected_places'])}"
        for row in served if row not in same
    ] + [
        f"- {TITLES[row['engine']]}, {row['head']}: {', '.join(row['found'])}" for row in called if row["found"]
    ]  # fmt: skip
    clean = sum(not row["found"] for row in called)
    return [
        *table(("head", "engines", "verify steps: accepted at each place"), lines), "",
        *([*others, ""] if others else []),
        f"Equal to the last token: {len(same)} of {len(served)}. Nothing above a note: {clean} of {len(called)}.",
    ]  # fmt: skip


def faults(rows: list[dict], changes: Iterable[Any]) -> list[str]:
    """Return a table of faults, a row for each, with what every engine accepts."""
    from kconv.validate.markdown import table

    by_name = {(row["engine"], row["head"]): row for row in rows}
    lines, found = [], []
    for fault in changes:
        own = [by_name.get((engine, fault.name)) for engine in TITLES]
        engines = [engine for engine, row in zip(TITLES, own, strict=True) if row]
        right = {f"{length(by_name[engine, f'{fault.kind} {engine}']):.3f}" for engine in engines}
        found += (there := [row for row in own if row])
        rules = (rule for row in there for rule in [*row["rules"], *(["K703"] if row["unreached"] else [])])
        named = dict.fromkeys(rules)
        cells = ["–" if row is None else row["error"] or f"{length(row):.3f}" for row in own]
        if there:
            lines.append((fault.name, *cells, ", ".join(sorted(right)), ", ".join(named)))
    heads = ("change to a correct head", *(f"{title} accepts" for title in TITLES.values()), "right head", "found by")
    silent, named = sum(not row["error"] for row in found), sum(bool(row["rules"]) for row in found)
    return [
        *table(heads, lines), "",
        f"Served silently: {silent} of {len(found)}. Named by a rule: {named} of {len(found)}.",
    ]  # fmt: skip


def sweeps(found: dict) -> list[str]:
    """Return the table of K from 1 to 8, and the curve that kconv curve makes of it."""
    from kconv.validate.markdown import table

    def total(counts: dict) -> str:
        return f"{counts['drafts']:g}: {counts['accepted']:g}"

    def all_of(values: list[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    rows = [row for one in found.values() for row in one["rows"]]
    lines = []
    for k in sorted({row["k"] for row in rows}):
        own = {engine: row for engine, one in found.items() for row in one["rows"] if row["k"] == k}
        lengths = [f"{row[name]:.3f}" for row in own.values() for name in ("value", "own_value")]
        steps = [f"{row[name]:g}" for row in own.values() for name in ("drafts", "own_drafts")]
        accepted = [
            all_of([f"{row[by]['accepted']:g}" for by in ("by_request", "by_counters")]) for row in own.values()
        ]
        lines.append((str(k), all_of(lengths), all_of(steps), *accepted))
    equal = sum(
        (f"{row['value']:.3f}", f"{row['drafts']:g}", total(row["by_request"]))
        == (f"{row['own_value']:.3f}", f"{row['own_drafts']:g}", total(row["by_counters"]))
        for row in rows
    )
    heads = ("K", "acceptance length", "verify steps", *(f"accepted in {TITLES[engine]}" for engine in found))
    values = {tuple(line for line in one["curve"].splitlines() if not line.startswith("#")) for one in found.values()}
    which = "the same values" if len(values) == 1 else "other values"
    curve = f"`kconv curve` writes {which} for each engine (`docs/evidence/sweep.json`)."
    said = f"Equal to kconv's own forward, and answers to counters: {equal} of {len(rows)}. {curve}"
    return [*table(heads, lines), "", said]


def trees(rows: list[dict]) -> list[str]:
    """Return the table of trees."""
    from kconv.validate.markdown import table

    named = {"mla sglang": "chain of 3", "mla sglang, K = 5": "chain of 5", "mla sglang, tree": "topk=4,nodes=8"}
    by_name = {row["head"]: row for row in rows if row["engine"] == "sglang"}
    lines = [
        (said, str(by_name[n]["drafts"]), f"{length(by_name[n]):.3f}") for n, said in named.items() if n in by_name
    ]
    return table(("--tree", "verify steps", "acceptance length"), lines)


# What a rule needs besides the head's files.
ASKED_OF = {"K006": "its files leave it open", "K215": "`--target`, as a warning", "K303": "`--source`"}


def shortest(rows: list[dict]) -> list[str]:
    """Return README's part of the table of faults."""
    from support.silent_faults import SILENT

    from kconv.validate.markdown import table

    lines = []
    right = {(row["engine"], row["head"]): row for row in rows}
    for fault in sorted((one for one in SILENT if one.name in IN_README), key=lambda one: IN_README.index(one.name)):
        served = {engine: right.get((engine, fault.name)) for engine in TITLES}
        good = [right[engine, f"{fault.kind} {engine}"] for engine, row in served.items() if row]
        whole = " or ".join(dict.fromkeys(f"{length(row):.2f}" for row in good))
        cells = [fault.name, whole, *(f"{length(row):.2f}" if row else "–" for row in served.values())]
        both = [row["rules"] for row in rows if row["head"] == fault.name]
        named: dict[str, list[str]] = {}
        for rule in dict.fromkeys(rule for rules in both for rule in rules):
            named.setdefault(ASKED_OF.get(rule, "its files"), []).append(rule)
        cells.append("; ".join(f"{what} ({', '.join(rules)})" for what, rules in named.items()))
        lines.append(cells)
    return table(("change to a correct head", "before", *TITLES.values(), "found with"), lines)


def engine_faults(rows: list[dict], engine: str) -> list[str]:
    """Return one engine's faults, for its page."""
    from support.silent_faults import SILENT

    kinds = {fault.name: fault.kind for fault in SILENT}
    own = {row["head"]: row for row in rows if row["engine"] == engine}
    lines = [
        f"- {name}: {length(row):.3f} instead of {length(own[f'{kinds[name]} {engine}']):.3f} "
        f"({', '.join(row['rules'])}{', K703' if row['unreached'] else ''})"
        for name, row in own.items()
        if name in SHORT
    ]
    every = "[all](../evidence/witnesses.md#silent-faults)"
    said = f"The real engine's acceptance length; it reported none of these ({every}):"
    return [said, "", *lines]


def counts(drafts: int, places: list[int]) -> str:
    """Return counts as a cell."""
    return f"{drafts}: {', '.join(map(str, places))}"


def length(row: dict) -> float:
    """Return an acceptance length, bonus token included."""
    return 1 + sum(row["places"]) / row["drafts"] if row["drafts"] else 0.0


if __name__ == "__main__":
    sys.exit(main())
