"""What a folder holds, for tests that say that nothing was left or touched."""

from pathlib import Path


def names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; hidden ones too."""
    return sorted(path.name for path in folder.iterdir())
