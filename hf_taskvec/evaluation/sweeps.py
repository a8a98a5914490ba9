"""The sweep: a model, an edit, some λ and some books → an `UnlearningReport`."""

import math
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec._version import __version__
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation import protocols, summary
from hf_taskvec.evaluation.books import Book
from hf_taskvec.evaluation.leaks import check_leaks, without_leaks
from hf_taskvec.evaluation.metrics import METRICS, Outcome, measure
from hf_taskvec.evaluation.passages import Passage, find_passages
from hf_taskvec.evaluation.report import (
    At,
    BookInfo,
    MetricInfo,
    PassageResult,
    Settings,
    Timing,
    UnlearningReport,
)
from hf_taskvec.evaluation.statistics import Draws

if TYPE_CHECKING:
    from hf_taskvec.evaluation.generation import Continuation
    from hf_taskvec.evaluation.plan import Task
    from hf_taskvec.evaluation.runner import Edit, Work

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy", "rapidfuzz", "nltk")


def sweep(
    model: Any,
    edit: "Edit | None",
    scales: Sequence[float],
    books: Book | Sequence[Book],
    protocol: "str | protocols.Protocol | None" = None,
    *,
    tokenizer: Any = None,
    reference: Any = None,
    output: str | Path | None = None,
    store: str | Path | None = None,
    batch_size: int | None = None,
    likelihood: bool = True,
    metric: str = "rouge_l",
    margin: float = 0.03,
    retain_bound: float = 0.1,
    resamples: int = 2000,
    level: float = 0.95,
    permutations: int = 10_000,
    seed: int = 0,
    log_with: Any = None,
) -> UnlearningReport:
    """An `UnlearningReport`: what each λ made the model forget and keep, with intervals, and which λ to take.

    Under `accelerate launch` every process calls this with the same arguments: the work is shared, the
    report is the same on all of them and for any number of them. Afterwards the edit stands at λ=0.

    Args:
        model: a causal language model as transformers or PEFT gives it, on its device(s).
        edit: has a `fingerprint` and `set_scale(λ)`; if it also has `set_row_scales(list of λ)`, all λ go
            through the model together. `None` leaves the model as it is: a control.
        scales: the values of λ. 0 is added if it is missing: all drops are against it.
        books: their roles say what is to be forgotten and what kept.
        protocol: a name or a `Protocol`; ours by default.
        tokenizer: of the model; loaded from where the model came from without it.
        reference: a model that never saw the forget books, if there is one (retrained without them).
        output: folder for `report.json`, `report.md`, plots and, unless `store` names another, the store.
        store: folder of finished passages; an interrupted sweep continues from it.
        batch_size: rows in one batch; found automatically without it.
        likelihood: also measure the likelihood of the true continuations (perplexity, Min-K %, extraction
            strength, exact memorisation). Without it only texts are generated.
        metric: the memory metric by which λ is chosen.
        margin: "as if never seen" means within ± this of the never-seen score, in units of a score from 0
            to 1.
        retain_bound: the share of its score that a retained book may lose.
        resamples, level, permutations, seed: of the intervals and tests, and of the halves that choose λ.
        log_with: trackers, passed through to accelerate.
    """
    from hf_taskvec.evaluation.runner import NoEdit, agree, processes

    begin = time.perf_counter()
    state = processes()
    protocol = protocols.get(protocol)
    books = (books,) if isinstance(books, Book) else tuple(books)
    scales = _checked_scales(scales)
    _check_books(books)
    if metric not in METRICS or METRICS[metric].kind != "memory":
        memory = [name for name, m in METRICS.items() if m.kind == "memory"]
        raise MissingNameError(f"no memory metric {metric!r}.{did_you_mean(metric, memory)} Use one of {memory}")
    if not METRICS[metric].ratio:
        raise BadValueError(f"metric={metric!r} has no zero, so no share of it can be lost: choose λ by another metric")
    if METRICS[metric].likelihood and not likelihood:
        raise BadValueError(f"metric={metric!r} needs the likelihood of the true text: leave likelihood=True")
    if output is not None:
        from hf_taskvec.evaluation.store import ensure_writable

        ensure_writable(Path(output))

    from hf_taskvec.evaluation.fingerprint import model_fingerprint
    from hf_taskvec.evaluation.generation import Generator
    from hf_taskvec.evaluation.plan import Row, make_tasks
    from hf_taskvec.evaluation.runner import run
    from hf_taskvec.evaluation.store import Store, record_key

    edit = NoEdit() if edit is None else edit
    tokenizer = _tokenizer(model) if tokenizer is None else tokenizer
    passages, left_out = _passages(books, protocol, tokenizer)
    leaks = check_leaks(passages, [book.training_text for book in books])
    kept = Store(store if store is not None else Path(output) / "store" if output is not None else None)

    def work_of(asked: Any, change: "Edit", at: Sequence[float]) -> "tuple[str, tuple[Task, ...], Work]":
        """All passages through one model at some λ; its fingerprint, the tasks and what came of them."""
        context = _context(asked)
        tasks = make_tasks(passages, protocol, tokenizer, context)
        print_of = agree(model_fingerprint(asked), "the model's weights")
        keys = {
            Row(scale, i): record_key(print_of, change.fingerprint, scale, task, protocol)
            for scale in at
            for i, task in enumerate(tasks)
        }
        generator = Generator(asked, tokenizer, protocol.decoding, protocol.seed, likelihood)
        with generator.prepared():
            done = run(generator, change, tasks, at, keys, kept, batch_size=batch_size, context=context)
        return print_of, tasks, done

    edit.set_scale(0.0)
    try:
        print_of, tasks, work = work_of(model, edit, scales)
    finally:
        edit.set_scale(0.0)
    model_seconds = work.model_seconds
    others: dict[str, dict[str, float]] | None = None
    reference_print = None
    if reference is not None:
        reference_print, _, found = work_of(reference, NoEdit(), (0.0,))
        model_seconds += found.model_seconds
        others = {
            task.passage.id: measure(_outcome(task, found.rows[Row(0.0, i)], likelihood), protocol)
            for i, task in enumerate(tasks)
        }

    results = _results(tasks, scales, work, protocol, likelihood)
    values = summary.Values(results, scales, others)
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
    chosen = METRICS[metric]
    factor = protocol.score_factor if metric.startswith("rouge") else 1.0
    draws = Draws(resamples, level, permutations, seed)
    report = UnlearningReport(
        protocol=protocol,
        model=print_of,
        edit=edit.fingerprint,
        reference=reference_print,
        scales=scales,
        metrics=tuple(MetricInfo(m.name, m.kind, m.higher, m.definition) for m in values.metrics),
        books=infos,
        leaks=leaks,
        left_out=left_out,
        scores=summary.all_scores(values, infos, draws),
        tests=summary.all_loss_tests(values, infos, chosen, draws),
        membership=summary.memberships(values, infos, draws),
        choice=summary.choose_scale(
            values,
            infos,
            chosen,
            margin=margin * factor,
            retain_bound=retain_bound,
            draws=draws,
        ),
        passages=results,
        settings=Settings(
            seed=seed,
            resamples=resamples,
            level=level,
            permutations=permutations,
            batch_size=work.plan.batch_size,
            batches=len(work.plan.batches),
            plan=work.plan.hash,
            mixed_scales=work.plan.mixed,
        ),
        versions=_versions(),
        timing=Timing(
            seconds=time.perf_counter() - begin,
            model_seconds=model_seconds,
            generated=work.generated,
            reused=len(work.rows) - work.generated,
            passages_per_second=work.generated / work.seconds,
            processes=state.num_processes,
            halved_batches=work.halvings,
        ),
    )
    if output is not None and state.is_main_process:
        report.save(output)
    if log_with is not None:
        _track(report, log_with, output)
    state.wait_for_everyone()
    return report


def _versions() -> dict[str, str]:
    ours = {"hf_taskvec": __version__, "python": platform.python_version()}
    return ours | {name: version(name) for name in _PACKAGES}


def _checked_scales(scales: Sequence[float]) -> tuple[float, ...]:
    found = [float(scale) + 0.0 for scale in scales]
    wrong = [scale for scale in found if not math.isfinite(scale)]
    if wrong:
        raise BadValueError(f"λ={wrong[0]} is not a finite number")
    return tuple(sorted({0.0, *found}, key=lambda scale: (abs(scale), scale)))


def _check_books(books: Sequence[Book]) -> None:
    if not books:
        raise BadValueError("a sweep needs at least one book; see load_book")
    names = [book.name for book in books]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadValueError(f"two books are called {twice[0]!r}; name them apart: load_book(..., name=...)")


def _passages(books: Sequence[Book], protocol: protocols.Protocol, tokenizer: Any) -> tuple[tuple[Passage, ...], int]:
    """The passages of all books; under a leak-free protocol also free of leaks between the books."""
    found = tuple(passage for book in books for passage in find_passages(book, protocol, tokenizer))
    if not protocol.leak_free or len(books) == 1:  # within a book, find_passages has seen to it
        return found, 0
    return without_leaks(found, [book.training_text for book in books])


def _tokenizer(model: Any) -> Any:
    from transformers import AutoTokenizer

    source = model.config._name_or_path
    if not source:
        raise BadValueError("the model does not say where it came from; pass its tokenizer=")
    return AutoTokenizer.from_pretrained(source)


def _context(model: Any) -> int | None:
    # GPT-2's n_positions is mapped to this name; an architecture without a limit (Mamba) lacks it.
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _outcome(task: "Task", found: "Continuation", likelihood: bool) -> Outcome:
    # A store may know more than was asked for; the report holds the same metrics for every passage.
    views = (found.log_probs, found.hits) if likelihood else ((), ())
    return Outcome(found.text, task.passage.answer, *views)


def _results(
    tasks: "Sequence[Task]",
    scales: Sequence[float],
    work: "Work",
    protocol: protocols.Protocol,
    likelihood: bool,
) -> tuple[PassageResult, ...]:
    from hf_taskvec.evaluation.plan import Row

    results = []
    for i, task in enumerate(tasks):
        at = []
        for scale in scales:
            found = work.rows[Row(scale, i)]
            at.append(At(scale, found.text, measure(_outcome(task, found, likelihood), protocol)))
        passage = task.passage
        results.append(
            PassageResult(passage.id, passage.book, passage.split, passage.prompt, passage.answer, tuple(at))
        )
    return tuple(results)


def _track(report: UnlearningReport, log_with: Any, output: str | Path | None) -> None:
    """Hand the scores to accelerate's trackers: one step for each λ, in the order of the report."""
    from accelerate import Accelerator

    accelerator = Accelerator(log_with=log_with, project_dir=None if output is None else str(output))
    accelerator.init_trackers("hf_taskvec")
    for step, scale in enumerate(report.scales):
        here = [score for score in report.scores if score.scale == scale]
        values = {f"{s.book}/{s.split}/{s.metric}": s.value.value for s in here}
        accelerator.log({"scale": scale, **values}, step=step)
    accelerator.end_training()
