"""The card says what the manifest and the report say, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from support.block_drafters import DFLASH, DSPARK
from support.commands import NAMES, ran
from support.heads import GQA, MLA, random_slots, write_head

from kconv.cards.card import gather, make_card, write, write_card
from kconv.cards.facts import Facts, LicenseFacts, Serve
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints, read_manifest, write_manifest
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.drafters.captured import without_lists
from kconv.engines import by_name
from kconv.errors import ManifestMismatch, NotACheckpoint, OutputExists, ReportInvalid
from kconv.measure.figures import AcceptanceFigures, Figures, ReadingsDecided, TextFigures
from kconv.validate.report import Finding, make_report


@pytest.fixture
def output(tmp_path: Path) -> Path:
    source = write_head(tmp_path / "source", by_name("trtllm"), MLA, random_slots(MLA))
    execute(plan(read_head(open_checkpoint(source)), by_name("vllm")), tmp_path / "my-head")
    return tmp_path / "my-head"


@pytest.fixture(scope="module")
def portable(tmp_path_factory) -> Path:
    """Return a head for every engine, whose launch files name neither head nor target."""
    root = tmp_path_factory.mktemp("portable")
    source = write_head(root / "source", by_name("trtllm"), MLA, random_slots(MLA))
    execute(plan(read_head(open_checkpoint(source)), by_name("portable")), root / "head")
    return root / "head"


def report(folder: Path, findings=()):
    row = AcceptanceFigures(
        drafter="output", text="sampled", steps=3, drafts=100, length=2.5179, standard_error=0.0213,
        rates=(0.8, 0.5, 0.2179), note="n",
    )  # fmt: skip
    text = TextFigures(kind="sampled", sequences=4, tokens=128, distinct_4grams=0.97)
    figures = Figures(identical=True, texts=(text,), acceptance=(row,))
    return make_report(read_head(open_checkpoint(folder)), findings, figures, {"dtype": "float32"})


def test_the_hubs_own_card_class_reads_it(output):
    facts = Facts(base_model="moonshotai/Kimi-K2.6", license=LicenseFacts(id="mit"))
    card = ModelCard.load(write_card(output, report(output), facts))
    assert card.data.license == "mit"
    assert card.data.base_model == ["moonshotai/Kimi-K2.6"]
    assert "draft-model" in card.data.tags


@pytest.mark.parametrize(
    ("spec", "lead", "method", "places"),
    [(DFLASH, "A DFlash drafter", "dflash", 3), (DSPARK, "A DSpark drafter", "dspark", 4)],
    ids=["DFlash", "DSpark"],
)
def test_a_block_drafters_card_says_which_it_is_and_how_it_is_served(tmp_path, spec, lead, method, places):
    # SGLang's, so that vLLM's is another layout.
    source = write_head(tmp_path / "source", by_name("dflash-sglang"), spec, random_slots(spec))
    execute(plan(read_head(open_checkpoint(source)), by_name("dflash-vllm")), tmp_path / "head")
    card = make_card(gather(tmp_path / "head", None, Facts(name="org/head", base_model="org/target"))).text
    assert f"{lead} (GQA attention, BF16) for speculative decoding" in card and "in vLLM's layout." in card
    [[*_, told]] = ran(card.partition("```bash\n")[2].partition("```")[0], tmp_path)
    assert json.loads(told) == {"model": "org/head", "method": method, "num_speculative_tokens": places}


def test_a_p_eagle_heads_card_says_so_and_serves_it_with_its_flag(tmp_path):
    spec = replace(GQA, mask=3)
    source = write_head(tmp_path / "source", by_name("speculators"), spec, random_slots(spec))
    execute(plan(read_head(open_checkpoint(source)), by_name("vllm")), tmp_path / "head")
    card = make_card(gather(tmp_path / "head", None, Facts(name="org/head", base_model="org/target"))).text
    assert "A P-EAGLE draft head (GQA attention, BF16) for speculative decoding" in card
    [[*_, told]] = ran(card.partition("```bash\n")[2].partition("```")[0], tmp_path)
    assert json.loads(told) == {
        "model": "org/head", "method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 3,
    }  # fmt: skip


def test_a_manifest_that_describes_no_such_drafter_is_refused(output):
    manifest = read_manifest(output)
    write_manifest(output, manifest.model_copy(update={"spec": manifest.spec | {"rope": {"theta": "much"}}}))
    with pytest.raises(ManifestMismatch, match=r"describes no Eagle3 head.*rope.*theta"):
        make_card(gather(output, None, Facts(name="org/head", base_model="org/target")))


def test_what_rests_on_a_users_word_stays_on_the_card_through_conversions_until_it_is_measured(tmp_path):
    config = without_lists(by_name("trtllm").write_config(MLA))
    source = write_head(tmp_path / "source", by_name("trtllm"), MLA, random_slots(MLA), config)
    head = read_head(open_checkpoint(source), layout=by_name("trtllm"), hints=Hints(captured=MLA.captured))
    execute(plan(head, by_name("vllm")), tmp_path / "first")
    execute(plan(read_head(open_checkpoint(tmp_path / "first")), by_name("portable")), tmp_path / "second")
    (word,) = read_manifest(tmp_path / "second").unverified
    assert (word.fact, word.word) == ("captured", "--captured 1,3,5")
    row = "| **not verified** | captured: outputs of layers [1, 3, 5], by --captured 1,3,5 |"
    assert row in make_card(gather(tmp_path / "second", report(tmp_path / "second"), Facts())).text
    file = report(tmp_path / "second")
    decided = file.figures.model_copy(update={"decided": ReadingsDecided(winner=0, confirmed=("captured",))})
    told = make_card(gather(tmp_path / "second", file.model_copy(update={"figures": decided}), Facts()))
    assert "not verified" not in told.text


def test_it_states_acceptance_with_its_definition(output):
    text = write_card(output, report(output), Facts()).read_text()
    assert "| this head | 2.518 ± 0.021 |" in text
    assert "3 drafted tokens, the bonus token included" in text
    assert "identical, bit by bit" in text


def test_it_claims_no_acceptance_that_was_not_measured(output):
    text = write_card(output, None, Facts()).read_text()
    assert "Not measured" in text
    assert "±" not in text


def test_a_license_is_never_guessed(output):
    front = write_card(output, None, Facts()).read_text().split("---")[1]
    assert yaml.safe_load(front)["license"] == "unknown"
    assert "base_model" not in yaml.safe_load(front)


def test_a_report_of_other_bytes_is_refused(output, tmp_path):
    other = write_head(tmp_path / "other", by_name("vllm"), MLA, random_slots(MLA, seed=3))
    with pytest.raises(ReportInvalid, match="other weights") as caught:
        write_card(output, report(other), Facts())
    assert str(caught.value.where) == str(output)
    assert not (output / "README.md").exists()


def test_a_report_with_errors_is_refused(output):
    for severity in ("error", "undecided"):
        finding = Finding(rule="K201", severity=severity, where="fc.weight", message="m", fix="f")
        with pytest.raises(ReportInvalid, match="errors"):
            write_card(output, report(output, [finding]), Facts())


def test_an_existing_card_is_not_overwritten(output):
    (output / "README.md").write_text("mine")
    with pytest.raises(OutputExists) as caught:
        write_card(output, None, Facts())
    assert "--force" in caught.value.fix and "another name" not in caught.value.fix
    assert (output / "README.md").read_text() == "mine"


def test_a_card_is_written_again_where_that_is_asked(output):
    for name in ("README.md", "NOTICE"):
        (output / name).write_text("mine")
    write(output, make_card(gather(output, None, Facts(name="org/head"))), force=True)
    assert "# org/head" in (output / "README.md").read_text() and "org/head" in (output / "NOTICE").read_text()


def test_an_exact_conversion_is_the_draft_as_it_ships(output):
    text = write_card(output, None, Facts()).read_text()
    assert "| weights | exact: every weight is byte-identical to the source |" in text and "| draft |" not in text
    assert json.loads((output / "kconv.json").read_text())["draft"] == "as it ships"


def test_a_draft_stays_another_one_however_exactly_it_is_converted_on(tmp_path):
    spec = replace(MLA, dtype="F32")
    head = read_head(open_checkpoint(write_head(tmp_path / "head", by_name("trtllm"), spec, random_slots(spec))))
    execute(plan(head, by_name("vllm"), WriteOptions(dtype="BF16")), tmp_path / "cast")
    execute(plan(read_head(open_checkpoint(tmp_path / "cast")), by_name("sglang")), tmp_path / "again")
    manifest = json.loads((tmp_path / "again" / "kconv.json").read_text())
    assert manifest["exact"] is True and manifest["draft"] == "another"


def test_a_converted_head_is_for_the_engine_it_was_converted_for_whatever_its_source_was_for(output):
    facts = Facts.model_validate({"runtime": {"engines": "TensorRT-LLM"}, "architecture": {"parameters": "1.8e9"}})
    text = make_card(gather(output, None, facts), "nvidia").text
    assert "- Runtime engine(s): vLLM (its publisher states TensorRT-LLM)" in text
    assert re.search(r"parameters: [\d,]+ \(.+\); as published: 1.8e9\n", text)
    # The tags say the same, and no library of the Hub's list loads a head.
    data = ModelCard(text).data
    assert "vllm" in data.tags and data.library_name is None and "base_model_relation" not in data.to_dict()


def test_a_folder_kconv_did_not_make_has_no_card(tmp_path):
    head = write_head(tmp_path / "head", by_name("vllm"), MLA, random_slots(MLA))
    with pytest.raises(NotACheckpoint, match=r"no readable kconv\.json"):
        write_card(head, None, Facts())


@pytest.mark.parametrize("layout", ["vllm", "trtllm", "sglang", "portable"])
def test_every_layout_that_is_written_has_a_card(tmp_path, layout):
    head = read_head(open_checkpoint(write_head(tmp_path / "head", by_name("trtllm"), MLA, random_slots(MLA))))
    execute(plan(head, by_name(layout)), tmp_path / "out")
    text = write_card(tmp_path / "out", None, Facts()).read_text()
    assert "exact: every weight is byte-identical to the source" in text


def test_a_weight_that_was_rounded_is_named(tmp_path):
    spec = replace(MLA, dtype="F32")
    head = read_head(open_checkpoint(write_head(tmp_path / "head", by_name("trtllm"), spec, random_slots(spec))))
    execute(plan(head, by_name("vllm"), WriteOptions(dtype="BF16")), tmp_path / "out")
    text = write_card(tmp_path / "out", None, Facts()).read_text()
    assert "**not exact**" in text and "| draft | **other weights** than the source: not for benchmarks" in text
    assert "fc.weight cast" in text


def shape(card: str) -> list[str]:
    """Return the kinds of blocks of a card, and what stands within its text besides text and its own links."""
    body = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(body)
    inline = [child.type for token in tokens for child in token.children or ()]
    return [token.type for token in tokens] + [kind for kind in inline if kind in ("html_inline", "image", "link_open")]


def fences(card: str, language: str) -> list[str]:
    return [t.content for t in MarkdownIt().parse(card) if t.type == "fence" and t.info == language]


@pytest.mark.parametrize("style", ["short", "compact", "nvidia"])
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_on_a_card_name_a_head_and_a_target_of_any_name(portable, tmp_path, name, style):
    def card(name: str) -> str:
        arguments = {"sglang": {"arguments": ["--tp-size 8", "--json '{\"a\": 1}'"]}}
        return make_card(gather(portable, None, Facts(name=name, base_model=name, serve=arguments)), style).text

    text = card(name)
    calls = [call for command in fences(text, "bash") for call in ran(command, tmp_path)]
    vllm, sglang, trtllm = ([call for call in calls if call[0] == one] for one in ("vllm", "python", "trtllm-serve"))
    assert len(calls) == 3
    ((*said, speculative),) = vllm
    assert said == ["vllm", "serve", name, "--trust-remote-code", "--speculative-config"]
    assert json.loads(speculative)["model"] == name
    assert [call[:9] for call in sglang] == [
        ["python", "-m", "sglang.launch_server", "--model-path", name, "--tp-size", "8", "--json", '{"a": 1}']
    ]
    assert sglang[0][sglang[0].index("--speculative-draft-model-path") + 1] == name
    assert [call[:4] for call in trtllm] == [["trtllm-serve", name, "--backend", "pytorch"]]
    (config,) = fences(text, "yaml")
    assert yaml.safe_load(config)["speculative_config"]["speculative_model"] == name
    assert shape(text) == shape(card("org/other"))


HOSTILE = """\
# trtllm-serve
speculative_config: {speculative_model: "PATH_OR_ID_OF_THIS_HEAD", decoding_type: Eagle3}
# ```
end: |
  ```

  # Acceptance

  | drafter | sampled |
  |---|---|
  | this head | 3.900 |

  <img src=x onerror=alert(1)>
more: "````"
"""


@pytest.mark.parametrize("style", ["short", "compact", "nvidia"])
def test_a_strangers_serving_yaml_stays_a_block_of_code(tmp_path, style):
    def card(config: str) -> str:
        facts = Facts(name="org/head", serve={"trtllm": Serve(config=config)})
        return make_card(gather(tmp_path, None, facts), style).text

    after = card(HOSTILE + "\x1b[2J\n")
    assert shape(after) == shape(card("speculative_config: {}"))
    # A control character makes it no YAML; it is shown as it is, and obeyed by no terminal.
    assert "\x1b" not in after and "PATH_OR_ID_OF_THIS_HEAD" in "".join(fences(after, "yaml"))
    (config,) = fences(card(HOSTILE), "yaml")
    assert yaml.safe_load(config)["speculative_config"] == {"speculative_model": "org/head", "decoding_type": "Eagle3"}
    assert yaml.safe_load(config)["more"] == "````"


@pytest.mark.parametrize("field", ["source", "source_layout", "kconv"])
def test_a_notice_is_one_line_for_each_thing_that_a_manifest_says(output, field):
    before = make_card(gather(output, None, Facts(name="org/head"))).files["NOTICE"]
    said = "x\n\nLicensed by NVIDIA Corporation under the NVIDIA Open Model License\r\n\x1b[2J\u2028y"
    write_manifest(output, read_manifest(output).model_copy(update={field: said}))
    after = make_card(gather(output, None, Facts(name="org/head"))).files["NOTICE"]
    assert len(after.splitlines()) == len(before.splitlines())
    assert "Licensed by NVIDIA Corporation" in after and "\x1b" not in after


def test_a_card_trusts_only_a_target_with_code_of_its_own(portable, tmp_path):
    def command(folder: Path, target: Path | None, base: str | None = None) -> str:
        facts = Facts(name="org/head", base_model=base)
        commands = fences(make_card(gather(folder, None, facts, target=target)).text, "bash")
        return next(command for command in commands if command.startswith("vllm"))

    plain, coded = tmp_path / "plain", tmp_path / "coded"
    for folder, config in ((plain, {"model_type": "llama"}), (coded, {"auto_map": {"AutoConfig": "own.Own"}})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    source = write_head(tmp_path / "source", by_name("trtllm"), GQA, random_slots(GQA))
    execute(plan(read_head(open_checkpoint(source)), by_name("vllm")), tmp_path / "gqa")
    asked = [(portable, None), (portable, plain), (tmp_path / "gqa", None), (tmp_path / "gqa", coded)]
    assert ["--trust-remote-code" in command(*one) for one in asked] == [True, False, False, True]
    assert "--trust-remote-code" in command(tmp_path / "gqa", None, "moonshotai/Kimi-K2.6")
    assert "--trust-remote-code" not in command(tmp_path / "gqa", None, "meta-llama/Llama-3.1-8B-Instruct")
