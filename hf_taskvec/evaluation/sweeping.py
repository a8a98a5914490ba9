"""The sweep: a model, an edit, some λ and some books → an `UnlearningReport`."""

import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec._version import __version__
from hf_taskvec.atomic import ensure_writable
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.edit_families import EditsInTurn, check_edits_fit, gentlest_first, named_edits
from hf_taskvec.evaluation.reporting import summary
from hf_taskvec.evaluation.reporting.passage_halves import choose_scale
from hf_taskvec.evaluation.reporting.report_parts import (
    BookInfo,
    PassageAtReference,
    PassageAtScale,
    PassageResult,
    ReferenceInfo,
    Settings,
    Timing,
    named_references,
)
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.edit_names import EditNames
from hf_taskvec.evaluation.scoring.metrics import METRICS, Metric, MetricInfo, measure_answers, own_metric
from hf_taskvec.evaluation.scoring.statistics import Draws
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.books import Book, check_book_names
from hf_taskvec.evaluation.texts.leaks import check_leaks, find_all_passages
from hf_taskvec.models.trained_books import recorded_books

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.asking.batched_asking import Asked
    from hf_taskvec.evaluation.asking.scalable_edits import ScalableEdit
    from hf_taskvec.evaluation.utility import Utility

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy", "rapidfuzz", "nltk")


def sweep(
    model: Any,
    change: "TaskVector | ScalableEdit | Mapping[str, TaskVector] | Sequence[TaskVector] | None",
    scales: Sequence[float] | None,
    books: Book | Sequence[Book],
    protocol: "str | protocols.Protocol | None" = None,
    *,
    merge: bool = True,
    tokenizer: Any = None,
    reference: Any = None,
    output: str | Path | None = None,
    store: str | Path | None = None,
    batch_size: int | None = None,
    likelihood: bool = True,
    criteria: Criteria | None = None,
    own_metrics: Sequence[Metric | str] = (),
    utility: "Utility | None" = None,
    split_followed: bool | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    permutations: int = 10_000,
    seed: int = 0,
    log_with: Any = None,
    progress: bool | None = None,
) -> UnlearningReport:
    """An `UnlearningReport`: what each λ made the model forget and keep, with intervals, and which λ to take.

    Under `accelerate launch` every process calls this with the same arguments: the work is shared, the report is the
    same on all of them and for any number of them. Afterwards an edit stands at λ=0, and a model that was given with a
    vector is as before, bit for bit.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal language model, on its device(s).
        change (`TaskVector`, an edit, or `None`):
            What λ scales. A vector is put on the model for the time of the sweep. An edit is on this model already
            (`vector.edit(model)`, or anything with a `fingerprint` and `set_scale(λ)`; if it also has
            `set_row_scales(list of λ)`, all λ go through the model together). `None` leaves the model as it is: a
            control. Several vectors are edits that are compared as they are, each on its own: a list, called by their
            expressions, or a mapping from names (see `edit_grid`).
        scales (`Sequence[float]`, *optional*):
            The values of λ. 0 is added if it is missing: all drops are against it. `None` for several edits.
        books (`Book` or `Sequence[Book]`):
            Their roles say what is to be forgotten and what kept.
        protocol (`str` or `Protocol`, *optional*):
            One of `protocols.names()`, or one of your own. `taskvec-v1` without it.
        merge (`bool`, *optional*, defaults to `True`):
            For a vector, as in `TaskVector.edit`: write it into the weights, or attach it beside them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the model; loaded from where the model came from without it.
        reference (model or `dict[str, model]`, *optional*):
            A model that never saw the forget books: retrained without them, or the base, which is always at hand; or
            several under the names that tables shall show, as in `{"retrained without Alice": a, "base": b}`. λ is
            chosen against the first. They share the tokenizer.
        output (`str` or `Path`, *optional*):
            Folder for `report.json`, `report.md`, plots and, unless `store` names another, the store.
        store (`str` or `Path`, *optional*):
            Folder of finished passages; an interrupted sweep continues from it. What a model with hooks of unknown
            origin answers is kept, but not found again, unless they have an attribute `fingerprint` that tells what
            they do.
        batch_size (`int`, *optional*):
            Rows in one batch; found automatically without it.
        likelihood (`bool`, *optional*, defaults to `True`):
            Also measure the likelihood of the true continuations (perplexity, Min-K %, extraction strength, exact
            memorisation). Without it only texts are generated.
        criteria (`Criteria`, *optional*):
            What forgotten and kept mean, and so which λ is chosen.
        own_metrics (`Sequence[Metric]`, *optional*):
            Metrics of your own, measured on every passage, or the names of those that other packages add. `criteria`
            may name them.
        utility (`Sequence[str]` or `Callable`, *optional*):
            Abilities that no book measures, at each λ and of each reference: names of lm-evaluation-harness's tasks,
            `["arc_easy", "lambada_openai"]`, or a function from a live model to scores by name, such as that of
            `lm_eval_metric(tasks, limit=200)`. Every process asks all of it.
        split_followed (`bool`, *optional*):
            Whether the model's training left out what the books hold out. Found in the model's training record without
            it. It counts only where there is neither a `reference` nor text of the role `"unseen"`: then held-out
            passages stand for never-seen ones, and if nobody knows that they are, the report calls it an assumption.
        resamples (`int`, *optional*, defaults to 2000):
            How often passages are drawn anew for an interval.
        level (`float`, *optional*, defaults to 0.95):
            Of the intervals.
        permutations (`int`, *optional*, defaults to 10000):
            How often passages are dealt anew for a test.
        seed (`int`, *optional*, defaults to 0):
            Of the intervals and tests, and of the halves that choose λ.
        log_with (`str`, a tracker, or several of them, *optional*):
            Trackers of accelerate's, such as `"tensorboard"`, `"wandb"` and `"trackio"`: a step for each λ, and at the
            end the tables and plots. No passage is given to them.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `UnlearningReport`: Every score, text and test, and the choice of λ.

    Raises:
        `BadValueError`: If an argument cannot be used: among others, an edit that is on another model.
        `MissingNameError`: If there is no such protocol or metric, or lm-eval has no such task.
        `UnsupportedError`: If tasks of lm-eval or a tracker are named, and that is not installed.
        `OutputError`: If `output` or `store` cannot be written; before any work.
        `MismatchError`: If the processes of a launch hold different weights, the vector does not fit the model, or the
            tokenizer gives ids that a model does not have.

    Example:
        >>> books = [load_book("alice.txt", role="forget"), load_book("oz.txt", role="retain")]  # doctest: +SKIP
        >>> grid = [0, -0.2, -0.4, -0.6, -0.8, -1]
        >>> report = sweep(model, vector, grid, books, output="out/", reference=base)  # doctest: +SKIP
        >>> report.choice.scale, report.choice.verdict.sentence  # doctest: +SKIP

    """
    from hf_taskvec.evaluation.asking.batch_plan import tokenize_passages
    from hf_taskvec.evaluation.asking.batched_asking import ask
    from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages, store_folder
    from hf_taskvec.evaluation.asking.scalable_edits import NoEdit
    from hf_taskvec.evaluation.reporting.plots import ensure_matplotlib
    from hf_taskvec.evaluation.reporting.tracking import check_trackers, track
    from hf_taskvec.evaluation.utility import utility_metric, utility_scores
    from hf_taskvec.models.loading import tokenizer_of

    begin = time.perf_counter()
    state = processes()
    protocol = protocols.get(protocol)
    books = (books,) if isinstance(books, Book) else tuple(books)
    named = named_edits(change) or {}
    scales = _checked_scales(scales, len(named))
    draws = Draws(resamples, level, permutations, seed)
    added = [own_metric(each) for each in own_metrics]
    criteria = _checked_criteria(criteria, added, likelihood)
    others = named_references(reference)
    if named:
        check_edits_fit(model, {f"the edit {name!r}": vector for name, vector in named.items()}, merge)
    else:
        _check_change(change, model, merge)
    _check_books(books)
    if output is not None:
        ensure_writable(Path(output))
        ensure_matplotlib()
    if log_with is not None:
        check_trackers(log_with, output)
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    able = None if utility is None else utility_metric(utility, tokenizer, batch_size)
    passages, left_out = find_all_passages(books, protocol, tokenizer)
    for each in (model, *others.values()):  # before any of them is asked
        tokenize_passages(passages, protocol, tokenizer, each.config)
    leaks = check_leaks(passages, [book.training_text for book in books])
    kept = FinishedPassages(store_folder(store, output))
    asking = partial(
        ask,
        passages=passages,
        protocol=protocol,
        tokenizer=tokenizer,
        store=kept,
        batch_size=batch_size,
        likelihood=likelihood,
        progress=progress,
    )
    edits, vectors = gentlest_first(named)
    scaled: Any = EditsInTurn(model, vectors, merge) if edits else change
    with _on_model(scaled, model, merge) as edit:
        fingerprint = edit.fingerprint
        own = asking(model, edit, scales, label="batches")
        abilities = () if able is None else utility_scores(able, model, edit, scales, others, draws, progress)
    compared = {name: asking(other, NoEdit(), (0.0,), label=f"batches of {name}") for name, other in others.items()}

    results = _results(own, scales, compared, protocol, likelihood, added)
    metrics = _measured((*METRICS.values(), *added), likelihood)
    values = summary.PassageValues(results, scales, metrics, tuple(compared))
    infos = tuple(
        BookInfo(
            book.name,
            book.role,
            book.fingerprint,
            book.seed,
            len(values.ids(book.name, "seen")),
            len(values.ids(book.name, "held_out")),
        )
        for book in books
    )
    if split_followed is None:
        forgotten = {book.fingerprint for book in books if book.role == "forget"}
        split_followed = forgotten <= recorded_books(model)
    works = [own.work, *(asked.work for asked in compared.values())]
    generated = sum(work.generated for work in works)
    report = UnlearningReport(
        protocol=protocol,
        model=own.fingerprint,
        edit=fingerprint,
        references=tuple(
            ReferenceInfo(name, asked.fingerprint, asked.work.plan.batch_size, asked.work.plan.hash)
            for name, asked in compared.items()
        ),
        scales=scales,
        metrics=metrics,
        books=infos,
        leaks=leaks,
        left_out=left_out,
        scores=summary.all_scores(values, infos, draws),
        reference_scores=summary.reference_scores(values, infos, draws),
        tests=summary.all_loss_tests(values, infos, _named(metrics, criteria.headline), draws),
        membership=summary.memberships(values, infos, draws),
        reference_membership=summary.reference_memberships(values, infos, draws),
        choice=choose_scale(
            values,
            infos,
            criteria,
            draws,
            split_followed=split_followed,
            score_factor=protocol.score_factor,
            names=EditNames(tuple(info.name for info in edits)),
        ),
        passages=results,
        settings=Settings(
            seed=seed,
            resamples=resamples,
            level=level,
            permutations=permutations,
            batch_size=own.work.plan.batch_size,
            batches=len(own.work.plan.batches),
            plan=own.work.plan.hash,
            mixed_scales=own.work.plan.mixed,
        ),
        versions=package_versions(),
        timing=Timing(
            seconds=time.perf_counter() - begin,
            model_seconds=sum(work.model_seconds for work in works),
            generated=generated,
            reused=sum(len(work.rows) for work in works) - generated,
            passages_per_second=generated / sum(work.seconds for work in works),
            processes=state.num_processes,
            halved_batches=sum(work.halvings for work in works),
        ),
        edits=edits,
        utility=abilities,
    )
    if output is not None and state.is_main_process:
        report.save(output)
    if log_with is not None:
        track(report, log_with, output)
    state.wait_for_everyone()
    return report


def package_versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what a model answers, as reports hold them."""
    ours = {"hf_taskvec": __version__, "python": platform.python_version()}
    return ours | {name: version(name) for name in _PACKAGES}


def _checked_scales(scales: Sequence[float] | None, edits: int) -> tuple[float, ...]:
    """The values of λ, or the numbers of the edits."""
    if edits:
        if scales is not None:
            raise BadValueError("several edits are compared as they are: give scales=None, and scale the vectors.")
        return tuple(map(float, range(edits + 1)))
    if scales is None:
        raise BadValueError("scales=None is for several edits; of one, give the values of λ, as in [0, -0.5, -1].")
    found = [float(scale) + 0.0 for scale in scales]
    wrong = [scale for scale in found if not math.isfinite(scale)]
    if wrong:
        raise BadValueError(f"λ={wrong[0]} is not a finite number")
    return tuple(sorted({0.0, *found}, key=lambda scale: (abs(scale), scale)))


def _check_books(books: Sequence[Book]) -> None:
    if not books:
        raise BadValueError("a sweep needs at least one book; see load_book")
    check_book_names(books)


def _checked_criteria(criteria: Criteria | None, own: Sequence[Metric], likelihood: bool) -> Criteria:
    """The criteria, if this sweep can measure what they need; its own metrics must be new."""
    for metric in own:
        if metric.name in METRICS or metric.compute is None or not metric.name.isidentifier():
            raise BadValueError(
                f"own_metrics: {metric.name!r} needs a name of its own (a word, none of {', '.join(METRICS)}) and a "
                "function: Metric('name', 'memory', True, 'what it measures', compute=...)"
            )
    if len({metric.name for metric in own}) < len(own):
        raise BadValueError("own_metrics: two metrics have the same name")
    every = (*METRICS.values(), *own)
    if criteria is None:
        criteria = Criteria() if likelihood else Criteria(metrics=("rouge_l",))
    criteria.check(every, {info.name for info in _measured(every, likelihood)})
    return criteria


def _measured(metrics: Sequence[Metric], likelihood: bool) -> tuple[MetricInfo, ...]:
    return tuple(metric.info for metric in metrics if likelihood or not metric.likelihood)


def _named(metrics: Sequence[MetricInfo], name: str) -> MetricInfo:
    return next(info for info in metrics if info.name == name)


def _check_change(change: Any, model: Any, merge: bool) -> None:
    """Refuse what is no change of this model."""
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.asking.scalable_edits import check_edit

    if change is None or isinstance(change, TaskVector):
        return
    check_edit(change, model)
    if not merge:
        raise BadValueError(
            "merge=False is for a task vector, but the edit is on the model already: "
            "pass the vector, or make the edit with vector.edit(model, merge=False)"
        )


@contextmanager
def _on_model(change: "TaskVector | ScalableEdit | None", model: Any, merge: bool) -> "Iterator[ScalableEdit]":
    """The change as an edit of the model, at λ=0 before and afterwards; a vector is taken off again."""
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.asking.scalable_edits import NoEdit, starting_at_zero

    if isinstance(change, TaskVector):
        with change.edit(model, 0.0, merge=merge) as made:
            yield made
    else:
        with starting_at_zero(NoEdit() if change is None else change) as edit:
            yield edit


def _results(
    own: "Asked",
    scales: Sequence[float],
    others: "Mapping[str, Asked]",
    protocol: protocols.Protocol,
    likelihood: bool,
    metrics: Sequence[Metric],
) -> tuple[PassageResult, ...]:
    measured = partial(measure_answers, protocol=protocol, own=metrics, likelihood=likelihood)
    at = {scale: measured(own, scale) for scale in scales}
    beside = {name: measured(asked, 0.0) for name, asked in others.items()}
    return tuple(
        PassageResult(
            passage.id,
            passage.book,
            passage.split,
            passage.prompt,
            passage.answer,
            tuple(PassageAtScale(scale, *answers[i]) for scale, answers in at.items()),
            tuple(PassageAtReference(name, *answers[i]) for name, answers in beside.items()),
        )
        for i, passage in enumerate(each.text for each in own.passages)
    )
