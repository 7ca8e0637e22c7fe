"""Give the demo's MLA head each of 40 faults, and list what `kconv validate` finds without a source.

    .venv/bin/python scripts/bench faults DEMO [--markdown]

DEMO is the folder that `scripts/demo` wrote. Each fault is validated like somebody else's head: beside the target and
held-out states, without a source or a manifest. Half a minute each on one core; what was found is kept in the cache.
`--markdown` writes the list into docs/evidence/validation.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from support import weight_faults
from support.heads import write_head
from support.weight_faults import BLOCKS, FAULTS

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.checkpoint.tensors import read_tensor
from kconv.convert.read import read_head, read_weights
from kconv.engines import by_name
from kconv.tiny.recipe import cache_root
from kconv.tiny.text import read_corpus
from kconv.validate import readings
from kconv.validate.head import validate_head
from kconv.validate.options import ValidateOptions

from .machine import KCONV

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "validation.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
RIGHT = "none"
Found = dict[str, Any]


def write_states(target: Path, work: Path) -> Path:
    """Store the states of all the target's layers over texts that no head was trained on."""
    texts = [text for text in read_corpus().held_out if len(text) > 300][:12]
    (work / "held-out.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = [KCONV, "states", target, work / "states", "--prompts", work / "held-out.jsonl", "--captured",
             "0,1,2,3,4,5,6", "--text-tokens", 56, "--prompt-tokens", 16, "--sampled", 40]  # fmt: skip
    subprocess.run([str(word) for word in words], check=True)
    return work / "states"


def judge(demo: Path, states: Path, name: str, work: Path) -> Found:
    """Return a broken head's acceptance length, and the rules that find fault with it, the worst first."""
    head = read_head(open_checkpoint(demo / "mla" / "trained"))
    spec, slots = head.spec, read_weights(head)
    if name != RIGHT:
        target = open_checkpoint(demo / "target")
        shared = read_tensor(target.tensors["model.embed_tokens.weight"])
        spec, slots = (FAULTS | BLOCKS)[name](spec, slots | {"embed_tokens": shared})
        if slots["embed_tokens"].equal(shared):
            del slots["embed_tokens"]
    folder = write_head(work / "head", by_name("vllm"), spec, slots)
    asked, target = ValidateOptions(states=str(states)), Folder(demo / "target")
    report = validate_head(Folder(folder), open_checkpoint(folder), asked, target=target, say=str)
    rules = {finding.rule: finding for finding in report.findings if finding.rule in RULES}
    shown = sorted(rules.values(), key=lambda one: ("error", "warning", "undecided", "note").index(one.severity))
    return {
        "length": next(row.length for row in report.figures.acceptance if row.drafter == "output"),
        "by": [(one.rule, one.severity, one.where) for one in shown],
    }


# Those that a fault can cause; the others speak of the launch.
RULES = ("K169", "K217", "K312", "K363", "K364", "K365", "K366")


def table(found: dict[str, Found]) -> list[str]:
    """Return the page's section."""
    faults = {name: one for name, one in found.items() if name != RIGHT}
    said = {name: [by for by in one["by"] if by not in found[RIGHT]["by"]] for name, one in faults.items()}
    worst = Counter(by[0][1] if by else "" for by in said.values())
    lines = [
        f"Of {len(faults)} faults {worst['error']} are an error, {worst['warning']} a warning, {worst['note']} a note, "
        f"and {worst['']} are not found. The right head's acceptance length is {found[RIGHT]['length']:.2f}.",
        "",
        "| fault | acceptance length | found by |",
        "|---|---|---|",
    ]
    for name, one in faults.items():
        by = ", ".join(rule if severity == "error" else f"{rule} ({severity})" for rule, severity, _ in said[name])
        lines.append(f"| {name} | {one['length']:.2f} | {by or 'nothing'} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="the folder that scripts/demo wrote")
    parser.add_argument("--markdown", action="store_true", help="write the list into docs/evidence/validation.md")
    wish = parser.parse_args()
    head = (wish.demo / "mla" / "trained" / "model.safetensors").read_bytes()
    sources = b"".join(Path(module.__file__).read_bytes() for module in (readings, weight_faults))
    kept = cache_root() / f"faults-{hashlib.sha256(sources + head).hexdigest()[:16]}.json"
    found: dict[str, Found] = json.loads(kept.read_text()) if kept.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        work, states = Path(folder), None
        for name in (RIGHT, *FAULTS, *BLOCKS):
            if name not in found:
                states = states or write_states(wish.demo / "target", work)
                with tempfile.TemporaryDirectory(dir=work) as own:
                    found[name] = judge(wish.demo, states, name, Path(own))
                kept.write_text(json.dumps(found))
                print(name, found[name], flush=True)
    lines = table(found)
    print("\n".join(lines))
    if wish.markdown:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]]))


if __name__ == "__main__":
    main()
