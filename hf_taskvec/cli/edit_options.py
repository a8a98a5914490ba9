"""What a sweep compares: one vector at many λ, or whole edits, as expressions over named vectors or as a grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from hf_taskvec.cli.arguments import load_vector, named_paths, parse_scales
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector

SweptArgument = Annotated[
    list[str], typer.Argument(metavar="[VECTOR] MODEL", help="The model; before it, the vector that λ scales.")
]
ScalesOption = Annotated[str | None, typer.Option("--scales", help="λ: a list, or start:stop:step; 0 to -1 by 0.2.")]
VectorsOption = Annotated[
    list[str] | None, typer.Option("--vector", metavar="NAME=PATH", help="A vector for --edit and --grid.")
]
EditsOption = Annotated[
    list[str] | None,
    typer.Option("--edit", metavar="EXPRESSION", help='Not λ, but whole edits: "-0.9*hp1 + 0.5*pp".'),
]
GridsOption = Annotated[
    list[str] | None, typer.Option("--grid", metavar="NAME=LIST", help="Or all combinations: hp1=-0.5,-1 and pp=0,0.5.")
]

_SCALES = "0:-1:-0.2"

# What was typed is quoted in errors: so `forget=-1` is not taken for an argument of Python's (`option_words`).


@dataclass(frozen=True)
class SweptChange:
    """What is compared, as it was typed; nothing is read yet.

    Args:
        model (`str`):
            The model.
        paths (`dict[str, str]`):
            Where each vector lies, by its name.
        scales (`list[float]`, *optional*):
            λ of the one vector; `None` for whole edits.
        expressions (`dict[str, str]`):
            Edits over the vectors, by the names that the report shows.
        grid (`dict[str, list[float]]`):
            Coefficients of vectors, of which all combinations are edits.
    """

    model: str
    paths: dict[str, str]
    scales: list[float] | None = None
    expressions: dict[str, str] = field(default_factory=dict)
    grid: dict[str, list[float]] = field(default_factory=dict)

    def load(self, token: str | None) -> "dict[str, TaskVector]":
        """The vectors by name; a single one that λ scales keeps the name it has."""
        names = {name: name if self.scales is None else None for name in self.paths}
        return {name: load_vector(path, names[name], token) for name, path in self.paths.items()}

    def edits(self, vectors: "Mapping[str, TaskVector]") -> "dict[str, TaskVector]":
        """The edits by name, if each has one of its own, changes something and is another than the rest."""
        from hf_taskvec.evaluation.edit_families import check_edit_names, edit_grid
        from hf_taskvec.publishing.notation import evaluate_expression

        found = [(name, evaluate_expression(text, vectors)) for name, text in self.expressions.items()]
        if self.grid:
            found += edit_grid({name: vectors[name] for name in self.grid}, self.grid).items()
        named: dict[frozenset[tuple[str, float]], str] = {}
        for name, vector in found:
            weights = frozenset(vector.provenance.weights)
            if not weights:
                raise BadValueError(
                    f"the edit {name!r} changes nothing. Leave it out: the untouched model is measured."
                )
            if weights in named:
                raise BadValueError(f"the edits {named[weights]!r} and {name!r} are the same. Leave one of them out.")
            named[weights] = name
        check_edit_names([name for name, _ in found])
        return dict(found)


def swept_change(
    given: Sequence[str],
    scales: str | None,
    vectors: Sequence[str] | None,
    edits: Sequence[str] | None,
    grids: Sequence[str] | None,
) -> SweptChange:
    """What was typed, if it is one vector and λ, or vectors by name and edits over them."""
    if len(given) > 2:
        raise BadValueError(f"sweep takes a vector and a model, not {len(given)} names. Give further ones by --vector.")
    if not edits and not grids:
        if vectors:
            raise BadValueError(
                f"--vector {vectors[0]!r} counts for --edit and --grid only. Say what to compare, as in "
                '--edit "-0.9*hp1 + 0.5*pp"; one vector at many λ stands before the model.'
            )
        if len(given) == 1:
            raise BadValueError(
                f"sweep takes VECTOR and MODEL, and there is only {given[0]}. For whole edits give --vector and --edit."
            )
        return SweptChange(given[1], {"vector": given[0]}, parse_scales(_SCALES if scales is None else scales))
    asked = f"--edit {edits[0]!r}" if edits else f"--grid {(grids or [''])[0]!r}"
    if scales is not None:
        raise BadValueError(
            f"--scales {scales} and {asked} are two ways to say how far to go: an edit is compared as it is. Leave "
            "--scales out, or sweep one vector without --edit and --grid."
        )
    if len(given) == 2:
        raise BadValueError(
            f"{asked} is over vectors with names, and {given[0]} has none: give it as --vector NAME={given[0]}, and "
            "only the model as an argument."
        )
    if not vectors:
        raise BadValueError(f"{asked} has no vectors. Give each that it names: --vector NAME=PATH.")
    paths = named_paths(vectors)
    expressions, grid = _expressions(edits or (), paths), _grid(grids or (), paths)
    _check_used(paths, expressions, grid)
    return SweptChange(given[0], paths, None, expressions, grid)


def _expressions(given: Sequence[str], paths: Mapping[str, str]) -> dict[str, str]:
    """`EXPRESSION` or `NAME=EXPRESSION`, by name; without one it is the expression itself."""
    from hf_taskvec.publishing.notation import names_in

    found: dict[str, str] = {}
    for each in given:
        text = " ".join(each.split())
        name, equals, rest = text.partition("=")  # an expression has it in brackets only: compress(v, rank=8)
        name, text = (name.strip(), rest.strip()) if equals and name.strip().isidentifier() else (text, text)
        if name in found:
            raise BadValueError(f"--edit {name!r} is there twice. Leave one out, or name them apart: NAME=EXPRESSION.")
        for vector in names_in(text):
            _check_vector(vector, paths, f"--edit {text!r}")
        found[name] = text
    return found


def _grid(given: Sequence[str], paths: Mapping[str, str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in given:
        name, _, values = each.partition("=")
        if not name or not values.strip():
            raise BadValueError(f"--grid {each!r}: write it as NAME=LIST, e.g. hp1=-0.5,-0.9 or hp1=0:-1:-0.2.")
        _check_vector(name, paths, f"--grid {each!r}")
        if name in found:
            raise BadValueError(f"--grid {each!r}: {name} has coefficients already. Give all of them in one list.")
        found[name] = parse_scales(values)
    return found


def _check_vector(name: str, paths: Mapping[str, str], where: str) -> None:
    if name not in paths:
        raise MissingNameError(
            f"{where}: no vector is called {name!r}.{did_you_mean(name, paths)} Add --vector '{name}=PATH', or use "
            f"{', '.join(paths)}."
        )


def _check_used(paths: Mapping[str, str], expressions: Mapping[str, str], grid: Mapping[str, list[float]]) -> None:
    from hf_taskvec.publishing.notation import names_in

    used = {*grid, *(name for text in expressions.values() for name in names_in(text))}
    if unused := [name for name in paths if name not in used]:
        raise BadValueError(f"no edit uses --vector {f'{unused[0]}={paths[unused[0]]}'!r}. Leave it out, or use it.")
