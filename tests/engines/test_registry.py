"""What another package adds is loaded once, and refused by name where it is broken."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner
from support.listing import PRODUCT, ROOT

from kconv.drafters import registry as families
from kconv.drafters.base import Drafter
from kconv.drafters.eagle3 import EAGLE3
from kconv.engines import registry, sglang, vllm
from kconv.engines.base import Engine
from kconv.errors import EngineUnknown, LayoutCannot, PluginInvalid, UnknownLayout
from kconv.rule import Rule

LAYOUT = replace(vllm.VLLM, name="otter", limits=())
FOUND: dict[str, object] = {}


class Entry(EntryPoint):
    def load(self) -> object:
        found = FOUND[self.name]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def install(monkeypatch):
    """Return a function that has entry points name these objects."""

    def install(**found: object) -> None:
        FOUND.clear()
        FOUND.update(found)
        entries = [
            Entry(name, f"{name}:ENGINE", families.GROUP if isinstance(one, Drafter) else registry.GROUP)
            for name, one in found.items()
        ]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: [one for one in entries if one.group == group]
        )
        registry._known.cache_clear()
        families.drafters.cache_clear()

    yield install
    families.drafters.cache_clear()
    registry._known.cache_clear()


def test_an_engine_may_read_a_layout_that_is_there(install):
    install(fork=Engine("fork", "Fork", (vllm.VLLM,)))
    assert registry.runners_of("vllm") == ("vllm-v1", "vllm-v2", "fork")
    assert registry.describe("vllm") == "a layout that vLLM and Fork all load"
    assert registry.writable() == ("vllm", "sglang", "trtllm", "fork", "speculators", "portable")
    assert registry.layout_for("fork", EAGLE3) is vllm.VLLM
    assert registry.describe("fork") == "Fork's layout"


def test_an_engine_writes_its_layout_of_each_family_whatever_their_names(install):
    family = replace(EAGLE3, name="vole", title="Vole")
    otters, voles = replace(LAYOUT, name="otter-eagle"), replace(LAYOUT, name="otter-vole", drafter=family)
    install(otter=Engine("otter", "Otter", (otters, voles)))
    assert registry.writable() == ("vllm", "sglang", "trtllm", "otter", "speculators", "portable")
    assert registry.layout_for("otter", EAGLE3) is otters and registry.layout_for("otter", family) is voles
    with pytest.raises(LayoutCannot, match="no layout of Voles for vLLM") as fault:
        registry.layout_for("vllm", family)
    assert fault.value.fix == "Choose one of otter."


def test_a_command_is_named_for_an_engine_whose_layouts_have_other_names(install):
    from kconv.cli import main

    install(otter=Engine("otter", "Otter", (replace(LAYOUT, name="otter-eagle", needs={"lm_head": "it has none"}),)))
    shown = CliRunner().invoke(main, ["to-otter", "--help"]).output
    assert "Otter's layout" in shown and "If HEAD has no lm_head" in shown
    assert "to-otter" in CliRunner().invoke(main, ["--help"]).output


def test_a_layout_alone_is_read(install):
    install(trainer=replace(LAYOUT, write_config=None, told_by=lambda config, names: "otter" in config))
    assert registry.detect({"otter": 1}, ["fc.weight"]).name == "otter"
    assert registry.engines_of("otter") == () and "otter" not in registry.writable()


def test_what_shares_a_limit_of_kconvs_own_may_have_its_id(install):
    install(otter=Engine("otter", "Otter", (replace(vllm.VLLM, name="otter"),)))
    assert registry.engine("otter").layouts[0].limits == vllm.VLLM.limits


BROKEN = {
    "it cannot be imported": (ImportError("no module named otter"), "cannot be loaded: ImportError: no module"),
    "it is something else": ("otter", "a str is neither"),
    "an engine's name is taken": (Engine("vllm", "Otter", (LAYOUT,)), "already an engine vllm\n"),
    "a runner's name is taken": (Engine("vllm-v2", "Otter", (LAYOUT,)), "already an engine vllm-v2"),
    "it is called all": (Engine("all", "Otter", (LAYOUT,)), "already an engine all"),
    "a layout's name is taken": (
        Engine("otter", "Otter", (replace(LAYOUT, name="trtllm"),)),
        "there is already a layout trtllm",
    ),
    "a limit has an id of kconv's": (
        Engine("otter", "Otter", (replace(LAYOUT, limits=(replace(sglang.SGLANG.limits[-1], id="K999"),)),)),
        "has the id K999",
    ),
    "a limit has another's id": (
        Engine("otter", "Otter", (replace(LAYOUT, limits=(replace(sglang.SGLANG.limits[-1], what="else"),)),)),
        "has the id K339",
    ),
}


@pytest.mark.parametrize(("found", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_refused_by_name(install, found, message):
    install(broken=found)
    with pytest.raises(PluginInvalid, match=message) as fault:
        registry.engines()
    assert "broken = broken:ENGINE" in fault.value.where and fault.value.fix


def test_a_name_that_nobody_has_is_told_with_those_that_there_are():
    with pytest.raises(EngineUnknown) as fault:
        registry.engine("nonsense")
    assert "sglang" in fault.value.fix
    with pytest.raises(UnknownLayout):
        registry.describe("torchspec")


def test_each_limit_is_one_rule():
    limits = {id(limit): limit for layout in registry.LAYOUTS for limit in layout.limits}.values()
    assert len({limit.id for limit in limits}) == len({limit.name for limit in limits}) == len(limits)


def test_what_help_says_of_an_engine_is_what_its_module_says():
    assert {one.name: one.title for one in registry.ENGINES} == registry.OWN_ENGINES
    assert [layout.name for layout in registry.LAYOUTS] == list(registry.OWN_LAYOUTS)
    for layout in registry.LAYOUTS:
        own = registry.OWN_LAYOUTS[layout.name]
        assert own.engines == tuple(one.name for one in registry.engines_of(layout.name))
        assert (own.written, own.called) == (layout.write_config is not None, layout.called)


def test_help_and_an_import_load_no_engine():
    program = "import sys, kconv, kconv.cli; kconv.cli.main(['--help'], standalone_mode=False)"
    program += "; print([name for name in sys.modules if name.startswith('kconv.engines.') or name == 'pydantic'])"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert shown.splitlines()[-1] == "['kconv.engines.registry']" and "to-trtllm" in shown


def test_what_the_command_line_needs_is_light():
    heavy = {"torch", "transformers", "httpx", "yaml", "prometheus_client", "modelopt"}
    program = f"import kconv.engines.registry as r, sys; r.asked(); assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# Where product code outside engines/ names an engine, and why.
NAMING = {
    "cli/group.py": "what users type instead of a command",
    "cli/others.py": "the demo's folder for vLLM",
    "operations/train.py": "the next step after training is to serve the head with vLLM",
    "drafters/eagle3.py": "a trainer and an engine with different defaults of one key",
    "pipeline/demo.py": "the demo writes its heads for two engines",
    "train/recipe.py": "which layout a trained head is written in",
}


def test_engines_are_named_in_their_own_files_alone():
    known = {name for one in registry.engines() for name in (one.name, one.title, *one.runner_names, *one.packages)}
    naming = set()
    for file in PRODUCT:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        # from .engines import vllm, and from .engines.vllm import ENGINE
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                words |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        if known & words:
            naming.add(str(file.relative_to(ROOT)))
    assert {file for file in naming if not file.startswith("engines/")} == NAMING.keys()


# What a family touches besides its own files: the row tables of drafters, engines and trainers.
OF_FAMILY = re.compile("dflash|dspark", re.IGNORECASE)
TABLES = {
    "drafters/registry.py": "the families",
    "engines/registry.py": "the layouts",
    "engines/vllm.py": "vLLM's layouts, methods and rules",
    "engines/sglang.py": "SGLang's layouts, options and rules",
    "engines/trtllm.py": "TensorRT-LLM's layouts, types of decoding and rules",
    "engines/watch_vllm.py": "vLLM's classes",
    "engines/watch_sglang.py": "SGLang's classes",
    "train/recipe.py": "the recipes",
    # No table: what a user may copy.
    "operations/train.py": "an example of the command",
}


def test_a_family_is_named_in_its_own_files_and_in_row_tables_alone():
    """In code, docstrings and texts; only comments and addresses may name it elsewhere."""
    naming = set()
    for file in PRODUCT:
        words = []
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found = (getattr(node, name, None) for name in ("value", "id", "attr", "name", "module", "arg"))
            words += [re.sub(r"https?://\S+", "", word) for word in found if isinstance(word, str)]
        if any(OF_FAMILY.search(word) for word in words) and not OF_FAMILY.search(file.name):
            naming.add(str(file.relative_to(ROOT)))
    assert naming == TABLES.keys()


def test_a_rule_that_an_engine_brings_has_a_place_in_a_report():
    from kconv.validate.rules.table import SUBJECTS, all_rules

    own = [rule for one in registry.engines() for rule in one.rules]
    assert own and {rule.subject for rule in own} <= SUBJECTS.keys()
    shared = [(one, id) for one in registry.engines() for id in one.shared_rules]
    assert shared and all(set(one.runner_names) <= set(all_rules()[id].engines) for one, id in shared)


@pytest.mark.parametrize("id", ["K101", "L3", "K140", "K999"])
def test_a_rule_with_a_reserved_id_is_refused(install, id):
    rule = Rule(id, "otter-rule", "error", "Otters have no such thing.", "Remove it.", lambda _: ())
    install(otter=Engine("otter", "Otter", (LAYOUT,), rules=(rule,)))
    with pytest.raises(PluginInvalid, match=f"the rule 'otter-rule' has the id {id}"):
        registry.engines()


OTTER1 = Rule("OTTER1", "otter-rule", "error", "Otters have no such thing.", "Remove it.", lambda _: ())


def _vole(*rules: Rule) -> Drafter:
    return replace(EAGLE3, name="vole", title="Vole", rules=lambda: rules)


def _otter(*rules: Rule) -> Engine:
    return Engine("otter", "Otter", (LAYOUT,), rules=rules)


CLASHING = {
    "a family's rule has an id of kconv's": (
        {"vole": _vole(replace(OTTER1, id="K999"))},
        ("the rule K999 otter-rule of Vole has an id that is reserved",),
    ),
    "a family's rule has the name of one of kconv's": (
        {"vole": _vole(replace(OTTER1, name="lm-head-missing"))},
        ("the rule OTTER1 lm-head-missing of Vole", "the rule K101 lm-head-missing of kconv"),
    ),
    "a family's rule has the id of an engine's": (
        {"vole": _vole(replace(OTTER1, name="vole-rule")), "otter": _otter(OTTER1)},
        ("the rule OTTER1 otter-rule of Otter", "the rule OTTER1 vole-rule of Vole"),
    ),
    "no report has the subject": (
        {"otter": _otter(replace(OTTER1, subject="Rivers"))},
        ("the rule OTTER1 otter-rule of Otter has the subject 'Rivers'",),
    ),
    "only a report about a target has the subject": (
        {"otter": _otter(replace(OTTER1, subject="NVFP4 tensors"))},
        ("the rule OTTER1 otter-rule of Otter has the subject 'NVFP4 tensors'",),
    ),
}


@pytest.mark.parametrize(("found", "named"), CLASHING.values(), ids=CLASHING)
def test_a_rule_of_another_package_that_would_be_lost_is_refused_by_name(install, found, named):
    from kconv.validate.rules.table import by_subject

    install(**found)
    with pytest.raises(PluginInvalid) as fault:
        by_subject()
    assert all(one in fault.value.what for one in named) and fault.value.fix


def test_a_rule_without_a_subject_stands_among_the_limits(install):
    from kconv.validate.rules.table import OF_LIMITS, by_subject

    install(otter=_otter(OTTER1))
    assert [rule.id for rule in by_subject()[OF_LIMITS] if rule.name == "otter-rule"] == ["OTTER1"]
