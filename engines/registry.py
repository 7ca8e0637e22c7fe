"""The known engines and layouts: kconv's own, and those of other packages.

Another package adds its own with entry points in the group `kconv.engines`, each of which names an `Engine`, or a
`Layout`, of a trainer or of a drafter family that an engine here does not know:

    [project.entry-points."kconv.engines"]
    lmdeploy = "my_package.lmdeploy:ENGINE"
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import (
    CountersMissing,
    DefinitionsMixed,
    EngineUnknown,
    LayoutCannot,
    PluginInvalid,
    UnknownLayout,
    in_config,
)
from ..installed import load_plugins

if TYPE_CHECKING:
    from ..drafters.base import Drafter, Names, Spec
    from .base import Deployment, Engine
    from .counters import Counters
    from .layout import Layout

    ENGINES: tuple[Engine, ...]
    LAYOUTS: tuple[Layout, ...]

GROUP = "kconv.engines"


class Own(NamedTuple):
    """One of kconv's own layouts, with what help needs before its module is loaded; `called` is the layout's."""

    name: str
    module: str
    constant: str
    engines: tuple[str, ...] = ()
    written: bool = False
    called: str = ""


# kconv's own engines, each the ENGINE of the module with its name, and their titles.
OWN_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
# In order of detection: the first layout whose marks fit a head wins.
OWN_LAYOUTS = {
    own.name: own
    for own in (
        Own("speculators", "trainers", "SPECULATORS", ("vllm",), written=True),
        Own("automodel", "trainers", "AUTOMODEL"),
        Own("deepspec", "trainers", "DEEPSPEC"),
        Own("sglang", "sglang", "SGLANG", ("sglang",), written=True),
        Own("portable", "portable", "PORTABLE", ("trtllm", "vllm", "sglang"), written=True),
        Own("vllm", "vllm", "VLLM", ("vllm",), written=True),
        Own("safeailab", "trainers", "SAFEAILAB"),
        Own("specforge", "trainers", "SPECFORGE"),
        Own("specforge-peagle", "trainers", "SPECFORGE_PEAGLE"),
        Own("torchspec", "trainers", "TORCHSPEC"),
        Own("trtllm", "trtllm", "TRTLLM", ("trtllm",), written=True),
        Own("modelopt", "trainers", "MODELOPT", ("trtllm",)),
        Own("dflash-speculators", "dflash", "DFLASH_SPECULATORS", ("vllm",), written=True, called="speculators"),
        Own("dspark-modelopt", "dflash", "DSPARK_MODELOPT"),
        Own("dflash-torchspec", "dflash", "DFLASH_TORCHSPEC"),
        Own("dspark-deepspec", "dflash", "DSPARK_DEEPSPEC"),
        Own(
            "dflash-portable",
            "dflash",
            "DFLASH_PORTABLE",
            ("trtllm", "vllm", "sglang"),
            written=True,
            called="portable",
        ),
        Own("dflash-vllm", "dflash", "DFLASH_VLLM", ("vllm",), written=True, called="vllm"),
        Own("dflash-sglang", "dflash", "DFLASH_SGLANG", ("sglang",), written=True, called="sglang"),
        Own("dflash-trtllm", "dflash", "DFLASH_TRTLLM", ("trtllm",), written=True, called="trtllm"),
        Own("dflash", "dflash", "DFLASH_PLAIN"),
    )
}
# Ids of this form are reserved for kconv.
OWN_ID = re.compile(r"[KPL]\d+")
OWN_ID_FIX = "Give it an id specific to the package, e.g. LMDEPLOY1."


def __getattr__(name: str) -> Any:
    """Load kconv's own engines or layouts, `ENGINES` and `LAYOUTS`, on first use."""
    if name == "ENGINES":
        return tuple(_load(one, "ENGINE") for one in OWN_ENGINES)
    if name == "LAYOUTS":
        return tuple(_load(own.module, own.constant) for own in OWN_LAYOUTS.values())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(module: str, constant: str) -> Any:
    return getattr(import_module(f".{module}", __package__), constant)


def engines() -> tuple[Engine, ...]:
    """Return every engine, kconv's own first.

    Raises:
        PluginInvalid: another package's engine cannot be loaded, or its name is taken.
    """
    return (*__getattr__("ENGINES"), *_known()[0])


def layouts() -> tuple[Layout, ...]:
    """Return every layout, in order of detection: other packages' first, since their marks are more specific.

    Raises:
        PluginInvalid: see `engines`.
    """
    return (*_known()[1], *__getattr__("LAYOUTS"))


def by_name(name: str) -> Layout:
    """Return a layout by its name for the user.

    Raises:
        UnknownLayout: no layout of that name.
    """
    others = {layout.name: layout for layout in _known()[1]}
    if name in OWN_LAYOUTS:
        return _load(*OWN_LAYOUTS[name][1:3])
    known = [*others, *OWN_LAYOUTS]
    if name not in known:
        close = get_close_matches(name, known, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise UnknownLayout(f"there is no layout {name!r}", fix=f"Choose one of {', '.join(known)}.{meant}")
    return others[name]


def engine(name: str) -> Engine:
    """Return an engine by its name.

    Raises:
        EngineUnknown: no engine of that name.
    """
    known = {one.name: one for one in engines()}
    if name not in known:
        raise EngineUnknown(f"there is no engine {name!r}", fix=f"Choose one of {', '.join(known)}.")
    return known[name]


LOST = " A config that ModelOpt wrote has an eagle_config: if that was lost, take the config.json as exported."


def detect(config: Mapping[str, Any], names: Names) -> Layout:
    """Return the layout whose marks fit a config and its tensor names.

    Raises:
        UnknownLayout: none fits.
    """
    from ..drafters.registry import drafters

    marked = [one for one in drafters() if one.marks(config, names)]
    for one in marked:
        for layout in layouts():
            if layout.drafter is one and layout.told_by(config, names):
                return layout
    titles = " or ".join(one.a_title for one in marked or drafters())
    what = f"this may be {titles}, but its config and tensor names do not identify a layout"
    held = [one for one in marked if any(sign in names for sign in one.signs)]
    raise UnknownLayout(
        (what if held else f"kconv does not recognize this as {titles}")
        + f": architectures {config.get('architectures')}, model_type {config.get('model_type')!r}",
        where=in_config(),
        fix=f"If this is a target, pass it as --target of a head. If it is {titles}, name its layout with "
        f"--from: {', '.join(layout.name for layout in layouts() if layout.drafter in (marked or drafters()))}."
        + (LOST if held and "eagle_config" not in config else ""),
    )


def layout_for(name: str, drafter: Drafter) -> Layout:
    """Return the layout to write for what a user calls it: a layout's name, or an engine's.

    Raises:
        UnknownLayout: no layout and no engine of that name.
        LayoutCannot: the layout is another family's, and no layout of the engine is this family's.
    """
    for layout in written_by(name):
        if layout.drafter is drafter:
            return layout
    written = [x for x in layouts() if x.drafter is drafter and x.write_config is not None]
    named = {x.name: one.name for one in engines() for x in own_layouts(one)}
    titles = {one.name: one.title for one in engines()}
    choices = ", ".join(sorted({named.get(x.name, x.name) for x in written}))
    raise LayoutCannot(
        f"kconv writes no layout of {drafter.title}s for {titles.get(name, name)}",
        fix=f"Choose one of {choices}." if choices else f"kconv writes no layout of {drafter.title}s at all.",
    )


def written_by(name: str) -> tuple[Layout, ...]:
    """Return the layouts that one of `writable` stands for: an engine's, one for each family, or the one of that name.

    Raises:
        UnknownLayout: no layout and no engine of that name.
    """
    own = next((own_layouts(one) for one in engines() if one.name == name), None)
    return own or (by_name(name), *(x for x in layouts() if x.called == name))


def own_layouts(engine: Engine) -> tuple[Layout, ...]:
    """Return the layouts of an engine, one for each family: its object's, and other packages' for further families."""
    known = {one.drafter.name for one in engine.layouts}
    more = {x.drafter.name: x for x in _known()[1] if x.written_for == (engine.name,) and x.drafter.name not in known}
    return (*engine.layouts, *more.values())


def writable() -> tuple[str, ...]:
    """Return the names of what kconv writes: engines, then layouts that are no engine's own or that several read."""
    others, written = _known()
    own = [*OWN_ENGINES, *(one.name for one in others)]
    # Without other packages' layouts no engine is loaded: help needs only names.
    of_engines = {layout.name for one in engines() for layout in own_layouts(one)} if written else set[str]()
    shared = [x.name for x in written if x.write_config is not None and x.name not in of_engines]
    return tuple(
        dict.fromkeys((*own, *shared, *(one.called or one.name for one in OWN_LAYOUTS.values() if one.written)))
    )


def runners() -> tuple[str, ...]:
    """Return every name under which an engine reads a head: the names that `validate` reports on."""
    return tuple(name for one in engines() for name in one.runner_names)


def asked() -> dict[str, tuple[str, ...]]:
    """Return the choices of `--for`, and the runners that each stands for."""
    found: dict[str, tuple[str, ...]] = {}
    for one in engines():
        found |= {one.name: one.runner_names}
        found |= {name: (name,) for name in one.runner_names if name != one.name}
    return found | {"all": runners()}


def servable() -> tuple[str, ...]:
    """Return the names of the engines that a running server can be: the choices of `--engine`."""
    return tuple(one.name for one in engines() if one.counters is not None)


def startable() -> tuple[str, ...]:
    """Return the names of the engines that kconv can start itself."""
    return tuple(one.name for one in engines() if one.starter is not None)


def engines_of(layout: str) -> tuple[Engine, ...]:
    """Return the engines that load a layout; none for a trainer's own, or for an unknown name."""
    known = {one.name: one for one in engines()}
    found = next((one for one in layouts() if one.name == layout), None)
    if found is None:
        return ()
    named = [known[name] for name in found.written_for if name in known]
    return tuple(dict.fromkeys((*(one for one in engines() if found in one.layouts), *named)))


def runners_of(layout: str) -> tuple[str, ...]:
    """Return the runners of the engines that load a layout; see `engines_of`."""
    return tuple(name for one in engines_of(layout) for name in one.runner_names)


def titles_of(layout: str) -> list[str]:
    """Return the titles of the engines that load a layout; see `engines_of`."""
    if layout not in OWN_LAYOUTS or _known()[0]:
        return [one.title for one in engines_of(layout)]
    return [OWN_ENGINES[name] for name in OWN_LAYOUTS[layout].engines]


def describe(layout: str) -> str:
    """Return a phrase for a card that says which engines load a layout, or what is written for an engine.

    Raises:
        UnknownLayout: no engine loads it.
    """
    for one in _known()[0]:
        if one.name == layout and layout not in {own.name for own in one.layouts}:
            return f"{one.title}'s layout"
    titles = titles_of(layout)
    if not titles and by_name(layout).write_config is not None:
        return f"the layout of {by_name(layout).engine}"
    if not titles:
        raise UnknownLayout(f"no engine loads {layout}'s layout", fix=f"Choose one of {', '.join(writable())}.")
    engines_own = [*OWN_ENGINES, *(own.name for one in _known()[0] for own in one.layouts)]
    own = OWN_LAYOUTS.get(layout)
    if len(titles) == 1 and layout not in engines_own and (own is None or own.called not in engines_own):
        return f"the layout of {layout}, which {titles[0]} loads"
    if len(titles) == 1:
        return f"{titles[0]}'s layout"
    return f"a layout that {', '.join(titles[:-1])} and {titles[-1]} all load"


def recognize(engines: Iterable[Engine], pages: Mapping[str, str], where: str) -> tuple[Engine, Counters]:
    """Return the engine whose counters a server shows, and its counters.

    A page that the server lacks is "" in `pages`.

    Raises:
        CountersMissing: the server shows no engine's counters.
        DefinitionsMixed: it shows counters of several engines, e.g. a router.
    """
    known = [(engine, counters) for engine in engines if (counters := engine.counters)]
    found = [(engine, counters) for engine, counters in known if counters.shown_on(pages[counters.metrics])]
    if not found:
        *others, last = [engine.title for engine, _ in known]
        needs = ", ".join(f"{engine.title} needs {counters.needs}" for engine, counters in known if counters.needs)
        raise CountersMissing(
            f"the server shows no counters of {', '.join(others)} or {last}",
            where=where,
            fix=f"Pass the engine's own address; {needs}.",
        )
    if len(found) > 1:
        raise DefinitionsMixed(
            f"the server shows counters of {' and '.join(engine.name for engine, _ in found)}, which count differently",
            where=where,
            fix="Pass the address of one engine, not of a router in front of several.",
        )
    return found[0]


def launch_files(spec: Spec, layout: str, served: Deployment | None = None) -> dict[str, str]:
    """Return the files, by name, that show how to serve a head with a layout's engines; None for placeholders."""
    from .base import Deployment

    served = replace(served or Deployment(), spec=spec)
    launches = [one.launch for one in engines_of(layout) if one.launch and spec.drafter.name in one.launch.drafters]
    return {one.file: one.text(spec, served) for one in launches}


@functools.cache
def _known() -> tuple[tuple[Engine, ...], tuple[Layout, ...]]:
    """Load the entry points of other packages, once."""
    found_engines: list[Engine] = []
    found_layouts: list[Layout] = []
    for loaded, where in load_plugins(GROUP, "an engine"):
        from .base import Engine
        from .layout import Layout

        named: tuple[Any, ...] = loaded.layouts if isinstance(loaded, Engine) else (loaded,)
        if not named or not all(isinstance(layout, Layout) for layout in named):
            raise PluginInvalid(
                f"a {type(loaded).__name__} is neither an Engine nor a Layout",
                where=where,
                fix="Make the entry point name a kconv.engines.base.Engine object.",
            )
        known = (*__getattr__("ENGINES"), *found_engines), (*__getattr__("LAYOUTS"), *found_layouts)
        if isinstance(loaded, Engine):
            _refuse_taken(loaded, known[0], where)
            found_engines.append(loaded)
        for layout in named:
            if layout not in known[1]:
                _refuse_taken_layout(layout, known[1], where)
                found_layouts.append(layout)
    return tuple(found_engines), tuple(found_layouts)


def _refuse_taken(new: Engine, known: Sequence[Engine], where: str) -> None:
    taken = {"all"} | {name for one in known for name in (one.name, *one.runner_names)}
    if double := sorted(taken & {new.name, *new.runner_names}):
        raise PluginInvalid(f"there is already an engine {', '.join(double)}", where=where, fix="Give it another name.")
    given = {rule.id for one in known for rule in one.rules}
    for rule in new.rules:
        if rule.id in given or OWN_ID.fullmatch(rule.id):
            raise PluginInvalid(
                f"the rule {rule.name!r} has the id {rule.id}, which belongs to kconv or to another rule",
                where=where,
                fix=OWN_ID_FIX,
            )


def _refuse_taken_layout(new: Layout, known: Iterable[Layout], where: str) -> None:
    if new.name in {one.name for one in known}:
        raise PluginInvalid(f"there is already a layout {new.name}", where=where, fix="Give it another name.")
    shared = {limit.id: limit for one in known for limit in one.limits}
    for limit in new.limits:
        if limit is not shared.get(limit.id) and (limit.id in shared or OWN_ID.fullmatch(limit.id)):
            raise PluginInvalid(
                f"the limit {limit.name!r} has the id {limit.id}, which belongs to kconv or to another limit",
                where=where,
                fix=OWN_ID_FIX,
            )
