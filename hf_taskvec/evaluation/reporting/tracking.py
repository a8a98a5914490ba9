"""A report in accelerate's trackers: numbers for every one, tables and plots for TensorBoard, W&B and trackio.

The passages' texts are left out: trackers may send what they are given to a server.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.distributed import make_accelerator
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.evaluation.reporting.score_frame import score_frame, utility_frame
from hf_taskvec.evaluation.reporting.tables import score_table, utility_table, verdict
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.figures import pixels

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

_PROJECT = "hf_taskvec"
# What accelerate would need for a tracker; it leaves one out that is missing, and says nothing.
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}


def check_trackers(log_with: Any, output: str | Path | None) -> None:
    """Refuse trackers that could not log, before any work.

    Args:
        log_with (a name, a tracker of accelerate's, or several):
            As accelerate takes it.
        output (`str` or `Path`, *optional*):
            The folder of the report.

    Raises:
        `UnsupportedError`: If a tracker's package is not installed.
        `BadValueError`: If TensorBoard has no folder to write to.
    """
    given = log_with if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]
    for name in (str(getattr(each, "value", each)) for each in given):
        if name in _PACKAGES and not any(find_spec(package) for package in _PACKAGES[name]):
            raise UnsupportedError(f"log_with={name!r} needs that package: pip install 'hf-taskvec[trackers]'")
        if name == "tensorboard" and output is None:
            raise BadValueError("log_with='tensorboard' writes files: give output=, the folder for them.")


def track(report: UnlearningReport, log_with: Any, output: str | Path | None) -> None:
    """Hand a report to accelerate's trackers: a step for each λ, in the order of the report; then tables and plots.

    Args:
        report (`UnlearningReport`):
            What is logged.
        log_with (a name, a tracker of accelerate's, or several):
            As accelerate takes it.
        output (`str` or `Path`, *optional*):
            The folder that TensorBoard's files go to.
    """
    accelerator = make_accelerator(log_with=log_with, project_dir=None if output is None else str(output))
    about = {"model": report.model, "edit": report.edit, "protocol": report.protocol.id, "seed": report.settings.seed}
    accelerator.init_trackers(_PROJECT, config=about)
    for step, scale in enumerate(report.scales):
        values = {f"{s.book}/{s.split}/{s.metric}": s.value.value for s in report.scores if s.scale == scale}
        values |= {f"utility/{s.metric}": s.value.value for s in report.utility if s.scale == scale}
        accelerator.log({"scale": scale, **values}, step=step)
    if accelerator.is_main_process:
        for tracker in accelerator.trackers:
            if tracker.name in _SHOWN:
                _SHOWN[tracker.name](tracker, report, len(report.scales) - 1)
    accelerator.end_training()


def _plots(report: UnlearningReport) -> dict[str, Any]:
    """Every plot as an array of pixels; none without matplotlib. That of the passages shows their texts."""
    if find_spec("matplotlib") is None:
        return {}
    return {name: pixels(figure) for name, figure in report.figures().items() if name != "samples"}


def _frames(report: UnlearningReport) -> Mapping[str, Any]:
    return {"scores": score_frame(report)} | ({"utility": utility_frame(report)} if report.utility else {})


def _in_tensorboard(tracker: "GeneralTracker", report: UnlearningReport, step: int) -> None:
    """Tables as text in Markdown, which TensorBoard shows as tables."""
    texts = {f"table/{info.name}": score_table(report, info.name) for info in report.metrics}
    texts |= {"table/utility": utility_table(report)} if report.utility else {}
    tracker.log({"verdict": verdict(report), **texts}, step=step)
    for name, image in _plots(report).items():
        tracker.log_images({f"plot/{name}": image[None]}, step=step, dataformats="NHWC")


def _in_wandb(tracker: "GeneralTracker", report: UnlearningReport, step: int) -> None:
    import wandb

    found = {f"table/{name}": wandb.Table(dataframe=frame) for name, frame in _frames(report).items()}
    found |= {f"plot/{name}": wandb.Image(image) for name, image in _plots(report).items()}
    tracker.tracker.summary["verdict"] = verdict(report)
    tracker.log(found, step=step)


def _in_trackio(tracker: "GeneralTracker", report: UnlearningReport, step: int) -> None:
    import trackio

    found = {f"table/{name}": trackio.Table(dataframe=frame) for name, frame in _frames(report).items()}
    found |= {f"plot/{name}": trackio.Image(image) for name, image in _plots(report).items()}
    tracker.log({"verdict": verdict(report), **found}, step=step)


_SHOWN: dict[str, Callable[["GeneralTracker", UnlearningReport, int], None]] = {
    "tensorboard": _in_tensorboard,
    "wandb": _in_wandb,
    "trackio": _in_trackio,
}
