"""How kconv was installed: versions of its libraries, the command that adds an extra, what other packages add."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.metadata import version as read_version
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from .errors import PluginInvalid
from .escape import command

# Libraries that a result depends on, with the extra that installs each; empty for core dependencies.
LIBRARIES = {
    "torch": "torch",
    "safetensors": "",
    "huggingface-hub": "",
    "nvidia-modelopt": "optimize",
    "transformers": "optimize",
    "matplotlib": "plots",
}


@cache
def version(name: str) -> str:
    """Return the version of an installed package, read once: it takes milliseconds, and each report states several.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return read_version(name)


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def sources_digest(*names: str) -> str:
    """Return a digest of the code of some of kconv's packages and files, or of all: other code makes other things."""
    import hashlib

    root = Path(__file__).parent
    of_all = (file.parent for file in root.glob("*/__init__.py")), root.glob("*.py")
    digest = hashlib.sha256()
    for place in sorted((root / name for name in names) if names else chain(*of_all)):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation.

    pip records where kconv came from, in direct_url.json, unless it came from a package index
    (https://packaging.python.org/en/latest/specifications/direct-url/). So the command names the clone, the file or the
    index that kconv was installed from.
    """
    from urllib.request import url2pathname  # an HTTP client comes with it, which a start need not load

    try:
        found = distribution("kconv")
    except PackageNotFoundError:  # run from its folder, without an installation
        return f"{command(['pip', 'install', f'.[{extra}]'])} in a clone of kconv"
    url, editable = _origin(found)
    if not url:
        return command(["pip", "install", f"kconv[{extra}]"])
    if not url.startswith("file:"):
        return command(["pip", "install", f"kconv[{extra}] @ {url}"])
    path = url2pathname(urlsplit(url).path)
    if not Path(path).exists():
        return f"{command(['pip', 'install', f'.[{extra}]'])} in a clone of kconv"
    where = f"{path}[{extra}]" if Path(path).is_dir() else f"kconv[{extra}] @ {url}"
    return command(["pip", "install", *(["-e"] if editable else []), where])


def _origin(found: Distribution) -> tuple[str, bool]:
    """Return the URL that pip installed kconv from ("" for an index), and whether it is an editable installation."""
    import json

    try:
        record = json.loads(found.read_text("direct_url.json") or "{}")
        url, editable = record.get("url", ""), record.get("dir_info", {}).get("editable", False)
    except (ValueError, AttributeError):
        return "", False
    vcs = record.get("vcs_info")
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return url, bool(editable)


def load_plugins(group: str, what: str) -> Iterator[tuple[object, str]]:
    """Yield what the entry points of a group name, in the order of their names, and where each stands.

    `what` is a phrase for what they name, e.g. "a drafter".

    Raises:
        PluginInvalid: one of them cannot be loaded.
    """
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        where = f"the entry point {entry.name} = {entry.value} of {entry.dist.name if entry.dist else 'a package'}"
        try:
            loaded = entry.load()
        except Exception as fault:  # another package may raise anything
            raise PluginInvalid(
                f"{what} from another package cannot be loaded: {type(fault).__name__}: {fault}",
                where=where,
                fix="Update that package, or remove it.",
            ) from fault
        yield loaded, where
