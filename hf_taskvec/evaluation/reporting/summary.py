"""From the values of single passages to the numbers of a report: intervals, tests, membership, choice."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hf_taskvec.evaluation.reporting.report_parts import BookInfo, Membership, PassageResult, ReferenceScore, Score
from hf_taskvec.evaluation.scoring.drop_tests import LossTest, loss_tests
from hf_taskvec.evaluation.scoring.metrics import METRICS, Metric
from hf_taskvec.evaluation.scoring.scale_choice import Choice, Half, choose
from hf_taskvec.evaluation.scoring.statistics import Array, Bootstrap, Draws, Interval, auc_interval
from hf_taskvec.evaluation.texts.books import SPLITS, Split


@dataclass(frozen=True)
class PassageValues:
    """The values of all passages at all λ, by book, split and metric.

    Args:
        passages (`Sequence[PassageResult]`):
            The results, each with the same values of λ.
        scales (`Sequence[float]`):
            Those values, 0 first.
        references (`Sequence[str]`, *optional*):
            The names of the reference models; λ is chosen against the first.
    """

    passages: Sequence[PassageResult]
    scales: Sequence[float]
    references: Sequence[str] = ()

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that were measured."""
        return [metric for name, metric in METRICS.items() if name in self.passages[0].at[0].values]

    def ids(self, book: str, split: Split) -> list[str]:
        """The ids of a book's passages."""
        return [p.id for p in self.passages if p.book == book and p.split == split]

    def column(self, ids: Sequence[str], scale: float, metric: str) -> Array:
        """The values of these passages, in the order of `passages`, as everywhere: so columns pair."""
        wanted, place = set(ids), self.scales.index(scale)
        return np.array([p.at[place].values[metric] for p in self.passages if p.id in wanted])

    def reference_column(self, ids: Sequence[str], reference: str, metric: str) -> Array:
        """The same of a reference model."""
        wanted, place = set(ids), self.references.index(reference)
        return np.array([p.references[place].values[metric] for p in self.passages if p.id in wanted])


def all_scores(values: PassageValues, books: Sequence[BookInfo], draws: Draws) -> tuple[Score, ...]:
    """Every metric of every book and split at every λ, compared with λ=0 on the same passages."""
    scores = []
    for book, split, ids in _groups(values, books):
        draw = draws.bootstrap(len(ids))
        for metric in values.metrics:
            before = values.column(ids, 0.0, metric.name)
            for scale in values.scales:
                here = values.column(ids, scale, metric.name)
                change = _change(draw, here, before, metric) if scale != 0 else (None, None)
                value = draw.mean(here, metric.geometric)
                scores.append(Score(book, split, scale, metric.name, len(ids), value, *change))
    return tuple(scores)


def reference_scores(values: PassageValues, books: Sequence[BookInfo], draws: Draws) -> tuple[ReferenceScore, ...]:
    """Every metric of every book and split for the reference models, compared with λ=0 on the same passages."""
    scores = []
    for name in values.references:
        for book, split, ids in _groups(values, books):
            draw = draws.bootstrap(len(ids))
            for metric in values.metrics:
                here = values.reference_column(ids, name, metric.name)
                change = _change(draw, here, values.column(ids, 0.0, metric.name), metric)
                value = draw.mean(here, metric.geometric)
                scores.append(ReferenceScore(name, book, split, metric.name, len(ids), value, *change))
    return tuple(scores)


def _groups(values: PassageValues, books: Sequence[BookInfo]) -> Iterator[tuple[str, Split, list[str]]]:
    for book in books:
        for split in SPLITS:
            if ids := values.ids(book.name, split):
                yield book.name, split, ids


def _change(draw: Bootstrap, here: Array, before: Array, metric: Metric) -> tuple[Interval, Interval | None]:
    """The paired difference, and the relative one where a share means something."""
    relative = draw.relative(here, before, metric.geometric) if not metric.nats else None
    return draw.difference(here, before, metric.geometric), relative


def all_loss_tests(
    values: PassageValues, books: Sequence[BookInfo], metric: Metric, draws: Draws
) -> tuple[LossTest, ...]:
    """Which books lost more than which, at every λ, on all seen passages."""
    roles = [(book.name, book.role) for book in books]

    def column(book: str, scale: float) -> Array:
        return values.column(values.ids(book, "seen"), scale, metric.name)

    return tuple(
        test for scale in values.scales if scale != 0 for test in loss_tests(roles, scale, metric, column, draws)
    )


def memberships(values: PassageValues, books: Sequence[BookInfo], draws: Draws) -> tuple[Membership, ...]:
    """For each book and λ, how well Min-K % tells seen from held-out passages."""
    found = []
    for book in books if METRICS["min_k"] in values.metrics else ():
        groups = [values.ids(book.name, split) for split in SPLITS]
        if all(groups):
            for scale in values.scales:
                seen, held_out = (values.column(ids, scale, "min_k") for ids in groups)
                interval = auc_interval(seen, held_out, min(draws.resamples, 500), draws.level, draws.seed)
                found.append(Membership(book.name, scale, interval))
    return tuple(found)


def choose_scale(
    values: PassageValues,
    books: Sequence[BookInfo],
    metric: Metric,
    *,
    margin: float,
    retain_bound: float,
    certain: bool,
    draws: Draws,
) -> Choice | None:
    """The choice of λ; `None` without a forget book."""
    forget = [b.name for b in books if b.role == "forget"]
    if not forget:
        return None
    retain = [b.name for b in books if b.role == "retain" and len(values.ids(b.name, "seen")) > 1]
    halves: list[dict[tuple[str, Split], list[str]]] = [{}, {}]
    for book in books:
        for split in SPLITS:
            ids = values.ids(book.name, split)
            random.Random(f"{draws.seed}/{book.name}/{split}/halves").shuffle(ids)
            halves[0][book.name, split], halves[1][book.name, split] = ids[::2], ids[1::2]

    against = values.references[0] if values.references else None

    def half(ids: dict[tuple[str, Split], list[str]]) -> Half:
        seen = [name for book in forget for name in ids[book, "seen"]]
        held = [name for book in forget for name in ids[book, "held_out"]]
        return Half(
            forget={s: values.column(seen, s, metric.name) for s in values.scales},
            retain={
                book: {s: values.column(ids[book, "seen"], s, metric.name) for s in values.scales} for book in retain
            },
            held_out=values.column(held, 0.0, metric.name),
            reference=None if against is None else values.reference_column(seen, against, metric.name),
        )

    choosing, reporting = half(halves[0]), half(halves[1])
    kind: Literal["reference", "held_out"] = "held_out" if against is None else "reference"
    smallest = min(
        len(part)
        for h in (choosing, reporting)
        for part in (h.forget[0.0], h.held_out if h.reference is None else h.reference)
    )
    if smallest == 0:
        reason = "no λ can be chosen: there are too few passages, or neither held-out ones nor a reference model"
        return Choice(None, reason, metric.name, kind, against, margin, retain_bound, certain, (), None, ())
    found = choose(
        values.scales,
        choosing,
        reporting,
        metric,
        margin=margin,
        retain_bound=retain_bound,
        certain=certain,
        draws=draws,
        reference=against,
    )
    if found.confirmation is None or not found.scale:
        return found
    tests = loss_tests(
        [(book.name, book.role) for book in books],
        found.scale,
        metric,
        lambda book, scale: values.column(halves[1][book, "seen"], scale, metric.name),
        draws,
    )
    return replace(found, confirmation=replace(found.confirmation, tests=tests))
