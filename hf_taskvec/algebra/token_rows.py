"""Rows of added tokens: parameters of their own, named after the weight they are rows of and the token.

A token that a fine-tune added is in another row of each fine-tune. So its row is no row of the embedding here: it is
the parameter `model.embed_tokens.weight["<think>"]`, a change from zero. Vectors meet by token then as they meet by
name, and nothing else of the algebra knows of it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ROW = re.compile(r'(.+?)\[("(?:[^"\\]|\\.)*")\]')


@dataclass(frozen=True)
class TokenRow:
    """Which row of which weight: that of a token."""

    weight: str
    token: str

    @property
    def name(self) -> str:
        """What the parameter is called.

        >>> TokenRow("model.embed_tokens.weight", "<think>").name
        'model.embed_tokens.weight["<think>"]'
        """
        return f"{self.weight}[{quoted(self.token)}]"


def token_row(name: str) -> TokenRow | None:
    r"""The row that a parameter of that name is; None for any other parameter.

    >>> token_row('wte.weight["<a \\" b>"]')
    TokenRow(weight='wte.weight', token='<a " b>')
    >>> token_row("wte.weight") is None
    True
    """
    found = _ROW.fullmatch(name)
    try:
        return None if found is None else TokenRow(found[1], str(json.loads(found[2])))
    except ValueError:  # no text that we wrote
        return None


def rows_of_tokens(names: Iterable[str]) -> dict[str, TokenRow]:
    """Those of some parameters that are rows of tokens, by their names."""
    return {name: row for name in names if (row := token_row(name)) is not None}


def quoted(token: str) -> str:
    """A token in quotation marks, every character of which can be seen."""
    return json.dumps(token)


def unquoted(tokens: Mapping[str, str]) -> dict[str, str]:
    """What a record says of each token, by the tokens themselves."""
    return {str(json.loads(token)): said for token, said in tokens.items()}
