"""`taskvec compare`: the cosines of vectors."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.cli.arguments import DebugOption, JsonOption, TokenOption, load_vector, named_paths
from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.results import CommandResult, TextTable, layer_title
from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.analysis.cosines import CosineView

_CAPTIONS: dict["CosineView", str] = {
    "total": "The cosine of each two vectors",
    "parts": "The cosine within each kind of matrix, layer by layer",
    "layers": "Cosines and norms by layer",
}


def compare_command(
    vectors: Annotated[list[str], typer.Argument(metavar="[NAME=]VECTOR", help="Two vectors or more.")],
    plot: Annotated[
        Path | None, typer.Option("--plot", "-o", metavar="FILE.png", help="Draw the cosines as a heat map.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE.html", help="Write tables and figures as a page.")
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Compare vectors: their cosines, for two also layer by layer.

    Vectors that point the same way (cosine near 1) change the model alike; at 0 they do not touch each other.
    """
    from hf_taskvec.analysis import cosine_matrix

    paths = named_paths(vectors)
    if len(paths) < 2:
        raise BadValueError("compare takes at least two vectors.")
    found = {name: load_vector(path, name, token) for name, path in paths.items()}
    cosines = cosine_matrix(found)
    names = cosines.names
    values: dict[str, Any] = {"names": names, "cosines": cosines.total, "norms": cosines.norms}
    rows = [(name, *(f"{value:+.4f}" for value in row)) for name, row in zip(names, cosines.total, strict=True)]
    lines: list[str | TextTable] = [TextTable("Cosines", ["", *names], rows)]
    if len(names) == 2:
        layers = {layer_title(layer): matrix[0][1] for layer, matrix in cosines.by_layer.items()}
        parameters = {name: matrix[0][1] for name, matrix in cosines.by_parameter.items()}
        # Where one of the two changes nothing there is no cosine, and JSON has no nan.
        values["layers"], values["parameters"] = (
            {name: value for name, value in each.items() if value == value} for each in (layers, parameters)
        )
        shown = [(layer, f"{value:+.4f}") for layer, value in values["layers"].items()]
        lines += ["", TextTable("Cosine of each layer", ["layer", "cosine"], shown)]
    if plot is not None:
        cosines.plot(plot, "parts" if len(names) == 2 else "total")
        record_command(plot)
        values["plot"] = str(plot)
        lines += ["", f"{plot}: written"]
    if html is not None:
        from hf_taskvec.cli.html_answer import write_page

        views: list[CosineView] = ["total", "parts", "layers"] if len(names) == 2 else ["total", "layers"]
        pictures = {_CAPTIONS[view]: partial(cosines.figure, view) for view in views}
        values["html"] = str(write_page(html, " and ".join(names), lines, pictures))
        record_command(html)
        lines += ["", f"{html}: written"]
    CommandResult(values, lines).show(json)
