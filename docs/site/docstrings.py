"""Our docstrings as the site's reader of them knows them: examples in the plural, types without backticks."""

import re
from typing import Any

from griffe import Extension, Object


class Docstrings(Extension):
    """Reads `Example:` as a section of examples, and "name (`type`, *optional*):" as a parameter of that type."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for everything that is found in the code."""
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"^( *[\w*, ]+ \()(.+)(\):)$", _plain_type, text, flags=re.M)


def _plain_type(found: re.Match[str]) -> str:
    return found[1] + re.sub(r"[`*]", "", found[2]) + found[3]
