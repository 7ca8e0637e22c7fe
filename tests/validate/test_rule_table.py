"""The table of rules itself: ids, sentences, threads, and that no limit of a layout is without a rule."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.listing import PRODUCT, ROOT, calls

import kconv.validate
from kconv.errors import ConfigInvalid, HubUnreachable, UnknownRule
from kconv.rule import Found
from kconv.validate.rules import limits
from kconv.validate.rules.subject import ENGINES
from kconv.validate.rules.table import EVERY_RULE, HEAD_RULES, all_rules, find_rule, of_error

RULES = all_rules()


def test_no_id_and_no_name_is_given_twice():
    rules = EVERY_RULE
    assert len({rule.id for rule in rules}) == len({rule.name for rule in rules}) == len(rules) == len(RULES)


def test_there_are_more_rules_over_heads_than_promised():
    assert len(HEAD_RULES) >= 40


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_complete(rule):
    assert re.fullmatch(r"K\d{3}", rule.id) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)
    assert rule.severity in ("error", "undecided", "warning", "note")
    assert rule.sentence.endswith(".") and rule.fix.endswith(".") and len(rule.sentence) > 20
    assert rule.engines == tuple(engine for engine in ENGINES if engine in rule.engines) or set(rule.engines) < set(
        ENGINES
    )
    assert rule.seen_in == "" or rule.seen_in.startswith("https://")


def test_every_limit_of_a_layout_has_an_id_of_its_own():
    assert (
        len({limit.id for limit in limits.LIMITS}) == len({limit.name for limit in limits.LIMITS}) == len(limits.LIMITS)
    )
    own = [rule.id for rule in EVERY_RULE]
    assert sorted(own) == sorted(set(own)), "a limit has the id of another rule"


def test_most_rules_say_which_thread_taught_them():
    named = [rule for rule in HEAD_RULES if rule.seen_in]
    assert len(named) >= 60


def test_a_rule_is_found_by_id_and_by_name():
    assert find_rule("K101") is find_rule("k101") is find_rule("lm-head-missing")
    with pytest.raises(UnknownRule, match="K999"):
        find_rule("K999")


def test_an_error_of_the_hub_is_no_finding():
    assert of_error(ConfigInvalid("x", where="config.json", fix="y")).rule == "K008"
    with pytest.raises(HubUnreachable):
        of_error(HubUnreachable("x"))


def test_findings_that_a_comparison_makes_are_explained_too():
    """Ids that stand in the sources of the room, outside of the rules, are in the table."""
    room = Path(kconv.validate.__file__).parent
    sources = [file.read_text() for file in room.rglob("*.py") if "rules" not in file.parts]
    made = {found for text in sources for found in re.findall(r'"(K\d{3})"', text)}
    assert {"K301", "K304"} <= made <= RULES.keys()


def test_a_finding_is_made_by_its_rule_alone():
    made = {str(file.relative_to(ROOT)) for file in PRODUCT if "Finding" in calls(file)}
    assert made == {"rule.py"}


def test_what_to_do_is_written_once_for_the_reader_and_its_rule():
    # One imperative that many say.
    fixes, files = {rule.fix for rule in EVERY_RULE} - {"Export the head again."}, {}
    for file in PRODUCT:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in fixes:
                files.setdefault(node.value, set()).add(file.relative_to(ROOT))
    read = {"checkpoint", "convert", "drafters", "targets"}
    twice = {fix for fix, where in files.items() if len(where) > 1 and read & {file.parts[0] for file in where}}
    assert len(files) > 100 and twice == set()


TEXTS, TAKING = {"what", "where", "fix", "message"}, {
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "replace", "find",
}  # fmt: skip


def test_no_file_reads_the_words_of_a_message():
    found = set()
    for file in PRODUCT:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            read: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKING:
                read = [node.func.value]
            elif isinstance(node, ast.Compare) and any(
                isinstance(one, ast.Constant) and isinstance(one.value, str) for one in (node.left, *node.comparators)
            ):
                read = [node.left, *node.comparators]
            if any(isinstance(one, ast.Attribute) and one.attr in TEXTS for one in read):
                found.add(str(file.relative_to(ROOT)))
    assert found == set()


def test_a_finding_has_a_severity_that_its_row_names():
    counts, broken = RULES["K702"], RULES["K301"]
    assert counts.finding(Found("vllm", "counts differ")).severity == "error"
    assert counts.finding(Found("vllm", "counts differ", severity="warning")).severity == "warning"
    with pytest.raises(ValueError, match="K301"):
        broken.finding(Found("config.json", "its bytes differ", severity="warning"))
