"""Right heads, and heads with a silent fault, as the real engines serve them beside the demo's target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import by_name, vllm
from kconv.engines.base import Serving
from kconv.engines.counters import Counts
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import cache_root
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus
from kconv.validate.engines.simulate import simulate

from . import families, silent_faults, trained_blocks
from .heads import with_own_keys
from .normed import NORMS_OF_3_1, write_normed
from .record_drafts import Job, SglangAnswer, fetch_triton, record_sglang, record_vllm
from .silent_faults import SILENT, SILENT_BLOCKS, SilentFault

STEPS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS, LONGER = 3, 16, 64, 20, 5
KINDS = ("mla", "gqa", "mha")
EAGLE_3_1 = ("mla EAGLE-3.1", "gqa EAGLE-3.1")
RIGHT = {
    engine: (*(f"{kind} {layout}" for kind in KINDS for layout in (engine, "portable")), *EAGLE_3_1)
    for engine in ("vllm", "sglang")
}
# SGLang has RoPE of an MLA head under YaRN alone, on a CPU; a head that was GQA has none.
CONVERTED = {"sglang": {"mha converted from mla": ("mla", "mha")}}
CONVERTED["vllm"] = CONVERTED["sglang"] | {"mla converted from gqa": ("gqa", "mla")}
# Of a block drafter, whose blocks draft more.
FEWER = 2
# Of a P-EAGLE head, by which vLLM knows that it is one.
NO_FLAG = "without parallel_drafting"
LONG, TREE = "mla sglang, K = 5", "mla sglang, tree"
# vLLM computes a target's MLA otherwise beside a head without, so those are served in another process.
Served = tuple[dict[str, "Witnessed"], list[list[int]]]
PROCESSES = (("mla",), ("gqa", "mha"))


@dataclass(frozen=True)
class Witnessed:
    """What an engine did with a head.

    Attributes:
        engine, head: who served which.
        same: how many outputs equal those without a head.
        prompts: of how many.
        drafts, places: verify steps, and how many accepted the token of each place.
        expected_drafts, expected_places: what kconv's chain gives; None for a head with a fault.
        unreached: the head's parameters that no tensor reached.
        rules: of kconv's, that name the fault.
        found: above a note, by `kconv validate` with this engine at work; None where it was not called.
        error: what the engine said where it did not serve.
    """

    engine: str
    head: str
    same: int = 0
    prompts: int = 0
    drafts: int = 0
    places: tuple[int, ...] = ()
    expected_drafts: int | None = None
    expected_places: tuple[int, ...] | None = None
    unreached: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    found: tuple[str, ...] | None = None
    error: str = ""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def length(self) -> float:
        return 1 + sum(self.places) / self.drafts if self.drafts else 0.0


def prompts_of(target: Path) -> list[list[int]]:
    """Return held-out text, as token ids."""
    stream = pack(load_tokenizer(target).inner, read_corpus().held_out)
    return stream[: PROMPTS * PROMPT_TOKENS].view(PROMPTS, PROMPT_TOKENS).tolist()


def write_right(demo: Path, root: Path, engine: str) -> dict[str, Path]:
    """Write the right heads of an engine from the demo's trained ones; by name."""
    trained = {kind: demo / kind / "trained" for kind in ("mla", "gqa")}
    trained["mha"] = with_own_keys(trained["gqa"], root / "mha")
    made: dict[str, Path] = {}
    for name in RIGHT[engine]:
        kind, layout = name.split()
        made[name] = root / name.replace(" ", "-")
        if layout == "EAGLE-3.1":
            write_normed(trained[kind], demo / "target", NORMS_OF_3_1, "portable", made[name])
        else:
            # In float32, which TensorRT-LLM alone does not run.
            without_limits = replace(by_name(layout), limits=())
            execute(plan(read_head(open_checkpoint(trained[kind])), without_limits), made[name])
    return made


def write_converted(demo: Path, root: Path, engine: str) -> dict[str, Path]:
    """Write the demo's heads with the other attention, for an engine that runs them on a CPU; by name.

    Calibrated on what they were trained on, and healed for a few steps.
    """
    lines = (json.dumps({"prompt": document[:300]}) for document in read_corpus().train[:80])
    (root / "text.jsonl").write_text("\n".join(lines) + "\n")
    made: dict[str, Path] = {}
    for name, (source, kind) in CONVERTED[engine].items():
        made[name] = root / f"{source}-to-{kind}"
        words = [f"to-{engine}", demo / source / "trained", made[name], "--attention", kind, "--context", 96]
        words += ["--target", demo / "target", "--prompts", root / "text.jsonl", "--heal", 6, "--min-retention", 0.8]
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == 0, done.output
    return made


def write_broken(right: Mapping[str, Path], root: Path, engine: str) -> dict[str, Path]:
    """Write heads with a fault each that concerns an engine; by the fault's name."""
    return {
        fault.name: silent_faults.write(fault, right[f"{fault.kind} {engine}"], root / str(number))
        for number, fault in enumerate(SILENT)
        if engine in fault.engines
    }


def rules_that_name(fault: SilentFault, folder: Path, engine: str, demo: Path) -> tuple[str, ...]:
    """Return the fault's warning, if `kconv validate` finds it with the target, and all that keeps it from a PASS."""
    return rules_of(fault, folder, engine, demo / "target", demo / fault.kind / "trained")


def rules_of(fault: SilentFault, folder: Path, engine: str, target: Path, source: Path) -> tuple[str, ...]:
    """See `rules_that_name`."""

    def found(*more: str | Path) -> list[dict[str, str]]:
        words = ("validate", folder, "--for", engine, "--json", *more)
        return json.loads(CliRunner().invoke(main, [str(word) for word in words]).stdout)["findings"]

    warned = found("--target", target) if fault.warning else []
    named = [one["rule"] for one in warned if one["rule"] == fault.warning]
    graver = ("error", "undecided")
    named += [one["rule"] for one in found("--source", source) if one["severity"] in graver]
    return tuple(dict.fromkeys(named))


def found_in(head: Path, engine: str, python: Path, target: Path, prompts: Path, steps: int = STEPS) -> tuple[str, ...]:
    """Return the warnings and errors of `kconv validate`, which starts the engine and holds its counts too."""
    words = ["validate", head, "--for", engine, "--target", target, "--prompts", prompts]
    words += ["--engine", engine, "--engine-python", python, "--new-tokens", NEW_TOKENS, "--json"]
    words += ["--draft-tokens", steps]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.stdout, done.output
    report = json.loads(done.stdout)
    assert report["figures"]["engine"]["drafts"] > 0
    return tuple(dict.fromkeys(one["rule"] for one in report["findings"] if one["severity"] != "note"))


def serve_sglang(python: Path, demo: Path, heads: Mapping[str, Path], folder: Path) -> Served:
    """Have SGLang serve heads; "" is none, whose outputs the others must have. A chain of 5 and a tree beside them."""
    target = demo / "target"
    jobs = {"": Job(target, look_ahead=LONGER - 1)} | {name: Job(target, head) for name, head in heads.items()}
    jobs[LONG] = Job(target, heads["mla sglang"], steps=LONGER)
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    jobs[TREE] = Job(target, heads["mla sglang"], more=tree)
    answers = record_sglang(python, jobs, prompts_of(target), folder, new_tokens=NEW_TOKENS)
    own = answers[""].outputs
    return {name: _in_sglang(name, one, own) for name, one in answers.items()}, own


def serve_vllm(python: Path, demo: Path, heads: Mapping[str, Path], folder: Path) -> Served:
    """Have vLLM serve heads; see `serve_sglang`."""
    found: dict[str, Witnessed] = {}
    own: list[list[int]] = []
    for kinds in PROCESSES:
        mine = {name: head for name, head in heads.items() if read_kind(head) in kinds}
        (work := folder / kinds[0]).mkdir()
        answers = record_vllm(
            python, demo / "target", mine, prompts_of(demo / "target"), work, steps=STEPS, new_tokens=NEW_TOKENS,
            look_ahead=LONGER - 1, together=True,
        ).answers  # fmt: skip
        own = own or answers[""]["outputs"]
        found |= {name: _in_vllm(name, answers[name], own) for name in mine}
    return found, own


def serve_families(engine: str, python: Path, trained: Mapping[str, Path], folder: Path) -> dict[str, Witnessed]:
    """Have an engine serve the heads of other targets than Kimi-K2's, with what kconv's chain of each gives beside.

    Args:
        engine: whose layout the heads have.
        python: of the engine's environment.
        trained: see `families.train_families`.
        folder: to work in.
    """
    heads = families.convert_families(trained, engine, folder / "heads")
    served = _families_in_vllm if engine == "vllm" else _families_in_sglang
    found: dict[str, Witnessed] = {}
    for kind, (answers, own) in served(python, trained, heads, folder).items():
        target = trained[kind] / "target"
        model = load_target(target, torch.float32)
        for name, head in heads[kind].items():
            found[name] = expect(answers[name], head, model, target, own)
    return found


def _families_in_vllm(python, trained, heads, folder) -> dict[str, Served]:
    found: dict[str, Served] = {}
    for kind, own_heads in heads.items():
        target = trained[kind] / "target"
        (work := folder / kind).mkdir()
        answers = record_vllm(
            python, target, own_heads, prompts_of(target), work, steps=STEPS, new_tokens=NEW_TOKENS,
            look_ahead=STEPS - 1, together=True,
        ).answers  # fmt: skip
        own = answers[""]["outputs"]
        found[kind] = {name: _in_vllm(name, answers[name], own) for name in own_heads}, own
    return found


def _families_in_sglang(python, trained, heads, folder) -> dict[str, Served]:
    targets = {kind: trained[kind] / "target" for kind in heads}
    jobs = {kind: Job(target, look_ahead=STEPS - 1) for kind, target in targets.items()}
    for kind, own_heads in heads.items():
        jobs |= {name: Job(targets[kind], head) for name, head in own_heads.items()}
    # All have the same tokenizer.
    prompts = prompts_of(next(iter(targets.values())))
    answers = record_sglang(python, jobs, prompts, folder, new_tokens=NEW_TOKENS)
    own = {kind: answers[kind].outputs for kind in heads}
    return {
        kind: ({name: _in_sglang(name, answers[name], own[kind]) for name in own_heads}, own[kind])
        for kind, own_heads in heads.items()
    }


def write_broken_blocks(right: Mapping[str, Path], engine: str, folder: Path) -> dict[str, Path]:
    """Give right block drafters of an engine's layout a fault each; return the folders."""
    faults = [fault for fault in SILENT_BLOCKS if engine in fault.engines]
    return {
        fault.name: silent_faults.write(fault, right[f"{fault.kind} {engine}"], folder / str(number))
        for number, fault in enumerate(faults)
    }


def serve_blocks(
    engine: str,
    python: Path,
    targets: Mapping[str, Path],
    right: Mapping[str, Path],
    folder: Path,
    broken: Mapping[str, Path] | None = None,
) -> dict[str, Witnessed]:
    """Have an engine serve block drafters; return what it did with each, and what kconv's forward gives of right ones.

    Args:
        engine: whose layout they have.
        python: of the engine's environment.
        targets: see `trained_blocks.train_blocks`.
        right: see `trained_blocks.convert_blocks`.
        folder: to work in.
        broken: see `write_broken_blocks`.
    """
    broken = broken or {}
    faults = {fault.name: fault for fault in SILENT_BLOCKS if fault.name in broken}
    specs = {name: read_head(open_checkpoint(head)).spec for name, head in right.items()}
    servings = {
        name: Serving(python, targets[trained_blocks.target_of(name)], head, spec, spec.drafter.draft_tokens(spec))
        for name, head in right.items()
        for spec in [specs[name]]
    }
    fewer = f"DFlash {engine}"
    servings[f"{fewer}, K = {FEWER}"] = replace(servings[fewer], draft_tokens=FEWER)
    if (parallel := f"{trained_blocks.P_EAGLE} {engine}") in servings:
        servings[f"{parallel}, {NO_FLAG}"] = replace(servings[parallel], spec=replace(specs[parallel], mask=None))
    for name, fault in faults.items():
        good = f"{fault.kind} {engine}"
        spec = fault.taken(specs[good])
        servings[name] = replace(servings[good], head=broken[name], spec=spec, draft_tokens=spec.places)
    ahead = max(one.draft_tokens for one in servings.values()) - 1
    prompts = prompts_of(targets["kimi"])
    served = _blocks_in_vllm if engine == "vllm" else _blocks_in_sglang
    found: dict[str, Witnessed] = {}
    for kind, (answers, own) in served(python, targets, servings, prompts, folder, ahead).items():
        model = load_target(targets[kind], torch.float32)
        for name, one in answers.items():
            good = right.get(name.partition(",")[0])
            known = name not in faults and good is not None and NO_FLAG not in name
            found[name] = expect(one, good, model, targets[kind], own, servings[name].draft_tokens) if known else one
    return found


def _blocks_in_vllm(python, targets, servings, prompts, folder, ahead) -> dict[str, Served]:
    found: dict[str, Served] = {}
    for kind, target in targets.items():
        mine = {name: one for name, one in servings.items() if one.target == target}
        if not mine:
            continue
        # Only the V2 runner has dspark.
        in_v2 = {name: one for name, one in mine.items() if (vllm.speculation(one) or {})["method"] == "dspark"}
        in_v1 = {name: one for name, one in mine.items() if name not in in_v2}
        answers: dict[str, dict] = {}
        for part, triton in ((in_v1, None), (in_v2, fetch_triton(python, cache_root()))):
            (work := folder / f"{kind}-{'v2' if triton else 'v1'}").mkdir()
            if part:
                answers |= record_vllm(
                    python, target, part, prompts, work, steps=0, new_tokens=NEW_TOKENS, look_ahead=ahead,
                    together=True, triton=triton,
                ).answers  # fmt: skip
        own = answers[""]["outputs"]
        found[kind] = {name: _in_vllm(name, answers[name], own) for name in mine}, own
    return found


def _blocks_in_sglang(python, targets, servings, prompts, folder, ahead) -> dict[str, Served]:
    jobs = {kind: Job(target, look_ahead=ahead) for kind, target in targets.items()}
    jobs |= {name: Job(one.target, one.head, one.spec, one.draft_tokens) for name, one in servings.items()}
    answers = record_sglang(python, jobs, prompts, folder, new_tokens=NEW_TOKENS)
    found: dict[str, Served] = {}
    for kind, target in targets.items():
        own, mine = answers[kind].outputs, [name for name, one in servings.items() if one.target == target]
        found[kind] = {name: _in_sglang(name, answers[name], own) for name in mine}, own
    return found


def read_kind(head: Path) -> str:
    """Return the attention of a head that is served, by its config."""
    config = json.loads((head / "config.json").read_text())
    if config.get("kv_lora_rank"):
        return "mla"
    return "mha" if config["num_key_value_heads"] == config["num_attention_heads"] else "gqa"


def _in_sglang(name: str, one: SglangAnswer, own: list[list[int]]) -> Witnessed:
    return _witnessed("sglang", name, one.outputs, own, one.counts, one.unreached, one.error)


def _in_vllm(name: str, answer: Mapping[str, Any], own: list[list[int]]) -> Witnessed:
    counted = {n.removeprefix("vllm:spec_decode_num_"): v for n, v in answer.get("counters", {}).items()}
    places = tuple(counted.get("accepted_tokens_per_pos", ()))
    counts = Counts(counted["drafts"][0], sum(places), places) if places else None
    said = answer.get("outputs", []), own, counts, answer.get("unreached"), answer.get("error", "")
    return _witnessed("vllm", name, *said)


def _witnessed(engine, name, outputs, own, counts, unreached, error) -> Witnessed:
    same = sum(mine == output[: len(mine)] for mine, output in zip(outputs, own, strict=False))
    if counts is None:
        return Witnessed(engine, name, same, len(own), error=error.strip().rpartition("\n")[2])
    places = tuple(int(place) for place in counts.per_position or ())
    return Witnessed(engine, name, same, len(own), int(counts.drafts), places, unreached=tuple(unreached or ()))


def expect(one: Witnessed, head: Path, model, target: Path, own: list[list[int]], steps: int = STEPS) -> Witnessed:
    """Put beside what an engine did what kconv's chain of the head gives.

    Args:
        one: what it did.
        head, model, target: the head's folder, the target and the target's folder.
        own: what the target continues by, at least `steps` - 1 tokens longer than what was served.
        steps: K.
    """
    texts = [output[: NEW_TOKENS + steps - 1] for output in own]
    said = simulate(read_head(open_checkpoint(head)), model, target, prompts_of(target), texts, steps)
    places = tuple(int(place) for place in said.accepted)
    return replace(one, expected_drafts=said.drafts, expected_places=places)


def load(demo: Path):
    """Return the demo's target."""
    return load_target(demo / "target", torch.float32)
