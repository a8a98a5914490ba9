"""A benchmark's report as Markdown: the published rows first, then what was measured here, then every metric."""

from hf_taskvec.escaping import markdown, markdown_cell, markdown_code
from hf_taskvec.evaluation.benchmarks.benchmark_report import BenchmarkReport
from hf_taskvec.evaluation.benchmarks.named_benchmarks import DEFINITIONS
from hf_taskvec.evaluation.benchmarks.published_rows import PUBLISHED, PUBLISHED_SOURCE
from hf_taskvec.evaluation.reporting.number_formats import format_number
from hf_taskvec.evaluation.scoring.metrics import MetricInfo


def benchmark_markdown(report: BenchmarkReport) -> str:
    """The page `benchmark.md`."""
    definition, published = DEFINITIONS[report.benchmark], PUBLISHED[report.benchmark]
    infos = {info.name: info for info in definition.metrics}
    columns = [infos[name] for name in published.rows[0].metrics]
    lines = [
        f"# Benchmark {report.benchmark}",
        "",
        f"Model {markdown_code(report.model[:12])}, retrained model "
        f"{markdown_code(report.retrained.fingerprint[:12])}; prompt form {markdown_code(report.prompt.name)}.",
        "",
        f"| | {' | '.join(info.title for info in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for row in published.rows:
        lines.append(_row(f"{row.method} (published)", row.metrics, columns))
    lines.append(_row("retrained (measured)", report.retrained.metrics, columns))
    lines.append(_row("**this model (measured)**", report.metrics, columns))
    lines += [
        "",
        f"Published rows: {published.model}; {PUBLISHED_SOURCE}. Rows of another model, prompt form or retrained model "
        "are not comparable with the measured ones.",
        "",
        "| metric | this model | retrained | definition |",
        "|---|---|---|---|",
    ]
    for info in definition.metrics:
        own, other = (format_metric(found[info.name], info) for found in (report.metrics, report.retrained.metrics))
        lines.append(f"| {markdown_cell(info.title)} | {own} | {other} | {markdown_cell(info.definition)} |")
    lines += ["", "| part | items | data set |", "|---|---|---|"]
    lines += [f"| {part.name} | {len(part.items)} | {markdown_cell(part.source)} |" for part in report.parts]
    used = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return "\n".join([*lines, "", markdown(f"Versions: {used}."), ""])


def format_metric(value: float, info: MetricInfo) -> str:
    """A metric's value; a p-value of 1e-21 with its power of ten, not as 0.

    >>> format_metric(1.664e-21, MetricInfo("forget_quality", "memory", False, "a p-value"))
    '1.66e−21'
    """
    if 0 < abs(value) < 10**-info.digits:
        return f"{value:.3g}".replace("-", "−")
    return format_number(value, info.digits)


def _row(name: str, metrics: dict[str, float], columns: list[MetricInfo]) -> str:
    return f"| {name} | {' | '.join(format_metric(metrics[info.name], info) for info in columns)} |"
