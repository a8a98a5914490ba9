"""The controls of an edit: does only the right vector forget the right book?

Beside the vector, at the same λ: noise of the same norm in every parameter, the vectors of other books, and noise on
the logits that moves them as far as the vector does. The roles of the books are swapped in the table itself: every
change is shown on every book.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_taskvec.atomic import ensure_writable
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.reporting.control_table import ControlTable, control_table
from hf_taskvec.evaluation.reporting.report_parts import named_references
from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
from hf_taskvec.evaluation.scoring.metrics import METRICS, PRIMARY, measure_answers
from hf_taskvec.evaluation.scoring.specificity import ChangeColumns, ChangeKind
from hf_taskvec.evaluation.scoring.statistics import Array, Draws
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.books import Book, check_book_names
from hf_taskvec.evaluation.texts.leaks import find_all_passages

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.asking.batched_asking import Asked


def run_controls(
    model: Any,
    vector: "TaskVector",
    scale: float,
    books: Book | Sequence[Book],
    protocol: "str | protocols.Protocol | None" = None,
    *,
    others: "Mapping[str, TaskVector] | None" = None,
    reference: Any = None,
    tokenizer: Any = None,
    merge: bool = True,
    original: str | Path | None = None,
    noise_seeds: Sequence[int] = (0,),
    store: str | Path | None = None,
    batch_size: int | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    progress: bool | None = None,
) -> ControlTable:
    """A `ControlTable`: what the vector takes of each book at one λ, beside what its controls take.

    The seen passages of all books are asked for, once for each control. What is in the store, such as the vector's own
    answers after a `sweep`, is not asked again. Under `accelerate launch` every process calls this with the same
    arguments: the work is shared, the table is the same on all of them and for any number of them. Afterwards the model
    is as before, bit for bit.

    λ is taken as given. If it was chosen on some of these passages, they flatter the vector a little; its controls
    have the same λ.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal language model that knows the books.
        vector (`TaskVector`):
            Of the forget books.
        scale (`float`):
            λ, as in a sweep: negative to forget.
        books (`Book` or `Sequence[Book]`):
            At least one to forget. Of the others, those of the role `"retain"` should be left alone.
        protocol (`str` or `Protocol`, *optional*):
            As in `sweep`.
        others (`Mapping[str, TaskVector]`, *optional*):
            The vectors of other books, by the books' names.
        reference (model or `dict[str, model]`, *optional*):
            As in `sweep`: a model that never saw the forget books. With one, R is told, and metrics count only where
            the model knows the book better than it.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the model; loaded from where the model came from without it.
        merge (`bool`, *optional*, defaults to `True`):
            As in `TaskVector.edit`: write vectors into the weights, or attach them beside them.
        original (`str` or `Path`, *optional*):
            As in `TaskVector.edit`.
        noise_seeds (`Sequence[int]`, *optional*, defaults to `(0,)`):
            Of the random vectors, a row for each. The first is also that of the noise on the logits.
        store (`str` or `Path`, *optional*):
            Folder of finished passages, as in `sweep`.
        batch_size (`int`, *optional*):
            Rows in one batch; found automatically without it.
        resamples (`int`, *optional*, defaults to 2000):
            How often passages are drawn anew for an interval.
        level (`float`, *optional*, defaults to 0.95):
            Of the intervals.
        seed (`int`, *optional*, defaults to 0):
            Of the intervals.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `ControlTable`: Every score, the comparisons, and a sentence that says whether the vector is specific.

    Raises:
        `BadValueError`: If λ is 0 or not finite, no book is to be forgotten, or no seed is given.
        `MissingNameError`: If `others` names a book that is not among the books, or one to forget.
        `MismatchError`: If a vector does not fit the model.

    Example:
        >>> table = run_controls(model, vector, -0.6, books, others={"Oz": oz}, reference=base)  # doctest: +SKIP
        >>> print(table.to_markdown())  # doctest: +SKIP

    """
    from hf_taskvec.application.output_noise import OutputNoise
    from hf_taskvec.evaluation.asking.batched_asking import ask
    from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages
    from hf_taskvec.evaluation.asking.output_changes import output_change
    from hf_taskvec.evaluation.asking.scalable_edits import NoEdit
    from hf_taskvec.models.loading import tokenizer_of

    scale, others = float(scale) + 0.0, dict(others or {})
    books = (books,) if isinstance(books, Book) else tuple(books)
    _check_draws(scale, noise_seeds)
    check_control_books(books, others)
    draws = Draws(resamples, level, seed=seed)
    protocol = protocols.get(protocol)
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    passages = [each for each in find_all_passages(books, protocol, tokenizer)[0] if each.split == "seen"]
    roles = {book.name: book.role for book in books if any(each.book == book.name for each in passages)}
    forget = [name for name, role in roles.items() if role == "forget"]
    asking = partial(
        ask,
        passages=passages,
        protocol=protocol,
        tokenizer=tokenizer,
        store=FinishedPassages(store),
        batch_size=batch_size,
        progress=progress,
    )
    changes: list[tuple[ChangeColumns, str, float, float]] = []

    def add(
        asked: "Asked", name: str, kind: ChangeKind, edit: str, at: float, size: float, of: str | None = None
    ) -> None:
        values = _columns(asked, at, protocol, roles)
        changes.append((ChangeColumns(name, kind, values, of), edit, at, size))

    own = f"the vector of {' and '.join(forget)}"
    with vector.edit(model, 0.0, merge=merge, original=original) as edit:
        asked = asking(model, edit, (0.0, scale), label="batches of the vector")
        add(asked, "untouched", "untouched", asked.fingerprint, 0.0, 0.0)
        add(asked, own, "vector", edit.fingerprint, scale, abs(scale) * vector.norm())
        of_forget = [each for each in passages if each.book in forget]
        moved = output_change(model, edit, scale, of_forget, protocol=protocol, tokenizer=tokenizer, progress=progress)
    controls: list[tuple[str, ChangeKind, TaskVector, str | None]] = [
        *((f"the vector of {book}", "other_vector", other, book) for book, other in others.items()),
        *((f"noise of its norms (seed {each})", "noise", vector.noise(each), None) for each in noise_seeds),
    ]
    for name, kind, control, book in controls:
        with control.edit(model, 0.0, merge=merge, original=original) as edit:
            asked = asking(model, edit, (scale,), label=f"batches of {name}")
            add(asked, name, kind, edit.fingerprint, scale, abs(scale) * control.norm(), book)
    # To four digits: so answers are found again in the store after a run on a machine that adds up in another order.
    with OutputNoise(model, float(f"{moved:.4g}"), noise_seeds[0]) as noise:
        asked = asking(model, noise, (1.0,), label="batches of noise on the logits")
        add(asked, "noise on the logits", "output_noise", noise.fingerprint, 1.0, noise.size)
    for name, never in named_references(reference).items():
        asked = asking(never, NoEdit(), (0.0,), label=f"batches of {name}")
        add(asked, name, "reference", asked.fingerprint, 0.0, 0.0)
    return control_table(changes, roles, [METRICS[name].info for name in PRIMARY], draws)


def with_controls(
    report: UnlearningReport,
    model: Any,
    vector: "TaskVector",
    books: Book | Sequence[Book],
    *,
    others: "Mapping[str, TaskVector] | None" = None,
    reference: Any = None,
    tokenizer: Any = None,
    merge: bool = True,
    original: str | Path | None = None,
    store: str | Path | None = None,
    output: str | Path | None = None,
    progress: bool | None = None,
) -> UnlearningReport:
    """The report of a sweep, with the controls of its vector at the λ that its verdict is on.

    They are asked for as the sweep was: by its protocol, with its seed and in batches of its size.

    Args:
        report (`UnlearningReport`):
            What `sweep` gave for this model, vector and books.
        model (`PreTrainedModel` or `PeftModel`):
            As it was given to `sweep`.
        vector (`TaskVector`):
            As it was given to `sweep`.
        books (`Book` or `Sequence[Book]`):
            As they were given to `sweep`.
        others (`Mapping[str, TaskVector]`, *optional*):
            The vectors of other books, by the books' names.
        reference (model or `dict[str, model]`, *optional*):
            As it was given to `sweep`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the model; loaded from where the model came from without it.
        merge (`bool`, *optional*, defaults to `True`):
            As in `run_controls`.
        original (`str` or `Path`, *optional*):
            As in `run_controls`.
        store (`str` or `Path`, *optional*):
            Folder of finished passages; that of the sweep has the vector's own answers.
        output (`str` or `Path`, *optional*):
            Folder for the new `report.json` and `report.md`, beside the plots that the sweep drew, and, unless `store`
            names another, of the store.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `UnlearningReport`: The same, with `controls`.

    Raises:
        `BadValueError`: If no λ but 0 was judged, so that there is no edit to compare with.
        `MissingNameError`, `MismatchError`: As in `run_controls`.
        `OutputError`: If `output` cannot be written; before any work.

    Example:
        >>> report = sweep(model, vector, grid, books, reference=base, output="out/")  # doctest: +SKIP
        >>> report = with_controls(report, model, vector, books, reference=base, output="out/")  # doctest: +SKIP
        >>> report.controls.sentence  # doctest: +SKIP

    """
    from hf_taskvec.evaluation.asking.finished_passages import store_folder

    if report.edits:
        raise BadValueError(
            "the report compares whole edits: put controls beside one with run_controls(model, edit, 1.0, books)."
        )
    judged = None if report.choice is None else report.choice.judged
    if not judged:
        reason = "no book is to be forgotten" if report.choice is None else report.choice.reason
        kept = "" if output is None else f". The report without controls is in {Path(output).name}"
        raise BadValueError(f"no λ but 0 was judged, so there is no edit to put controls beside: {reason}{kept}")
    if output is not None:
        ensure_writable(Path(output))
    settings = report.settings
    controls = run_controls(
        model,
        vector,
        judged,
        books,
        report.protocol,
        others=others,
        reference=reference,
        tokenizer=tokenizer,
        merge=merge,
        original=original,
        store=store_folder(store, output),
        batch_size=settings.batch_size,
        resamples=settings.resamples,
        level=settings.level,
        seed=settings.seed,
        progress=progress,
    )
    report = replace(report, controls=controls)
    if output is not None and processes().is_main_process:
        report.save(output, plots=False)
    processes().wait_for_everyone()
    return report


def check_control_books(books: Sequence[Book], others: Mapping[str, Any]) -> None:
    """Refuse books of which none is to be forgotten, and vectors of books that are not among the others.

    Args:
        books (`Sequence[Book]`):
            With their roles.
        others (`Mapping[str, Any]`):
            The names of the books that vectors are given of.

    Raises:
        `BadValueError`: If no book is to be forgotten, or two have one name.
        `MissingNameError`: If there is no such book, or it is one to forget.
    """
    if not any(book.role == "forget" for book in books):
        raise BadValueError("no book is to be forgotten, so there is nothing to control: load_book(..., role='forget')")
    check_book_names(books)
    names = [book.name for book in books if book.role != "forget"]
    for name in others:
        if name not in names:
            raise MissingNameError(
                f"others={{{name!r}: ...}} is of no book that is to be kept.{did_you_mean(name, names)} The others are "
                f"{', '.join(names) or 'none'}"
            )


def check_control_vectors(model: Any, others: "Mapping[str, TaskVector]", *, merge: bool = True) -> None:
    """Refuse other books' vectors that cannot be put on the model, before it is asked for anything.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model; it is not touched.
        others (`Mapping[str, TaskVector]`):
            The vectors, by the books' names.
        merge (`bool`, *optional*, defaults to `True`):
            As in `run_controls`.

    Raises:
        `MismatchError`: If a vector does not fit the model.
        `UnsupportedError`: If it cannot be attached.
    """
    from hf_taskvec.evaluation.edit_families import check_edits_fit

    check_edits_fit(model, {f"the vector of {book}": other for book, other in others.items()}, merge)


def _check_draws(scale: float, noise_seeds: Sequence[int]) -> None:
    if not math.isfinite(scale) or scale == 0:
        raise BadValueError(f"λ={scale}: an edit is compared with its controls at a finite λ that is not 0")
    if not noise_seeds or len(set(noise_seeds)) < len(noise_seeds):
        raise BadValueError(f"noise_seeds={tuple(noise_seeds)}: name at least one seed of a random vector, none twice")


def _columns(
    asked: "Asked", scale: float, protocol: protocols.Protocol, books: Mapping[str, Any]
) -> dict[str, dict[str, Array]]:
    """The values of the passages at one λ, by book and metric."""
    values: dict[str, dict[str, list[float]]] = {book: {name: [] for name in PRIMARY} for book in books}
    for passage, (_, measured) in zip(asked.passages, measure_answers(asked, scale, protocol), strict=True):
        for name in PRIMARY:
            values[passage.text.book][name].append(measured[name])
    return {book: {name: np.array(column) for name, column in each.items()} for book, each in values.items()}
