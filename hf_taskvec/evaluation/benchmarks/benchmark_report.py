"""What a benchmark says of a model: every item's numbers, the metrics, and the published rows beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_taskvec.errors import CorruptFileError, MismatchError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.benchmarks.asking_items import ItemResult
from hf_taskvec.evaluation.benchmarks.benchmark_scores import ItemValues
from hf_taskvec.evaluation.benchmarks.named_benchmarks import DEFINITIONS, ITEM_VALUES, Benchmark
from hf_taskvec.evaluation.benchmarks.prompt_forms import PromptForm
from hf_taskvec.evaluation.reporting.report_files import (
    ReportFormat,
    load_report,
    report_from_dict,
    report_to_dict,
    save_report,
)
from hf_taskvec.filenames import BENCHMARK_JSON, BENCHMARK_MARKDOWN

_FORMAT = ReportFormat(
    "hf_taskvec/benchmark-report", 1, BENCHMARK_JSON, BENCHMARK_MARKDOWN, "benchmark report", "benchmark"
)


@dataclass(frozen=True)
class PartResult:
    """A model's results on one part of a benchmark.

    Args:
        name (`str`):
            Of the part.
        source (`str`):
            The data set, its configuration and its split.
        fingerprint (`str`):
            sha256 of the rows that were asked.
        protocol (`str`):
            How the model generated: name and hash.
        items (`tuple[ItemResult]`):
            The output and the numbers of each row, in the order of the data set.
    """

    name: str
    source: str
    fingerprint: str
    protocol: str
    items: tuple[ItemResult, ...] = field(repr=False)


@dataclass(frozen=True)
class RetrainedModel:
    """The model that never saw the forget set, as a report compares with it.

    Args:
        fingerprint (`str`):
            Of its weights.
        metrics (`dict[str, float]`):
            Its own metrics, compared with itself.
    """

    fingerprint: str
    metrics: dict[str, float]


@dataclass(frozen=True)
class BenchmarkReport:
    """The result of `run_benchmark`. Print it, or `save` it: the retrained model's serves all later runs.

    Args:
        benchmark (`str`):
            The benchmark's name.
        model (`str`):
            The fingerprint of the model's weights.
        prompt (`PromptForm`):
            How questions were put.
        metrics (`dict[str, float]`):
            What the benchmark reports, by name.
        retrained (`RetrainedModel`):
            What it was compared with.
        parts (`tuple[PartResult]`):
            The outputs and numbers of every item.
        versions (`dict[str, str]`):
            Of the packages that were used.
    """

    benchmark: str
    model: str
    prompt: PromptForm
    metrics: dict[str, float]
    retrained: RetrainedModel
    parts: tuple[PartResult, ...] = field(repr=False)
    versions: dict[str, str] = field(repr=False)

    def __str__(self) -> str:
        return self.to_markdown()

    def hub_scores(self) -> list[tuple[str, str, float, str]]:
        """Every metric as the Hub's leaderboards take it: the data set, the metric, its value and a note.

        Returns:
            `list[tuple[str, str, float, str]]`: One for each metric.
        """
        dataset = self.parts[0].source.split()[0]  # `me/data (config, split x)`
        notes = f"{self.benchmark} by hf_taskvec, prompts {self.prompt.name}"
        return [(dataset, name, value, notes) for name, value in self.metrics.items()]

    def metric(self, name: str) -> float:
        """The metric of that name.

        Raises:
            `MissingNameError`: If the benchmark has none.
        """
        if name not in self.metrics:
            raise MissingNameError(
                f"{self.benchmark} has no metric {name!r}.{did_you_mean(name, self.metrics)} Its metrics are "
                f"{', '.join(self.metrics)}"
            )
        return self.metrics[name]

    @property
    def values(self) -> ItemValues:
        """The numbers of all items, by part and name."""
        return item_values(self.parts)

    def to_dict(self) -> dict[str, Any]:
        """The report as `benchmark.json` holds it."""
        return report_to_dict(self, _FORMAT)

    def to_markdown(self) -> str:
        """The published rows, the retrained model's and the model's own in one table, and every metric explained."""
        from hf_taskvec.evaluation.benchmarks.benchmark_table import benchmark_markdown

        return benchmark_markdown(self)

    def save(self, output: str | Path) -> Path:
        """Write `benchmark.json` and `benchmark.md`; each appears under its name only when it is complete.

        Args:
            output (`str` or `Path`):
                The folder; made if it does not exist.

        Returns:
            `Path`: The folder that was written.

        Raises:
            `OutputError`: If the folder cannot be written.
        """
        return save_report(self, _FORMAT, output)

    @classmethod
    def load(cls, path: str | Path) -> "BenchmarkReport":
        """The report that `save` wrote.

        Args:
            path (`str` or `Path`):
                A `benchmark.json`, or the folder that holds it.

        Returns:
            `BenchmarkReport`: Equal to the one that was saved.

        Raises:
            `MissingFileError`: If there is none.
            `CorruptFileError`: If it is damaged, or of another version.
        """
        return load_report(cls, _FORMAT, path, _check)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "BenchmarkReport":
        """The report that `to_dict` described.

        Raises:
            `CorruptFileError`: If it is damaged, no report, or of another version.
        """
        return report_from_dict(cls, _FORMAT, content, "the benchmark report", _check)


def item_values(parts: Sequence[PartResult]) -> ItemValues:
    """The numbers of all items, by part and name."""
    return {
        part.name: {name: [item.values[name] for item in part.items] for name in part.items[0].values} for part in parts
    }


def check_retrained(report: BenchmarkReport, benchmark: Benchmark) -> None:
    """Refuse a report that is not the retrained model's own, or of other questions than the benchmark's.

    Raises:
        `MismatchError`: With what differs.
    """
    if report.model != report.retrained.fingerprint:
        raise MismatchError(
            f"the report of model {report.model[:12]} compares it with the retrained model "
            f"{report.retrained.fingerprint[:12]}: retrained= takes the report of the retrained model itself"
        )
    if report.benchmark != benchmark.name:
        raise MismatchError(
            f"the retrained model's report is of {report.benchmark}, not of {benchmark.name}: run this benchmark on it"
        )
    if report.prompt != benchmark.prompt:
        raise MismatchError(
            f"the retrained model was asked in the prompt form {report.prompt.name!r}, this benchmark is loaded with "
            f"{benchmark.prompt.name!r}: use one form for both models"
        )
    for part, result in zip(benchmark.parts, report.parts, strict=True):
        if part.fingerprint != result.fingerprint:
            raise MismatchError(
                f"part {part.name!r} holds other rows ({part.source.id}) than the retrained model was asked "
                f"({result.source}): use one revision of the data set for both, and each data set in its own place"
            )
        if part.protocol.id != result.protocol:
            raise MismatchError(
                f"part {part.name!r} is asked as {part.protocol.id}, the retrained model was asked as "
                f"{result.protocol}: run the benchmark on it again"
            )


def _check(report: BenchmarkReport) -> None:
    """Refuse what is of the right types and yet is no result of this benchmark."""
    definition = DEFINITIONS.get(report.benchmark)
    if definition is None:
        raise CorruptFileError(f"there is no benchmark {report.benchmark[:60]!r}.")
    names = {info.name for info in definition.metrics}
    if set(report.metrics) != names or set(report.retrained.metrics) != names:
        raise CorruptFileError(f"its metrics are not those of {report.benchmark}.")
    if [part.name for part in report.parts] != [part.name for part in definition.parts]:
        raise CorruptFileError(f"its parts are not those of {report.benchmark}.")
    for part, defined in zip(report.parts, definition.parts, strict=True):
        wanted = set(ITEM_VALUES[defined.kind])
        if not part.items or any(set(item.values) != wanted for item in part.items):
            raise CorruptFileError(f"its part {part.name!r} lacks items, or an item lacks a number.")
