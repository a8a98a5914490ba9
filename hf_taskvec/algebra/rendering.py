"""How a task vector shows itself: as text on a terminal, as HTML in a notebook."""

import html
from collections.abc import Mapping

from hf_taskvec.algebra.parameter_change import ParameterChange
from hf_taskvec.algebra.provenance import Provenance
from hf_taskvec.sizes import file_size

_SHOWN = 8  # parameters in a notebook's table


def as_text(kind: str, changes: Mapping[str, ParameterChange], provenance: Provenance, nbytes: int) -> str:
    """The expression, what it holds, and where it comes from, in a few lines."""
    lines = [f"{kind}({provenance.expression})", f"  {_held(changes)}; {file_size(nbytes)}"]
    lines += [f"  {origin}" for origin in provenance.origins]
    return "\n".join(lines)


def as_html(kind: str, changes: Mapping[str, ParameterChange], provenance: Provenance, nbytes: int) -> str:
    """The same, with a table of the first parameters. Colours are left to the notebook."""
    rows = "".join(
        f"<tr><td style='text-align:left'><code>{html.escape(name)}</code></td>"
        f"<td>{' × '.join(map(str, each.shape)) or 'scalar'}</td><td>{each.rank}</td>"
        f"<td>{'low-rank' if each.is_low_rank else 'dense'}</td></tr>"
        for name, each in list(changes.items())[:_SHOWN]
    )
    more = len(changes) - _SHOWN
    rest = f"<p>… and {more} more parameters</p>" if more > 0 else ""
    origins = "".join(f"<li>{html.escape(str(origin))}</li>" for origin in provenance.origins)
    head = "<th style='text-align:left'>parameter</th><th>shape</th><th>rank</th><th>held as</th>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return (
        f"<div><p><b>{kind}</b> <code>{html.escape(provenance.expression)}</code><br>"
        f"{_held(changes)}; {file_size(nbytes)}</p>{table if rows else ''}{rest}<ul>{origins}</ul></div>"
    )


def _held(changes: Mapping[str, ParameterChange]) -> str:
    """How many parameters there are, and how they are held."""
    ranks = sorted(each.rank for each in changes.values() if each.is_low_rank)
    kinds = []
    if ranks:
        span = f"{ranks[0]}" if ranks[0] == ranks[-1] else f"{ranks[0]}–{ranks[-1]}"
        kinds.append(f"{len(ranks)} low-rank (rank {span})")
    if len(changes) > len(ranks):
        kinds.append(f"{len(changes) - len(ranks)} dense")
    return f"{len(changes)} parameters" + (f": {', '.join(kinds)}" if kinds else "")
