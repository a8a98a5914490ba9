"""How `forget` trains: the options of the book's vector and of a repair, and the settings that they make."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec.errors import BadValueError

if TYPE_CHECKING:
    from hf_taskvec.training.settings import TrainingSettings

_PANEL = "How the vector and a repair are trained"


def _number(option: str, help: str, metavar: str = "NUMBER", least: int = 1) -> Any:
    return typer.Option(option, metavar=metavar, min=least, help=help, rich_help_panel=_PANEL)


MethodOption = Annotated[str | None, typer.Option("--method", help="full or lora; full.", rich_help_panel=_PANEL)]
EpochsOption = Annotated[int | None, _number("--epochs", "Of the vector; 5.")]
LearningRateOption = Annotated[
    float | None, typer.Option("--learning-rate", help="The highest; 1e-4.", rich_help_panel=_PANEL)
]
RankOption = Annotated[int | None, _number("--rank", "Of LoRA's factors; 32.")]
TrainBatchSizeOption = Annotated[int | None, _number("--train-batch-size", "In a step; 8, half in a repair.", "BLOCKS")]
BlockLengthOption = Annotated[
    int | None, _number("--block-length", "Of a block; 256, or what the model reads.", "TOKENS", 2)
]
BlockStrideOption = Annotated[
    int | None, _number("--block-stride", "From a block's start to the next; its length.", "TOKENS")
]
RepairEpochsOption = Annotated[int | None, _number("--repair-epochs", "Of the first repair; half of the vector's.")]
RepairLearningRateOption = Annotated[
    float | None, typer.Option("--repair-learning-rate", help="The vector's.", rich_help_panel=_PANEL)
]


def chosen_training(
    method: str | None, rank: int | None, repair: dict[str, Any], seed: int, **given: Any
) -> "tuple[TrainingSettings, TrainingSettings]":
    """How the vector and a repair are trained; whatever was not typed (`None`) is as in Python."""
    from hf_taskvec.forgetting.forget_inputs import default_repairing, default_training

    if rank is not None and method != "lora":
        raise BadValueError(f"--rank {rank} counts for --method lora only. Give that as well.")
    tuning = replace(default_training(seed), **_typed({"method": method, "rank": rank, **given}))
    try:
        return tuning, replace(default_repairing(tuning), **_typed(repair))
    except BadValueError as error:  # it names a setting; a repair's has an option of its own
        raise BadValueError(f"repair_{error}") from None


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
