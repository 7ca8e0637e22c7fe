"""Write into docs/guides/quantize.md how much quantizing a head's linear layers saves per draft step, from the shapes.

scripts/docs sizes            write it
scripts/docs sizes --check    exit 1 where the page says something else
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench_parts.heads import KIMI_MLA
from bench_parts.sizes import linear_bytes, quantized_bytes, step_bytes

from kconv.drafters.spec import Gqa
from kconv.quantize.head.formats import FORMATS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "quantize.md"
BEGIN, END = "<!-- sizes: begin -->", "<!-- sizes: end -->"
MHA = replace(KIMI_MLA, attention=Gqa(heads=64, kv_heads=64, head_dim=128), intermediate=12288)
HEADS = {
    "MLA": KIMI_MLA,
    "MHA": MHA,
    "MHA, draft vocabulary of 32,000": replace(MHA, draft_vocab=32000),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    check = parser.parse_args().check
    old = PAGE.read_text()
    before, _, rest = old.partition(BEGIN)
    new = "\n".join([before + BEGIN, *table(), END]) + rest.partition(END)[2]
    if new == old:
        return 0
    print(f"docs/guides/quantize.md {'is not current' if check else 'written'}")
    if not check:
        PAGE.write_text(new)
    return 1 if check else 0


def table() -> list[str]:
    """Return the table, in Markdown."""
    saves = " | ".join(f"{format_.name} saves" for format_ in FORMATS.values())
    lines = [
        f"| head | a step reads | quantized part | {saves} |",
        "|---|---|---|" + "---|" * len(FORMATS),
    ]
    for name, spec in HEADS.items():
        whole = step_bytes(spec)
        saved = [f"{1 - quantized_bytes(spec, format_) / whole:.0%}" for format_ in FORMATS.values()]
        cells = [name, f"{whole / 1e9:.2f} GB", f"{linear_bytes(spec) / 1e9:.2f} GB", *saved]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
