"""Commands that make vectors and look at them: extract, show, compare, combine, compress."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.cli.common import (
    STREAMING,
    Debug,
    DryRun,
    Json,
    Output,
    Overwrite,
    Plan,
    Result,
    Token,
    check_output,
    listed,
    load_vector,
    named_paths,
    register,
    remember,
    size,
    table,
    weights_size,
)
from hf_taskvec.errors import BadValueError, MissingNameError

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector

Vector = Annotated[str, typer.Argument(metavar="VECTOR", help="A saved task vector, or a LoRA adapter.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Round dense changes to this, e.g. bfloat16; lossless by default.")
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    commands = (extract, show, compare, combine, compress)
    register(app, "Vectors", {command.__name__: command for command in commands})


def extract(
    models: Annotated[
        list[str],
        typer.Argument(metavar="BASE TUNED | ADAPTER", help="Base and fine-tune (full, or an adapter of it)."),
    ],
    output: Output,
    name: Annotated[str | None, typer.Option(help="What expressions call the vector.")] = None,
    vocabulary: Annotated[
        str | None, typer.Option(help="If the embeddings differ in size: truncate or extend.")
    ] = None,
    dtype: Dtype = None,
    reference: Annotated[bool, typer.Option("--reference", help="Store no tensors, only where they are.")] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Make a task vector: what a fine-tune changed in its base.

    taskvec extract microsoft/phi-1_5 me/phi-1_5-hp1 -o hp1
    """
    from hf_taskvec.extraction.from_any import kind_of, open_vector
    from hf_taskvec.files.vector_format import JSON_NAME

    if len(models) > 2:
        raise BadValueError(f"extract takes a base and a fine-tune, or an adapter, not {len(models)} models.")
    check_output(output, JSON_NAME, overwrite)
    if dry_run:
        sizes = {where: weights_size(where, token) for where in models}
        written = 0 if reference else list(sizes.values())[-1]
        return Plan(sizes, {output.name: written}, STREAMING).result(output).show(json)
    base = models[0] if len(models) == 2 else None
    kind, shown = kind_of(models[-1], base, token)
    if kind == "vector":
        raise BadValueError(f"{shown} is a task vector already.")
    vector = open_vector(models[-1], base, name=name, vocabulary=vocabulary, token=token)
    _save(vector, output, json, dtype=dtype, reference=reference, overwrite=overwrite)
    return None


def _save(vector: "TaskVector", output: Path, as_json: bool, **options: Any) -> None:
    errors = vector.save(output, **options)
    remember(output)
    nbytes = sum(path.stat().st_size for path in output.iterdir())
    values = {
        "output": str(output),
        "expression": vector.expression,
        "parameters": len(vector),
        "bytes": nbytes,
        "rounding_errors": errors,
    }
    lines = [f"{output}: {vector.expression}", f"{len(vector)} parameters, {size(nbytes)}"]
    if errors:
        name, error = max(errors.items(), key=lambda item: item[1])
        lines.append(f"rounded: the largest relative error is {error:.2g}, of {name}")
    Result(values, lines).show(as_json)


def show(
    vector: Vector,
    top: Annotated[int, typer.Option(help="How many of the largest changes to list.", min=0)] = 10,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Tell what is in a vector: ranks, norms, origin, largest layers."""
    found = load_vector(vector, token=token)
    norms = found.norms()
    total = sum(value**2 for value in norms.values()) ** 0.5
    ranks = {name: found.rank(name) for name in found if len(found.shape(name)) > 1}
    largest = [
        {"name": n, "shape": list(found.shape(n)), "rank": ranks.get(n), "norm": value, "share": (value / total) ** 2}
        for n, value in listed(norms, top)
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
    lines = [*repr(found).splitlines(), f"  norm {total:.6g}"]
    if rows:
        lines += ["", table("Largest changes", ["parameter", "shape", "rank", "norm", "of ‖τ‖²"], rows)]
    shares = [(layer, f"{v:.4g}", f"{(v / total) ** 2:.1%}") for layer, v in listed(layers, max(top, 1)) if total]
    if rows and len(layers) > 1:
        lines += ["", table("Largest layers", ["layer", "norm", "of ‖τ‖²"], shares)]
    Result(values, lines).show(json)


def _by_layer(values: dict[str, float]) -> dict[str, float]:
    from hf_taskvec.models.layout import layer_of

    sums: dict[str, float] = {}
    for name, value in values.items():
        layer = _layer(layer_of(name))
        sums[layer] = sums.get(layer, 0.0) + value
    return sums


def _layer(number: int | str | None) -> str:
    return f"layer {number}" if str(number).isdigit() else "outside"


def compare(
    vectors: Annotated[list[str], typer.Argument(metavar="[NAME=]VECTOR", help="Two vectors or more.")],
    plot: Annotated[
        Path | None, typer.Option("--plot", "-o", metavar="FILE.png", help="Draw the cosines as a heat map.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Compare vectors: their cosines, for two also layer by layer.

    Vectors that point the same way (cosine near 1) change the model alike; at 0 they do not touch each other.
    """
    from hf_taskvec.analysis import cosine_matrix
    from hf_taskvec.figures import render

    paths = named_paths(vectors)
    if len(paths) < 2:
        raise BadValueError("compare takes at least two vectors.")
    found = {name: load_vector(path, name, token) for name, path in paths.items()}
    cosines = cosine_matrix(found)
    names = cosines.names
    values: dict[str, Any] = {"names": names, "cosines": cosines.total, "norms": cosines.norms}
    rows = [(name, *(f"{value:+.4f}" for value in row)) for name, row in zip(names, cosines.total, strict=True)]
    lines = [table("Cosines", ["", *names], rows)]
    if len(names) == 2:
        layers = {_layer(layer): matrix[0][1] for layer, matrix in cosines.by_layer.items()}
        parameters = {name: matrix[0][1] for name, matrix in cosines.by_parameter.items()}
        # Where one of the two changes nothing there is no cosine, and JSON has no nan.
        values["layers"], values["parameters"] = (
            {name: value for name, value in each.items() if value == value} for each in (layers, parameters)
        )
        shown = [(layer, f"{value:+.4f}") for layer, value in values["layers"].items()]
        lines += ["", table("Cosine of each layer", ["layer", "cosine"], shown)]
    if plot is not None:
        data = render({"plot": lambda: cosines.figure("parts" if len(names) == 2 else "total")})["plot.png"]
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_bytes(data)
        remember(plot)
        values["plot"] = str(plot)
        lines += ["", f"{plot}: written"]
    Result(values, lines).show(json)


def combine(
    expression: Annotated[
        str, typer.Argument(metavar='"EXPRESSION"', help='E.g. "-0.6*hp1 + 0.2*hp2" or "compress(a - b, rank=8)".')
    ],
    vectors: Annotated[list[str], typer.Argument(metavar="[NAME=]VECTOR", help="What the names stand for.")],
    output: Output,
    dtype: Dtype = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Calculate with vectors, and save the result.

    taskvec combine "-0.6*hp1 + 0.2*hp2" hp1=vectors/hp1 hp2=me/hp2-vector -o forget

    Numbers, names, + - * /, brackets, compress(v, rank=8), filter(v, include="*.mlp.*"), scale(v, by={...}), and merging
    rules by name: combine(\\[a, b], "ties", weights=\\[1, -0.5], density=0.2). Python's hf_taskvec.rules() lists them.
    """
    from hf_taskvec.errors import did_you_mean
    from hf_taskvec.files.vector_format import JSON_NAME
    from hf_taskvec.publishing.notation import evaluate, names_in

    paths = named_paths(vectors)
    for name in names_in(expression):
        if name not in paths:
            raise MissingNameError(
                f"the expression has {name!r}, which no argument names.{did_you_mean(name, paths)} Add {name}=PATH."
            )
    if unused := [name for name in paths if name not in names_in(expression)]:
        raise BadValueError(f"the expression does not use {unused[0]!r}. Leave that argument out, or use it.")
    check_output(output, JSON_NAME, overwrite)
    if dry_run:
        sizes = {path: weights_size(path, token) for path in paths.values()}
        written = sum(value or 0 for value in sizes.values())
        return Plan(sizes, {output.name: written}, STREAMING).result(output).show(json)
    result = evaluate(expression.strip(), {name: load_vector(path, name, token) for name, path in paths.items()})
    _save(result, output, json, dtype=dtype, overwrite=overwrite)
    return None


def compress(
    vector: Vector,
    output: Output,
    rank: Annotated[int | None, typer.Option(help="Keep this rank of each matrix.", min=1)] = None,
    energy: Annotated[float | None, typer.Option(help="Keep this share of the squared norm.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Allow this relative error.")] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Approximate the matrices of a vector at low rank.

    Give one of --rank, --energy and --tolerance.
    """
    from hf_taskvec.files.vector_format import JSON_NAME

    given = [value for value in (rank, energy, tolerance) if value is not None]
    if len(given) != 1:
        raise BadValueError("give one of --rank, --energy and --tolerance.")
    check_output(output, JSON_NAME, overwrite)
    found = load_vector(vector, token=token)
    if dry_run:
        shapes = [found.shape(name) for name in found]
        matrices = [shape for shape in shapes if len(shape) == 2]
        least = sum(4 * (rank or min(shape)) * sum(shape) for shape in matrices)
        largest = max((8 * shape[0] * shape[1] for shape in matrices), default=0)
        return Plan({vector: found.nbytes}, {output.name: least}, 3 * largest).result(output).show(json)
    small = found.compress(rank=rank, energy=energy, tolerance=tolerance)
    small.save(output, overwrite=overwrite)
    remember(output)
    nbytes = sum(path.stat().st_size for path in output.iterdir())
    ranks = [small.rank(name) for name in small if len(small.shape(name)) == 2]
    worst = listed(small.discarded, 1)
    values = {
        "output": str(output),
        "expression": small.expression,
        "bytes": nbytes,
        "ranks": [min(ranks), max(ranks)] if ranks else [],
        "discarded": dict(small.discarded),
    }
    lines = [f"{output}: {small.expression}", f"{size(nbytes)}, before {size(found.nbytes)}"]
    if ranks:
        lines.append(f"ranks {min(ranks)} to {max(ranks)}")
    if worst:
        lines.append(f"discarded at most {worst[0][1]:.2%} of a matrix's squared norm, of {worst[0][0]}")
    Result(values, lines).show(json)
    return None
