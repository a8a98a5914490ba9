"""Patterns over parameter names: glob strings and compiled regular expressions."""

import fnmatch
import re
from collections.abc import Collection, Iterable

from hf_taskvec.errors import MissingNameError, did_you_mean, some

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
