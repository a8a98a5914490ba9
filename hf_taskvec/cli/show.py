"""`taskvec show`: what is in a vector."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hf_taskvec.cli.arguments import DebugOption, JsonOption, TokenOption, VectorArgument, load_vector
from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.results import CommandResult, TextTable, largest_first, layer_title
from hf_taskvec.errors import BadValueError


def show_command(
    vector: VectorArgument,
    top: Annotated[int, typer.Option(help="How many of the largest changes to list.", min=0)] = 10,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE.html", help="Write tables and figures as a page.")
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Tell what is in a vector: ranks, norms, origin, largest layers."""
    found = load_vector(vector, token=token)
    norms = found.norms()
    total = sum(value**2 for value in norms.values()) ** 0.5
    ranks = {name: found.rank(name) for name in found if len(found.shape(name)) > 1}
    largest = [
        {"name": n, "shape": list(found.shape(n)), "rank": ranks.get(n), "norm": value, "share": (value / total) ** 2}
        for n, value in largest_first(norms, top)
        if total
    ]
    layers = {layer: value**0.5 for layer, value in _by_layer({n: v**2 for n, v in norms.items()}).items()}
    values = {
        "expression": found.expression,
        "parameters": len(found),
        "low_rank": found.is_low_rank,
        "bytes": found.nbytes,
        "norm": total,
        "largest": largest,
        "layers": layers,
        "origins": [origin.to_json() for origin in found.provenance.origins],
        "discarded": dict(found.discarded),
    }
    rows = [
        (
            each["name"],
            "×".join(map(str, each["shape"])),
            each["rank"] or "–",
            f"{each['norm']:.4g}",
            f"{each['share']:.1%}",
        )
        for each in largest
    ]
    lines: list[str | TextTable] = [*repr(found).splitlines(), f"  norm {total:.6g}"]
    if rows:
        lines += ["", TextTable("Largest changes", ["parameter", "shape", "rank", "norm", "of ‖τ‖²"], rows)]
    shares = [
        (layer, f"{v:.4g}", f"{(v / total) ** 2:.1%}") for layer, v in largest_first(layers, max(top, 1)) if total
    ]
    if rows and len(layers) > 1:
        lines += ["", TextTable("Largest layers", ["layer", "norm", "of ‖τ‖²"], shares)]
    if html is not None:
        from hf_taskvec.analysis import stable_ranks
        from hf_taskvec.cli.html_answer import write_page

        pictures = {}
        with suppress(BadValueError):  # no matrix that is known by its name: the tables stand alone
            pictures["Stable ranks and norms of each kind of matrix, by layer"] = stable_ranks(found).figure
        values["html"] = str(write_page(html, found.expression, lines, pictures))
        record_command(html)
        lines += ["", f"{html}: written"]
    CommandResult(values, lines).show(json)


def _by_layer(values: dict[str, float]) -> dict[str, float]:
    from hf_taskvec.algebra.parameter_names import layer_of

    sums: dict[str, float] = {}
    for name, value in values.items():
        layer = layer_title(layer_of(name))
        sums[layer] = sums.get(layer, 0.0) + value
    return sums
