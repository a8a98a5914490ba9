"""What others report of the same benchmarks, to be put beside a result.

All rows are those of open-unlearning's `docs/repro.md` (github.com/locuslab/open-unlearning, commit d3d7cf9). Its
authors give them for reproduction only: every method has the same learning rate, number of epochs and batch size and
none is tuned.
"""

from dataclasses import dataclass

PUBLISHED_SOURCE = (
    "open-unlearning, docs/repro.md. Its authors call these rows untuned (one learning rate, 10 epochs and batches of "
    "32 for every method) and give them for reproduction only"
)


@dataclass(frozen=True)
class PublishedRow:
    """The figures of one method.

    Args:
        method (`str`):
            Its name; `full` is the model that knows everything, `retrained` the one that never saw the forget set.
        metrics (`dict[str, float]`):
            Its figures, by the names of ours.
    """

    method: str
    metrics: dict[str, float]


@dataclass(frozen=True)
class PublishedTable:
    """The figures of one model on one benchmark.

    Args:
        model (`str`):
            What was edited.
        rows (`tuple[PublishedRow]`):
            One of each method.
    """

    model: str
    rows: tuple[PublishedRow, ...]


_METHODS = ("full", "retrained", "GradAscent", "GradDiff", "NPO", "SimNPO", "RMU")
_MUSE = ("forget_knowmem", "forget_verbmem", "privleak", "retain_knowmem")
_TOFU = ("forget_quality", "model_utility", "forget_truth_ratio")


def _table(model: str, columns: tuple[str, ...], *rows: tuple[float, ...]) -> PublishedTable:
    figures = zip(_METHODS, rows, strict=True)
    return PublishedTable(
        model, tuple(PublishedRow(method, dict(zip(columns, row, strict=True))) for method, row in figures)
    )


_TARGETS = "MUSE's target model (Llama-2-7B)"
_LLAMA = "Llama-3.2-1B-Instruct, with its chat template"
PUBLISHED = {
    "muse/news": _table(
        _TARGETS,
        _MUSE,
        (0.64, 0.58, -99.81, 0.56),
        (0.33, 0.20, 0, 0.56),
        (0, 0, 52.11, 0),
        (0.41, 8.92e-03, 93.23, 0.37),
        (0.56, 0.35, -86.00, 0.51),
        (0.54, 0.36, -86.11, 0.51),
        (0.48, 0.05, 56.36, 0.51),
    ),
    "muse/books": _table(
        _TARGETS,
        _MUSE,
        (0.47, 1.0, -57.26, 0.69),
        (0.30, 0.14, 0, 0.69),
        (0, 0, -0.67, 0),
        (0.18, 0.16, -37.79, 0.30),
        (0.32, 0.84, -54.24, 0.55),
        (0.32, 0.84, -54.26, 0.54),
        (0.29, 0.79, -60.52, 0.48),
    ),
    "tofu/forget01": _table(
        _LLAMA,
        _TOFU,
        (0.01, 0.60, 0.47),
        (1.0, 0.60, 0.65),
        (0.27, 0.33, 0.59),
        (0.77, 0.43, 0.57),
        (0.92, 0.56, 0.66),
        (0.58, 0.46, 0.55),
        (0.16, 0.55, 0.70),
    ),
    "tofu/forget05": _table(
        _LLAMA,
        _TOFU,
        (1.33e-13, 0.60, 0.47),
        (1.0, 0.60, 0.64),
        (1.94e-119, 0, 2.52e-23),
        (1.94e-119, 0.53, 3.87e-34),
        (0.14, 0.45, 0.70),
        (5.01e-100, 0.58, 4.19e-03),
        (4.87e-10, 0.58, 0.77),
    ),
    "tofu/forget10": _table(
        _LLAMA,
        _TOFU,
        (1.66e-21, 0.60, 0.48),
        (1.0, 0.59, 0.63),
        (1.06e-239, 0, 2.25e-18),
        (1.06e-239, 0.49, 3.53e-27),
        (0.02, 0.46, 0.70),
        (2.47e-203, 0.54, 1.07e-05),
        (3.15e-15, 0.59, 0.76),
    ),
}
