"""Parameters under the names of another model that contains theirs, or is contained in it."""

from collections.abc import Collection, Mapping

from hf_taskvec.errors import MismatchError, MissingNameError, did_you_mean, some


def moved_name(name: str, names: Mapping[str, str]) -> str | None:
    """A parameter's name in the other model; None if it starts with nothing that the map has.

    >>> moved_name("model.norm.weight", {"model.": "text.", "model.layers.": "blocks."})
    'text.norm.weight'
    """
    start = max((each for each in names if name.startswith(each)), key=len, default=None)
    return None if start is None else names[start] + name[len(start) :]


def moved_names(own: Collection[str], names: Mapping[str, str]) -> dict[str, str]:
    """Name -> name in the other model, of all parameters.

    Raises:
        `MissingNameError`: If a parameter starts with none of the map's beginnings, or nothing starts with one of them.
        `MismatchError`: If two parameters would get one name.
    """
    for start in names:
        if not any(name.startswith(start) for name in own):
            raise MissingNameError(f"no parameter starts with {start!r}.{did_you_mean(start, own)}")
    moved = {name: moved_name(name, names) for name in own}
    if left := [name for name, new in moved.items() if new is None]:
        raise MissingNameError(
            f"{some(left)}: names= does not say what it is called in the other model. Name what it starts with, or "
            "leave it out with vector.filter(exclude=...)."
        )
    found: dict[str, str] = {}
    for name, new in moved.items():
        if new in found.values():
            raise MismatchError(f"{name} and another parameter would both be called {new}. Give them names apart.")
        found[name] = str(new)
    return found
