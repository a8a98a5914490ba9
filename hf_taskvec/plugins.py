"""What other installed packages add: merging rules, metrics, protocols and attacks, found by their entry points.

A package names them in its own `pyproject.toml`, by group and name:

    [project.entry-points."hf_taskvec.rules"]
    strongest = "their_package.rules:strongest"

Nothing is looked for before a name is asked for that is not ours, and no other package's code is imported before.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from hf_taskvec.errors import UnsupportedError

#: what can be added; the groups of entry points are called `hf_taskvec.rules` and so on
PluginKind = Literal["rules", "metrics", "protocols", "attacks"]


@cache
def _found(kind: PluginKind) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for each in entry_points(group=f"hf_taskvec.{kind}"):
        if all(each.value != other.value for other in found.get(each.name, [])):  # a package may be on the path twice
            found.setdefault(each.name, []).append(each)
    return found


def plugin_names(kind: PluginKind) -> list[str]:
    """The names that installed packages add, none of whose code is imported.

    Args:
        kind (`str`):
            `"rules"`, `"metrics"`, `"protocols"` or `"attacks"`.

    Returns:
        `list[str]`: In the order of their names.
    """
    return sorted(_found(kind))


def plugin(kind: PluginKind, name: str, fits: Callable[[Any], bool], wanted: str) -> Any:
    """What an installed package adds under a name.

    Args:
        kind (`str`):
            `"rules"`, `"metrics"`, `"protocols"` or `"attacks"`.
        name (`str`):
            One of `plugin_names(kind)`.
        fits (`Callable`):
            Whether it is what it has to be.
        wanted (`str`):
            What that is, for an error.

    Returns:
        What its entry point names.

    Raises:
        `UnsupportedError`: If two packages add that name, if the package's code fails, or if it is something else.
    """
    first, *others = _found(kind)[name]
    whose = f"the package {first.dist.name} {first.dist.version}" if first.dist else "a package without metadata"
    told = f'entry point "hf_taskvec.{kind}", {name} = "{first.value}"'
    if others:
        raise UnsupportedError(
            f"{name!r} is added by several packages ({', '.join(each.value for each in (first, *others))}). Uninstall "
            "all but one."
        )
    try:
        found = first.load()
    except Exception as error:  # whatever another package's code raises
        raise UnsupportedError(
            f"{whose} adds {name!r}, but cannot be imported ({type(error).__name__}: {error}; {told}). Update it, or "
            "uninstall it."
        ) from error
    if not fits(found):
        raise UnsupportedError(f"{whose} adds {name!r}, which is not {wanted} ({told}). Update it, or uninstall it.")
    return found
