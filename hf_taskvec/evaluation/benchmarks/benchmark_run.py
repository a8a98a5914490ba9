"""A benchmark on a live model, beside the model that was retrained without the forget set."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hf_taskvec.atomic import ensure_writable
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages, store_folder
from hf_taskvec.evaluation.benchmarks.asking_items import AnsweredBenchmark, ask_benchmark, prepare
from hf_taskvec.evaluation.benchmarks.benchmark_report import (
    BenchmarkReport,
    PartResult,
    RetrainedModel,
    check_retrained,
    item_values,
)
from hf_taskvec.evaluation.benchmarks.named_benchmarks import DEFINITIONS, Benchmark, check_parts_differ
from hf_taskvec.evaluation.sweeping import package_versions
from hf_taskvec.models.loading import tokenizer_of


def run_benchmark(
    benchmark: Benchmark,
    model: Any,
    tokenizer: Any = None,
    *,
    retrained: Any = None,
    output: str | Path | None = None,
    store: str | Path | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> BenchmarkReport:
    """A benchmark's metrics of a live model, with every item's numbers.

    The model is asked as it is: apply an edit first, or set its λ. It is left as it was.

    Args:
        benchmark (`Benchmark`):
            By `load_benchmark`.
        model (`PreTrainedModel` or `PeftModel`):
            A causal language model, on its device(s).
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the model; loaded from where the model came from without it.
        retrained (model, `BenchmarkReport`, `str` or `Path`):
            The model that was trained without the forget set, or its report on this benchmark, or where that was saved.
            Forget quality and PrivLeak compare with it. To make that report, give the retrained model as `model` and as
            `retrained`: it is asked once. It shares the tokenizer.
        output (`str` or `Path`, *optional*):
            Folder for `benchmark.json`, `benchmark.md` and, unless `store` names another, the store.
        store (`str` or `Path`, *optional*):
            Folder of finished items; an interrupted run continues from it.
        batch_size (`int`, *optional*):
            Rows in one batch; found automatically without it.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `BenchmarkReport`: Print it for the table beside the published rows.

    Raises:
        `BadValueError`: If `retrained` is missing, an item does not fit into a model's context, or the tokenizer lacks
            what the prompt form needs; before any work. Also if the retrained model's AUC is 1, see `privacy_leak`.
        `MismatchError`: If `retrained` is a report of other questions, or of a model that was itself compared with
            another one; or if the tokenizer is not the model's.
        `MissingFileError`, `CorruptFileError`: If there is no report at `retrained`, or it is damaged.
        `OutputError`: If `output` or `store` cannot be written; before any work.

    Example:
        >>> benchmark = load_benchmark("tofu/forget10")  # doctest: +SKIP
        >>> run_benchmark(benchmark, retrained, retrained=retrained, output="retrained/")  # doctest: +SKIP
        >>> with vector.edit(model, -0.8):  # doctest: +SKIP
        ...     print(run_benchmark(benchmark, model, retrained="retrained/"))

    """
    _check_parts(benchmark)
    reference = _reference(retrained, benchmark)
    if output is not None:
        ensure_writable(Path(output))
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    models = {"model": model}
    if not isinstance(reference, BenchmarkReport) and reference is not model:
        models["retrained model"] = reference
    prepared = {name: prepare(benchmark, tokenizer, each.config) for name, each in models.items()}  # all, before any
    asking = partial(
        ask_benchmark,
        tokenizer=tokenizer,
        store=FinishedPassages(store_folder(store, output)),
        batch_size=batch_size,
        progress=progress,
    )
    answered = {name: asking(prepared[name], each, label=name) for name, each in models.items()}
    own = _part_results(benchmark, answered["model"])
    if isinstance(reference, BenchmarkReport):
        other, fingerprint = reference.parts, reference.model
    elif reference is model:
        other, fingerprint = own, answered["model"].fingerprint
    else:
        other = _part_results(benchmark, answered["retrained model"])
        fingerprint = answered["retrained model"].fingerprint
    scores, values = DEFINITIONS[benchmark.name].scores, item_values(other)
    report = BenchmarkReport(
        benchmark=benchmark.name,
        model=answered["model"].fingerprint,
        prompt=benchmark.prompt,
        metrics=scores(item_values(own), values),
        retrained=RetrainedModel(fingerprint, scores(values, values)),
        parts=own,
        versions=package_versions(),
    )
    state = processes()
    if output is not None and state.is_main_process:
        report.save(output)
    state.wait_for_everyone()
    return report


def _check_parts(benchmark: Benchmark) -> None:
    """Refuse a benchmark that was changed by hand so that its metrics could not be computed, or would mean nothing."""
    wanted, given = ([part.name for part in parts] for parts in (DEFINITIONS[benchmark.name].parts, benchmark.parts))
    if wanted != given:
        raise BadValueError(f"{benchmark.name} has the parts {', '.join(wanted)}, not {', '.join(given)}")
    check_parts_differ(benchmark.parts)


def _reference(retrained: Any, benchmark: Benchmark) -> Any:
    """The retrained model, or its report on the same questions."""
    if retrained is None:
        raise BadValueError(
            f"{benchmark.name} compares with a model that was trained without the forget set: give it as retrained=, "
            "or the report that run_benchmark made of it, or where that was saved. To make that report, give the "
            "retrained model as model and as retrained="
        )
    if isinstance(retrained, str | Path):
        retrained = BenchmarkReport.load(retrained)
    if isinstance(retrained, BenchmarkReport):
        check_retrained(retrained, benchmark)
    elif isinstance(retrained, Mapping) or not callable(retrained):
        raise BadValueError(
            f"retrained= is a live model, a BenchmarkReport or where one was saved, not a {type(retrained).__name__}"
        )
    return retrained


def _part_results(benchmark: Benchmark, answered: AnsweredBenchmark) -> tuple[PartResult, ...]:
    return tuple(
        PartResult(part.name, part.source.id, part.fingerprint, part.protocol.id, answered.results[part.name])
        for part in benchmark.parts
    )
