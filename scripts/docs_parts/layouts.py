"""The page of layouts: their tensors, config keys and limits, from the tables in convert/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kconv.drafters import spec
from kconv.drafters.base import Drafter
from kconv.drafters.dflash import DFLASH, Confidence, DFlashSpec, Markov
from kconv.drafters.eagle3 import EAGLE3
from kconv.drafters.keys import Key
from kconv.drafters.registry import OWN
from kconv.engines.layout import IGNORED, Layout, Row
from kconv.engines.moves import Stack
from kconv.engines.registry import layouts as all_layouts
from kconv.escape import link
from kconv.validate.markdown import table
from kconv.validate.rules.table import all_rules

ROLES = {"written": "W", "instead": "r", "beside": "b"}
# Heads with everything that a head of their kind can have, for whether a slot is theirs.
_REST: dict[str, Any] = {
    "hidden": 1, "target_hidden": 1, "intermediate": 1, "layers": 2, "vocab": 2, "draft_vocab": 1, "eps": 1.0,
    "rope": spec.Rope(1.0), "captured": (0,), "dtype": "BF16", "max_positions": 1, "mlp_bias": True, "fc_bias": True,
    "norms": spec.Norms(True, True, True, True, True),
}  # fmt: skip
_OF_HEADS = ("mlp_bias", "fc_bias", "norms")
_BLOCK: dict[str, Any] = {key: value for key, value in _REST.items() if key not in _OF_HEADS} | {
    "attention": spec.Gqa(1, 1, 2, bias=True), "block": 2, "mask": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    EAGLE3.name: {
        "GQA": spec.HeadSpec(spec.Gqa(1, 1, 2, bias=True), **_REST),
        "MLA": spec.HeadSpec(spec.Mla(1, 1, 1, 1, 2, 1), **_REST),
    },
    DFLASH.name: {
        "DFlash": DFlashSpec(**_BLOCK),
        **{
            f"DSpark ({kind})": DFlashSpec(**_BLOCK, markov=Markov(1, kind), confidence=Confidence(True, True))
            for kind in ("vanilla", "gated", "rnn")
        },
    },
}


def of_family(drafter: Drafter) -> list[Layout]:
    return [layout for layout in all_layouts() if layout.drafter is drafter]


def layouts() -> Iterator[str]:
    yield "A layout maps tensor names and config keys to slots, which have one meaning and one shape. `{i}` is the"
    yield "decoder layer, `{a}` the index of a captured state; `attn_in` is 2 x `hidden` in layer 0, then `hidden`;"
    yield "`attn_out` is heads times the value dim. GQA includes MHA."
    yield from ("", "## Layouts", "")
    yield from table(
        ("layout", "who reads or writes it"),
        [(f"`{x.name}`", f"{x.engine}{'' if x.write_config else ' (kconv only reads it)'}") for x in all_layouts()],
    )
    yield from ("", "## Tensors", "")
    yield "`*` is the slot's own part. Each name lists the layouts that write it, and those that *also read* it."
    yield "*First*, *later*: decoder layers. An unknown or missing name stops the conversion."
    for drafter in reversed(OWN):
        yield from ("", f"### {drafter.title}s")
        yield from _tensors(drafter)
    yield from ("", "## Config keys", "")
    yield "In every layout unless stated otherwise below: the key, and what it states."
    for drafter in reversed(OWN):
        title = f"{drafter.title}s"
        for kind, part in ((title, drafter.keys), *_attention(drafter)):
            yield from ("", f"{kind}: {', '.join(_key(key) for key in part)}.")
        yield from ("", f"{title} with other values of these keys are refused:")
        accepted: dict[str, list[str]] = {}
        for key, values in drafter.fixed.items():
            accepted.setdefault(", ".join(map(json.dumps, values)), []).append(key)
        yield from ("", *(f"- {values}: {_code(keys)}" for values, keys in accepted.items()))
    yield from ("", "## Where a layout differs", "")
    alike_layouts: dict[str, list[str]] = {}
    for layout in all_layouts():
        for said in _differs(layout):
            alike_layouts.setdefault(said, []).append(f"`{layout.name}`")
    yield from (f"- {', '.join(names)}{said}" for said, names in alike_layouts.items())
    yield from (f"- In every layout `{pattern}` is left behind, because {why}." for pattern, why in IGNORED.items())
    yield from (
        "",
        "## What a layout has no place for",
        "",
        "kconv refuses a head that has it, by [a rule](rules.md) or for this reason:",
        "",
    )
    for layout in all_layouts():
        ruled = [limit for limit in layout.limits if limit.id in all_rules()]
        others = [x for x in all_layouts() if x != layout and x.limits and set(x.limits) < set(layout.limits)]
        if ruled:
            alike = {limit.id for x in others for limit in x.limits} == {limit.id for limit in ruled}
            named = [f"as `{x.name}`" for x in others] if alike else [limit.id for limit in ruled]
            yield f"- `{layout.name}`: {', '.join(named)}"
        for limit in layout.limits:
            if limit not in ruled:
                source = limit.source.split(" ")[0]
                seen = f" ({link('code', source)})" if source else ""
                yield f"- `{layout.name}`: {limit.what}{seen}"


def _attention(drafter: Drafter) -> list[tuple[str, tuple[Key, ...]]]:
    titles = {spec.Gqa: "MHA and GQA", spec.Mla: "MLA"}
    return [(titles[kind], keys) for kind, keys in drafter.attention.items()] if drafter is EAGLE3 else []


def _tensors(drafter: Drafter) -> Iterator[str]:
    tensors: dict[tuple[str, ...], dict[tuple[str, str], dict[str, str]]] = {}
    for layout in of_family(drafter):
        for row in layout.rows:
            tensor, layers = _tensor(row, drafter)
            names = tensors.setdefault(tensor, {}).setdefault((row.name, layers), {})
            names[layout.name] = ROLES[row.role]
    alike: dict[tuple[str, ...], list[str]] = {}
    for (slot, shape, heads), named in tensors.items():
        own = _own_part(next(iter(named))[0])
        kinds = tuple(
            _name(f"{name.removesuffix(own)}*" if name.endswith(own) else name, layers, roles, drafter)
            for (name, layers), roles in named.items()
        )
        alike.setdefault(kinds, []).append(f"- {slot} {shape}{'' if heads == 'all' else f', {heads}'}: `{own}`")
    for kinds, of_slots in alike.items():
        yield from ("", *(f"{kind}{'.' if kind == kinds[-1] else ';'}" for kind in kinds), "", *of_slots)


def _own_part(name: str) -> str:
    """Return the part of a tensor's name that follows the model and the layer."""
    return re.sub(r"^(model\.)?((layers|midlayer)(\.\{i\})?\.)?", "", name)


def _tensor(row: Row, drafter: Drafter) -> tuple[tuple[str, ...], str]:
    """Return what a row's tensor is (slots, shape, heads), and the decoder layers that have it."""
    known = {slot.name: slot for slot in drafter.slots}
    own = [known[re.sub(r"^fc_norm\.\d$", "fc_norm.{a}", name)] for name in row.slots]
    shape = " + ".join(slot.shape.split(",")[0] for slot in own) if isinstance(row.move, Stack) else own[0].shape
    shape += ", " + own[0].shape.split(",", 1)[1].strip() if isinstance(row.move, Stack) and "," in own[0].shape else ""
    heads = [kind for kind, whole in KINDS[drafter.name].items() if all(slot.when(whole) for slot in own)]
    stacked = ", ".join(f"`{name}`" for name in row.slots)
    return (stacked, f"`[{shape}]`", _all(heads, drafter)), row.layers or own[0].layers


def _name(name: str, layers: str, roles: Mapping[str, str], drafter: Drafter) -> str:
    """Return a name with the layouts that use it, and in brackets those that read it too."""
    own = [one.name for one in of_family(drafter) if roles.get(one.name) == "W"]
    others = [one.name for one in of_family(drafter) if one.name not in own]
    users = "all" if not others else f"all but {', '.join(others)}" if len(others) < len(own) else ", ".join(own)
    shown = [users] if own else []
    if read := [one for one in roles if one not in own]:
        shown.append(f"also read: {', '.join(read)}")
    return f"`{name}`{'' if layers == 'all' or not layers else f' ({layers})'} {'; '.join(shown)}"


def _all(heads: list[str], drafter: Drafter) -> str:
    return "all" if len(heads) == len(KINDS[drafter.name]) else ", ".join(heads)


def _key(key: Key) -> str:
    also = f", also read as {_code(key.also)}" if key.also else ""
    plain = key.names == (key.field.rpartition(".")[2],) and not also
    return _code(key.names) if plain else f"{_code(key.names)} (`{key.field}`{also})"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _differs(layout: Layout) -> Iterator[str]:
    config = layout.config
    if config.nested:
        yield f": the config's keys stand in `{config.nested}`."
    for key, why in config.must_state.items():
        yield f" must state `{key}`: {why}."
    for key, values in config.otherwise.items():
        allowed = ", ".join(map(json.dumps, values))
        yield f": `{key}` has another meaning here, and only {allowed} is accepted."
    for slot, why in layout.needs.items():
        yield f" must hold `{slot}`, though others share the target's: {why}."
    for pattern, why in layout.ignored.items() - IGNORED.items():
        yield f": `{pattern}` is left behind, because {why}."
