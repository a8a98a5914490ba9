"""Choosing parameters: by patterns over their names, glob strings and compiled regular expressions, and by layers."""

import fnmatch
import re
from collections.abc import Collection, Iterable

from hf_taskvec.algebra.parameter_names import layer_of
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean, some

#: a glob string or a compiled regular expression over parameter names
Pattern = str | re.Pattern[str]


def listed(patterns: Pattern | Iterable[Pattern]) -> list[Pattern]:
    """One pattern or several, as a list."""
    return [patterns] if isinstance(patterns, str | re.Pattern) else list(patterns)


def matching(pattern: Pattern, names: Collection[str]) -> list[str]:
    """The names that a pattern matches. Refuses a pattern that matches none.

    >>> matching("*.mlp.*", ["h.0.mlp.w", "h.0.attn.w"]), matching(re.compile("w$"), ["w", "b"])
    (['h.0.mlp.w'], ['w'])
    """
    if isinstance(pattern, str):
        found = fnmatch.filter(names, pattern) if pattern not in names else [pattern]
    else:
        found = [name for name in names if pattern.search(name)]
    if not found:
        text = pattern if isinstance(pattern, str) else pattern.pattern
        raise MissingNameError(
            f"the pattern {text!r} matches none of the vector's {len(names)} parameters"
            f" ({some(names, 2)}).{did_you_mean(text, names)}"
        )
    return found


def selected(
    names: Collection[str],
    include: list[Pattern] | None,
    exclude: list[Pattern] | None,
    layers: list[int] | None = None,
    outside: bool = False,
) -> set[str]:
    """The names that are included, not excluded and in these layers; `outside` says whether also those in none.

    >>> names = ["wte.weight", "h.0.mlp.w", "h.1.mlp.w", "h.1.attn.w"]
    >>> sorted(selected(names, None, ["*.attn.*"], [1], outside=True))
    ['h.1.mlp.w', 'wte.weight']
    """
    if not isinstance(outside, bool) or (outside and layers is None):
        raise BadValueError(f"outside={outside!r} is an option of layers=, and must be True or False.")
    chosen = set(names) if include is None else {name for pattern in include for name in matching(pattern, names)}
    for pattern in exclude or ():
        chosen -= set(matching(pattern, names))
    if layers is None:
        return chosen
    found = {name: layer_of(name) for name in chosen}
    inside = {name for name, layer in found.items() if (outside if layer is None else layer in layers)}
    if not inside:
        raise BadValueError(
            f"nothing is left in the layers {layers}: the vector does not change them, or include= and exclude= leave "
            "all of it out."
        )
    return inside
