"""Write the cards in docs/cards from the facts and the quoted figures next to them.

    scripts/docs cards [OUT]

With OUT, writes there and leaves docs/ alone.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from kconv.bench.acceptance import read_acceptance
from kconv.cards.card import gather, make_card, write
from kconv.cards.facts import read_facts

DOCS = Path(__file__).parents[2] / "docs"
STYLES = {
    "kimi-k2.6-eagle3": "nvidia",
    "kimi-k2-thinking-eagle3": "nvidia",
    "kimi-k2.5-thinking-eagle3": "nvidia",
    "kimi-k2.6-eagle3-mla": "compact",
    "kimi-k2.5-eagle3-mla": "compact",
}

# A link may lead to a card alone.
EXAMPLE = "> An example, made by kconv from what the publisher's card says; it is not the publisher's own."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=DOCS)
    out = parser.parse_args().out
    for name, style in STYLES.items():
        given = DOCS / "cards" / name
        files = [given / "acceptance.json"]
        with tempfile.TemporaryDirectory() as made:
            figures = [read_acceptance(file) for file in files if file.exists()]
            evidence = gather(Path(made), None, read_facts(given / "facts.yaml"), figures)
            write(Path(made), make_card(evidence, style))
            card = Path(made) / "README.md"
            card.write_text(card.read_text().replace("\n# ", f"\n{EXAMPLE}\n\n# ", 1))
            shutil.copytree(made, out / "cards" / name, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
