"""What is in a folder."""

from pathlib import Path


def names(folder: Path) -> list[str]:
    """The names of all that is in a folder, hidden or not, in order."""
    return sorted(path.name for path in folder.iterdir())
