"""The audit: a model, an edit, some books and a reference → an `AuditReport`."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec._version import __version__
from hf_taskvec.atomic import ensure_writable
from hf_taskvec.auditing.attacked_models import Asking, Judging, open_subjects
from hf_taskvec.auditing.audit_case import AttackResult, AuditCase, open_case, together
from hf_taskvec.auditing.audit_parts import ATTACKS, AttackGroup, AuditSettings
from hf_taskvec.auditing.audit_report import AuditedBook, AuditReport
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.metrics import METRICS
from hf_taskvec.evaluation.scoring.statistics import Draws
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.books import Book, check_book_names
from hf_taskvec.evaluation.texts.leaks import find_all_passages
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.plugins import plugin, plugin_names
from hf_taskvec.progress import progress_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.auditing.attacks.relearning import Relearning

_PACKAGES = ("torch", "transformers", "numpy", "peft")


def audit(
    model: "PreTrainedModel",
    change: "TaskVector | PreTrainedModel",
    books: Book | Sequence[Book],
    protocol: "str | protocols.Protocol | None" = None,
    *,
    reference: "PreTrainedModel",
    attacks: Sequence[AttackGroup | str] = ATTACKS,
    tokenizer: Any = None,
    criteria: Criteria | None = None,
    passages: int = 60,
    relearning: "Relearning | None" = None,
    lora_learning_rate: float | None = None,
    relearned_share: float = 0.5,
    samples: int = 16,
    output: str | Path | None = None,
    store: str | Path | None = None,
    batch_size: int | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    progress: bool | None = None,
) -> AuditReport:
    """Attack an edited model, the untouched one and a reference that never saw the book, and tell what came back.

    Every attack has the same seeds and budget on all three models. What counts is not what the edited model gives away
    but what it gives away beyond the attacked reference: R is 0 where it behaves as the attacked untouched model, and 1
    where it behaves as the attacked reference.

    Under `accelerate launch` every process calls this with the same arguments; the report is the same for any number
    of them. Finished passages are kept: an interrupted audit goes on from where it was. The given models are left as
    they are.

    Args:
        model (`PreTrainedModel`):
            The untouched model, which knows the books.
        change (`TaskVector` or `PreTrainedModel`):
            The edit, scaled by its λ (`-0.6 * vector`), or the edited model itself, however it was made.
        books (`Book` or `Sequence[Book]`):
            Those to forget are asked for, those to keep too before any attack; an aligned and a retained one are also
            relearnt on.
        protocol (`str` or `Protocol`, *optional*):
            As for `sweep`; at most `passages` of each book and split.
        reference (`PreTrainedModel`):
            A model that never saw the forget books: retrained without them, or the base.
        attacks (`Sequence[str]`, *optional*):
            Some of `"relearn"`, `"quantise"`, `"sample"`, `"prompt"`, `"inside"` and `"membership"`; all
            without it. Also the names of attacks that other packages add.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the models; loaded from where the model came from without it.
        criteria (`Criteria`, *optional*):
            What forgotten means.
        passages (`int`, *optional*, defaults to 60):
            At most so many of each book and split.
        relearning (`Relearning`, *optional*):
            The budget of relearning: one epoch at a learning rate of 2e-5 without it.
        lora_learning_rate (`float`, *optional*):
            Of relearning with LoRA; ten times that of `relearning` without it.
        relearned_share (`float`, *optional*, defaults to 0.5):
            The share of the forget book that is relearnt; passages of the other part are asked.
        samples (`int`, *optional*, defaults to 16):
            How many samples of each passage are drawn at temperature 1.
        output (`str` or `Path`, *optional*):
            Folder for `audit.json`, `audit.md`, plots and, unless `store` names another, the store.
        store (`str` or `Path`, *optional*):
            Folder of finished passages.
        batch_size (`int`, *optional*):
            Rows in one batch; found automatically without it.
        resamples (`int`, *optional*, defaults to 2000):
            How often passages are drawn anew for an interval.
        level (`float`, *optional*, defaults to 0.95):
            Of the intervals.
        seed (`int`, *optional*, defaults to 0):
            Of everything that is drawn.
        progress (`bool`, *optional*):
            Show progress bars; by default on a terminal.

    Returns:
        `AuditReport`: What was tried, what came back, and what could not be tried.

    Raises:
        `BadValueError`: If an argument cannot be used, or the reference knows the book: its membership AUC says so.
        `MissingNameError`: If there is no such attack or protocol.
        `OutputError`: If `output` or `store` cannot be written; before any work.

    Example:
        >>> report = audit(model, -0.6 * vector, books, reference=retrained, output="out/")  # doctest: +SKIP
        >>> print(report.sentence)  # doctest: +SKIP

    """
    from hf_taskvec.auditing.attacks.relearning import Relearning
    from hf_taskvec.auditing.audit_steps import (
        attack_by_prompting,
        attack_by_quantising,
        attack_by_relearning,
        attack_by_sampling,
        check_membership,
        look_inside,
    )
    from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages, store_folder
    from hf_taskvec.evaluation.reporting.plots import ensure_matplotlib
    from hf_taskvec.models.fingerprints import full_fingerprint
    from hf_taskvec.models.loading import tokenizer_of

    books = (books,) if isinstance(books, Book) else tuple(books)
    wanted = checked_attacks(attacks)
    if not any(book.role == "forget" for book in books):
        raise BadValueError("an audit needs a book to forget: load_book(..., role='forget')")
    check_book_names(books)
    for name, value in (("passages", passages), ("samples", samples)):
        if value < 1:
            raise BadValueError(f"{name}={value} must be at least 1")
    criteria = criteria or Criteria()
    criteria.check(METRICS.values(), METRICS)
    budget = relearning or Relearning(seed=seed)
    lora_rate = 10 * budget.learning_rate if lora_learning_rate is None else lora_learning_rate
    asked = protocols.get(protocol)
    if not asked.quotes:
        raise BadValueError(
            f"protocol {asked.name!r} joins NLTK's tokens, so its passages do not stand in the book, where attacks "
            "look for them. Audit with another one, such as ssu-v1 or taskvec-v1."
        )
    asked = replace(asked, samples=passages if asked.samples is None else min(asked.samples, passages))
    judging = Judging(criteria.in_units(asked.score_factor), Draws(resamples, level, seed=seed))
    if output is not None:
        ensure_writable(Path(output))
        ensure_matplotlib()
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    finished = FinishedPassages(store_folder(store, output))
    asking = Asking(asked, tokenizer, finished, batch_size, progress)
    found = _asked_passages(books, asking)

    table: dict[AttackGroup, Callable[[AuditCase], AttackResult]] = {
        "relearn": partial(attack_by_relearning, budget=budget, lora_learning_rate=lora_rate, share=relearned_share),
        "quantise": attack_by_quantising,
        "sample": partial(attack_by_sampling, samples=samples, seed=seed),
        "prompt": partial(attack_by_prompting, seed=seed),
        "inside": look_inside,
        "membership": check_membership,
    }
    made: dict[str, Callable[[AuditCase], AttackResult]] = {name: table[name] for name in ATTACKS if name in wanted}
    made |= {name: plugin("attacks", name, callable, "a function") for name in wanted if name not in table}
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str, words: str) -> Iterator[None]:
        progress_line(f"audit, part {len(seconds) + 1} of {len(made) + 1}: {words}", progress)
        begin = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - begin, 2)

    with open_subjects(model, change, reference) as subjects:
        with timed("plain", "before any attack"):
            case = open_case(subjects, books, found, asking, judging)
        results = []
        for name, attack in made.items():
            with timed(name, name):
                results.append(attack(case))
        prints = {name: full_fingerprint(each) for name, each in subjects.by_name.items()}
    came = together(results)
    report = AuditReport(
        protocol=asked,
        criteria=criteria,
        untouched=prints["untouched"],
        edited=prints["edited"],
        reference=prints["reference"],
        reference_auc=case.reference_auc,
        books=tuple(_audited_book(book, found) for book in books),
        plain=case.plain,
        findings=came.findings,
        inside=came.inside,
        membership=came.membership,
        not_tried=came.not_tried,
        settings=AuditSettings(
            seed=seed,
            resamples=resamples,
            level=level,
            passages=passages,
            samples=samples,
            learning_rate=budget.learning_rate,
            lora_learning_rate=lora_rate,
            epochs=budget.epochs,
            relearned_share=relearned_share,
        ),
        versions={"hf_taskvec": __version__, "python": platform.python_version()}
        | {name: version(name) for name in _PACKAGES},
        seconds=seconds,
    )
    if output is not None and processes().is_main_process:
        report.save(output)
    processes().wait_for_everyone()
    return report


def checked_attacks(attacks: Sequence[str]) -> list[str]:
    """The names of kinds of attacks, if there are such."""
    given = [attacks] if isinstance(attacks, str) else list(attacks)
    for name in given:
        if name not in (known := list(dict.fromkeys([*ATTACKS, *plugin_names("attacks")]))):
            hint = did_you_mean(name, known)
            raise MissingNameError(f"no attack {name!r}.{hint} The attacks are {', '.join(known)}")
    return given


def _asked_passages(books: Sequence[Book], asking: Asking) -> tuple[Passage, ...]:
    """What is asked before any attack: seen passages, those to forget first, and unseen ones to tell them from."""
    asked = [book for book in books if book.role != "aligned"]
    found, _ = find_all_passages(asked, asking.protocol, asking.tokenizer)
    forget = {book.name for book in books if book.role == "forget"}
    seen, kept = ([p for p in found if p.split == "seen" and (p.book in forget) == own] for own in (True, False))
    # The held-out part of a book to keep is no text like the forgotten one: it tells nothing of membership.
    compared = {book.name for book in books if book.role in ("forget", "unseen")}
    return (*seen, *kept, *(p for p in found if p.split == "held_out" and p.book in compared))


def _audited_book(book: Book, passages: Sequence[Passage]) -> AuditedBook:
    splits = [passage.split for passage in passages if passage.book == book.name]
    return AuditedBook(book.name, book.role, book.fingerprint, splits.count("seen"), splits.count("held_out"))
