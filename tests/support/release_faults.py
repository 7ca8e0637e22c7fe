"""Releases with something wrong: each thing that the gate asks for, broken once, and the check that is there for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import yaml
from huggingface_hub import ModelCardData
from support.releases import FLOOR, FRONT, REPO, SUITE, write_acceptance, write_card, write_release, write_report

from kconv.bench.acceptance import AcceptanceFile, read_acceptance
from kconv.cards.evidence import Evidence
from kconv.cards.front_matter import results
from kconv.cards.publish.floor import Floor, read_floor
from kconv.cards.publish.gate import judge
from kconv.cards.publish.release import PNG, open_candidate
from kconv.validate.report import Finding

OVERRULED = Finding(
    rule="K307", severity="warning", where="config.json", message="Read otherwise.", fix="Convert again."
)
OPEN = Finding(rule="K006", severity="undecided", where="config.json", message="It is open.", fix="Say it.")
ERROR = Finding(rule="K101", severity="error", where="lm_head", message="It is not there.", fix="Add it.")


def candidate(folder: Path, floor: Floor | None = None):
    return open_candidate(folder, None, (), floor or read_floor(folder), repo=REPO)


def found(folder: Path, floor: Floor | None = None) -> list[str]:
    return [finding.rule for finding in _but_l3s_note(judge(candidate(folder, floor)))]


def said(folder: Path) -> list[str]:
    return [finding.message for finding in _but_l3s_note(judge(candidate(folder)))]


def _but_l3s_note(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings without the note that org/target's license is not stated, which nobody states here."""
    return [finding for finding in findings if (finding.rule, finding.severity) != ("L3", "note")]


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def edit(file: Path, **changed) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def set_floor(folder: Path, **changed) -> None:
    (folder / "release.yaml").write_text(yaml.safe_dump({"min_acceptance": FLOOR | changed}))


def foreign_report(folder: Path) -> None:
    other = write_release(folder.parent / "other", seed=1)
    (folder / "report.json").write_bytes((other / "report.json").read_bytes())


def check_for(folder: Path, engine: str) -> None:
    edit(folder / "report.json", provenance={"dtype": "float32", "for": [engine]})


def name_other_layers(folder: Path) -> None:
    """Write figures of the same weights under a config of other captured layers."""
    config = json.loads((folder / "config.json").read_text())
    other = json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    write_acceptance(folder, config=hashlib.sha256(other.encode()).hexdigest())


def alter_card(folder: Path, old: str, new: str) -> None:
    card = folder / "README.md"
    assert old in card.read_text()
    card.write_text(card.read_text().replace(old, new))


def index_figure(folder: Path, value: float) -> None:
    write_acceptance(folder)
    row = read_acceptance(folder / "acceptance.json").rows[0].model_copy(update={"value": value})
    held = AcceptanceFile(head="h", rows=(row,))
    indexed = ModelCardData(model_name="h", eval_results=results(Evidence(acceptance=(held,)))).to_dict()
    write_card(folder, FRONT | {"model-index": indexed["model-index"]})


def measure_twice(folder: Path) -> None:
    set_floor(folder, **SUITE)
    write_acceptance(folder)
    write_acceptance(folder, value=2.3, name="acceptance-1.json")


def link_out(folder: Path) -> None:
    (folder.parent / "NOTICE").write_text("elsewhere")
    (folder / "NOTICE").symlink_to(folder.parent / "NOTICE")


def record(folder: Path, name: str, content: bytes) -> None:
    """Write a file, and have the manifest list it as one of the head's."""
    (folder / name).write_bytes(content)
    held = json.loads((folder / "kconv.json").read_text())
    held["files"].append({"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    (folder / "kconv.json").write_text(json.dumps(held))


# In two parts, or this file would hold one itself.
RSA = "RSA PRIVATE " + "KEY"

BROKEN = {
    "a weight's byte": ("P101", lambda f: flip(f / "model.safetensors")),
    "a config's byte": ("P101", lambda f: flip(f / "config.json", 20)),
    "no weights": ("P101", lambda f: (f / "model.safetensors").unlink()),
    "no manifest": ("P101", lambda f: (f / "kconv.json").unlink()),
    "a manifest of another schema": ("P101", lambda f: edit(f / "kconv.json", schema=99)),
    "a file of the user's own": ("P102", lambda f: (f / "notes.txt").write_text("to do")),
    "a second weight file": ("P102", lambda f: (f / "old.ckpt").write_bytes(b"weights")),
    "weights in a folder of a license's name": (
        "P102", lambda f: (f / "LICENSE-x").mkdir() or (f / "LICENSE-x" / "pytorch_model.bin").write_bytes(b"weights"),
    ),
    "what a killed run left": ("P102", lambda f: (f / "sub").mkdir() or (f / "sub" / "x.safetensors").write_bytes(b"")),
    "a link to elsewhere": ("P103", link_out),
    "no report": (
        "P104", lambda f: (f / "report.json").unlink() or write_acceptance(f) or set_floor(f, **SUITE),
    ),
    "a report of another head": ("P105", foreign_report),
    "a report of the same weights under another config": (
        "P105", lambda f: edit(f / "report.json", config="0" * 64),
    ),
    "a report that does not say under which config": ("P105", lambda f: edit(f / "report.json", config="")),
    "a report of no weights": ("P105", lambda f: write_report(f, weights={})),
    "a report of one file more": ("P105", lambda f: write_report(f, weights={"model.safetensors": "0" * 64})),
    "a report with an error": ("P106", lambda f: write_report(f, findings=[ERROR])),
    "a report that leaves a fact open": ("P106", lambda f: write_report(f, findings=[OPEN])),
    "a report of a source that was read as its own files do not say": (
        "P106", lambda f: write_report(f, findings=[OVERRULED]),
    ),
    "a report for another engine": ("P106", lambda f: check_for(f, "sglang")),
    "a report for one of vLLM's two runners": ("P106", lambda f: check_for(f, "vllm-v1")),
    "not compared with the source": ("P107", lambda f: write_report(f, identical=None)),
    "found different from the source": ("P107", lambda f: write_report(f, identical=False)),
    "no floor": ("P108", lambda f: (f / "release.yaml").unlink()),
    "a recipe without a floor": ("P108", lambda f: (f / "release.yaml").write_text("name: test")),
    "below the floor": ("P109", lambda f: set_floor(f, at_least=2.6)),
    "a suite that was not measured": ("P109", lambda f: set_floor(f, **SUITE | {"suite": "SPEED-Bench"})),
    "a metric that was not measured": ("P109", lambda f: set_floor(f, metric="draft_accept_rate", at_least=0.5)),
    "measured at another K": ("P109", lambda f: set_floor(f, draft_tokens=5)),
    "measured on fewer prompts": ("P109", lambda f: set_floor(f, prompts=5)),
    "a part of the suite": (
        "P109", lambda f: set_floor(f, **SUITE, prompts=1) or write_acceptance(f, whole=False),
    ),
    "one prompt of the suite, at the largest K": (
        "P109", lambda f: set_floor(f, **SUITE) or write_acceptance(f, prompts=1, draft_tokens=16),
    ),
    "measured below the floor in a further file": ("P109", measure_twice),
    "a file's figure under the name of a report's text": (
        "P109", lambda f: set_floor(f, prompts=80) or write_acceptance(f, dataset="sampled"),
    ),
    "measured at another temperature": (
        "P109", lambda f: set_floor(f, **SUITE | {"temperature": 1.0}) or write_acceptance(f),
    ),
    "measured at a temperature that is not said": (
        "P109", lambda f: set_floor(f, **SUITE) or write_acceptance(f, temperature=None),
    ),
    "measured for another revision of the target": (
        "P109", lambda f: set_floor(f, **SUITE | {"target": "org/target@v2"}) or write_acceptance(f),
    ),
    "a report on another revision of the target": ("P109", lambda f: set_floor(f, target="org/target@v2")),
    "quoted, not measured": (
        "P109", lambda f: set_floor(f, **SUITE) or write_acceptance(f, measured_by="quoted", url="https://x"),
    ),
    "acceptance of other weights": ("P111", lambda f: write_acceptance(f, weights={"model.safetensors": "0" * 64})),
    "acceptance of the same weights under another config": ("P111", name_other_layers),
    "acceptance that does not say under which config": ("P111", lambda f: write_acceptance(f, config="")),
    "acceptance of other weights in a further file": (
        "P111", lambda f: write_acceptance(f, weights={"model.safetensors": "0" * 64}, name="acceptance-1.json"),
    ),
    "acceptance on another target": ("P117", lambda f: write_acceptance(f, target="other/model@main")),
    "acceptance of unknown weights": ("P112", lambda f: write_acceptance(f, weights={})),
    "no card": ("P113", lambda f: (f / "README.md").unlink()),
    "a card without metadata": ("P113", lambda f: (f / "README.md").write_text("# A head\n")),
    "metadata that is no YAML": ("P113", lambda f: (f / "README.md").write_text("---\na: [\n---\n")),
    "a figure of the report that was put in by hand": ("P113", lambda f: alter_card(f, "2.500 ±", "3.875 ±")),
    "a figure of acceptance.json that was put in by hand": (
        "P113", lambda f: write_acceptance(f) or alter_card(f, " 2.610 ", " 3.875 "),
    ),
    "a card that claims more of its weights": ("P113", lambda f: alter_card(f, "identical, bit by bit", "better")),
    "another K in the card": ("P113", lambda f: write_acceptance(f) or alter_card(f, "K = 3", "K = 1")),
    "a figure that only the metadata say": ("P113", lambda f: index_figure(f, 3.875)),
    "a serve line that names a folder": ("P116", lambda f: alter_card(f, f'"model": "{REPO}"', '"model": "rel"')),
    "a serve line that names a folder like a repository": (
        "P116", lambda f: alter_card(f, f'"model": "{REPO}"', '"model": "out/rel"'),
    ),
    "a serve line that names the target's folder": ("P116", lambda f: alter_card(f, "serve org/target", "serve out/t")),
    "a serve line without the target": ("P116", lambda f: alter_card(f, "serve org/target", "serve PATH_OR_ID")),
    "a serve line with a revision": ("P116", lambda f: alter_card(f, "serve org/target", "serve org/target@main")),
    "an unknown license": ("L2", lambda f: write_card(f, FRONT | {"license": "unknown"})),
    "no base model": ("L8", lambda f: write_card(f, {k: v for k, v in FRONT.items() if k != "base_model"})),
    "a license that is not linked": (
        "L2", lambda f: write_card(f, FRONT | {"license": "other", "license_name": "x", "license_link": "TERMS"}),
    ),
    "a license whose text is not there": ("L5", lambda f: (f / "LICENSE").unlink()),
    "a card that does not say what was changed": (
        "L6", lambda f: (f / "README.md").write_text((f / "README.md").read_text().replace("kconv.json", "it")),
    ),
    "metadata without a pipeline": (
        "P113", lambda f: write_card(f, {k: v for k, v in FRONT.items() if k != "pipeline_tag"}),
    ),
    "a picture that is not there": (
        "P113", lambda f: (f / "README.md").write_text((f / "README.md").read_text() + "![bars](acceptance.png)\n"),
    ),
    "a pickle that the manifest lists": ("P115", lambda f: record(f, "pytorch_model.bin", b"\x80\x04.")),
    "code that the manifest lists": ("P115", lambda f: record(f, "modeling_evil.py", b"print()")),
    "a hidden file that the manifest lists": ("P115", lambda f: record(f, ".env", b"A=1")),
    "git's attributes in the manifest": ("P115", lambda f: record(f, ".gitattributes", b"* text")),
    "a picture that is none": ("P115", lambda f: (f / "chart.png").write_bytes(b"GIF89a")),
    "a key beside the head": ("P114", lambda f: (f / "NOTICE_id_rsa").write_text(f"-----BEGIN {RSA}-----")),
    "a token in UTF-16": ("P114", lambda f: (f / "NOTICE.md").write_bytes(("hf_" + "a1B2" * 8).encode("utf-16"))),
    "a token in what the manifest lists": ("P114", lambda f: record(f, "vocab.json", b'"X_hf_%s"' % (b"a1B2" * 8))),
    "a token in a picture": ("P114", lambda f: (f / "a.png").write_bytes(PNG + b"hf_" + b"a1B2" * 8)),
    "a token in a file": ("P114", lambda f: (f / "NOTICE").write_text("hf_" + "a1B2" * 8)),
}  # fmt: skip


# A card that is not there does not say any of what it must.
ALONG = {"P102": {"P115"}, "P104": {"P107", "P110"}, "P113": {"L2", "L6", "L8"}, "L2": {"L5"}, "L6": {"P113"}}
