"""What "forgotten" and "kept" have to mean: the options of `sweep`, `choose` and `audit`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.evaluation.scoring.criteria import Criteria

_PANEL = "What forgotten and kept mean"

MetricOption = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="NAME", help="All of these must agree; the first leads.", rich_help_panel=_PANEL),
]
LowOption = Annotated[float | None, typer.Option("--low", help="R below is still known; 0.8.", rich_help_panel=_PANEL)]
HighOption = Annotated[
    float | None, typer.Option("--high", help="R above is beyond never seen; 1.2.", rich_help_panel=_PANEL)
]
MembershipOption = Annotated[
    float | None,
    typer.Option("--membership", help="How far the AUC may be from never seen; 0.15.", rich_help_panel=_PANEL),
]
RetainBoundOption = Annotated[
    float | None,
    typer.Option("--retain-bound", help="The share that a kept book may lose; 0.1.", rich_help_panel=_PANEL),
]
CertainOption = Annotated[
    bool, typer.Option("--certain", help="Choose by whole intervals, not by means.", rich_help_panel=_PANEL)
]
JudgingRuleOption = Annotated[
    str | None,
    typer.Option("--rule", help="relative (R), or margin: the weaker rule of before.", rich_help_panel=_PANEL),
]
MarginOption = Annotated[
    float | None, typer.Option("--margin", help="For the rule margin; 0.03.", rich_help_panel=_PANEL)
]


def chosen_criteria(metric: list[str] | None, **given: Any) -> "Criteria":
    """The criteria; whatever was not typed (`None`) is as in Python."""
    from hf_taskvec.evaluation.scoring.criteria import Criteria

    typed = {name: value for name, value in given.items() if value is not None}
    if "margin" in typed and typed.get("rule") != "margin":
        raise BadValueError(f"--margin {typed['margin']:g} counts for --rule margin only. Give that as well.")
    return Criteria(**typed, metrics=tuple(metric)) if metric else Criteria(**typed)
