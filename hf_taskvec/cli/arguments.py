"""Options that several commands have, and reading what was typed: names of vectors, lists of λ, expressions."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

VectorArgument = Annotated[str, typer.Argument(metavar="VECTOR", help="A saved task vector, or a LoRA adapter.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model: a folder or a Hub id.")]
ArtifactArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="What apply, adapter, extract or combine wrote.")
]

OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output there.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be read and written, and do nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
TokenOption = Annotated[
    str | None, typer.Option("--token", metavar="TOKEN", help="Hub token; by default that of the login.")
]

StoredDtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="Round dense changes to this, e.g. bfloat16; lossless by default.")
]
ScaleOption = Annotated[float | None, typer.Option("--scale", help="λ; 1 by default.")]
ReportOption = Annotated[
    Path | None, typer.Option("--report", metavar="FOLDER", help="A sweep's report: take the λ it chose.")
]

CardReportOption = Annotated[
    Path | None, typer.Option("--report", metavar="FOLDER", help="A sweep's report; by default FOLDER/report.")
]
BaseModelOption = Annotated[
    str | None, typer.Option("--base-model", metavar="ID", help="The base's Hub id, for the card.")
]
DatasetsOption = Annotated[
    list[str] | None, typer.Option("--dataset", metavar="ID", help="Hub id of a data set, for the card.")
]
PurposeOption = Annotated[str | None, typer.Option("--purpose", help="Why the edit was made, in a sentence.")]


def load_vector(where: str, name: str | None = None, token: str | None = None) -> "TaskVector":
    """A saved task vector, or that of a LoRA adapter, from a folder or the Hub."""
    from hf_taskvec.extraction.from_any import open_vector

    return open_vector(where, name=name, token=token)


def named_paths(given: Sequence[str]) -> dict[str, str]:
    """`NAME=PATH` arguments as a mapping. A path alone is named by its last part."""
    from hf_taskvec.algebra.expressions import label_for

    found: dict[str, str] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals:
            name, path = label_for(each.partition("@")[0]), each
        if not name.isidentifier():
            raise BadValueError(f"{name!r} cannot name a vector: use letters, digits and _, as in hp1=path/to/vector.")
        if name in found:
            raise BadValueError(f"two vectors are called {name!r}. Name them apart: NAME=PATH.")
        found[name] = path
    return found


def chosen_scale(scale: float | None, report_folder: Path | None) -> "tuple[float, UnlearningReport | None]":
    """λ, as given, else as the report chose it, else 1; and the report, if there is one."""
    if report_folder is None:
        return (1.0 if scale is None else scale), None
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

    report = UnlearningReport.load(report_folder)
    if scale is not None:
        return scale, report
    if report.edits:
        raise BadValueError(f"the report compares whole edits, not λ. {_way_to_edit(report)}")
    if report.choice is None or report.choice.scale is None:
        reason = report.choice.reason if report.choice is not None else "no book is marked as one to forget"
        raise BadValueError(f"the report chose no λ ({reason}). Choose one yourself with --scale.")
    if report.choice.scale == 0:
        raise BadValueError(
            f"the report chose λ=0, the model as it is: {report.choice.reason}. To edit it all the same, pass --scale."
        )
    return report.choice.scale, report


def _way_to_edit(report: "UnlearningReport") -> str:
    """How to get the edit that a report of named edits chose."""
    chosen = report.choice.scale if report.choice is not None else None
    if not chosen:
        told = "chose the untouched model" if chosen == 0 else "chose none of them"
        return f"It {told}. To edit all the same, make a vector of one with `taskvec combine`, and pass --scale 1."
    made = report.edits[int(chosen) - 1].expression
    return (
        f'Make a vector of {report.names.phrase(chosen)}, which it chose, with `taskvec combine "{made}" NAME=PATH …`, '
        "and give that with --scale 1."
    )


def parse_scales(text: str) -> list[float]:
    """λ from `0,-0.2,-0.4` or `0:-1:-0.2` (both ends included).

    >>> parse_scales("0:-1:-0.25")
    [0.0, -0.25, -0.5, -0.75, -1.0]
    """
    try:
        if ":" in text:
            start, stop, step = (float(part) for part in text.split(":"))
            count = round((stop - start) / step)
            if step == 0 or count < 0 or count > 1000:
                raise ValueError
            return [round(start + step * k, 12) + 0.0 for k in range(count + 1)]
        return [float(part) for part in re.split(r"[,\s]+", text.strip()) if part]
    except (ValueError, ZeroDivisionError):
        raise BadValueError(f"{text!r} is no list of λ. Write it like 0,-0.2,-0.4 or 0:-1:-0.2.") from None


def protect_expression(arguments: list[str]) -> list[str]:
    """The arguments, with an expression that begins with a minus kept from being taken for an option.

    >>> protect_expression(["combine", "-0.6*hp1 + hp2", "-o", "out"])
    ['combine', ' -0.6*hp1 + hp2', '-o', 'out']
    """
    if "combine" not in arguments[:1]:
        return arguments
    is_expression = re.compile(r"-\s*(?:[\d.(]|[A-Za-z_]\w*\s*[-+*/]|(?!o$|h$)[A-Za-z_]\w*$)")
    return [f" {each}" if is_expression.match(each) and not each.startswith("--") else each for each in arguments]
