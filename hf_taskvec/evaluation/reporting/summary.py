"""From the values of single passages to the numbers of a report: intervals, tests, membership."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hf_taskvec.evaluation.reporting.report_parts import (
    BookInfo,
    Membership,
    PassageResult,
    ReferenceMembership,
    ReferenceScore,
    Score,
)
from hf_taskvec.evaluation.scoring.drop_tests import LossTest, loss_tests
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.scoring.statistics import Array, Bootstrap, Draws, Interval, auc, auc_interval, priv_leak
from hf_taskvec.evaluation.texts.books import SPLITS, Split


@dataclass(frozen=True)
class PassageValues:
    """The values of all passages at all λ, by book, split and metric.

    Args:
        passages (`Sequence[PassageResult]`):
            The results, each with the same values of λ.
        scales (`Sequence[float]`):
            Those values, 0 first.
        infos (`Sequence[MetricInfo]`):
            The metrics that were measured.
        references (`Sequence[str]`, *optional*):
            The names of the reference models; λ is chosen against the first.
    """

    passages: Sequence[PassageResult]
    scales: Sequence[float]
    infos: Sequence[MetricInfo]
    references: Sequence[str] = ()

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
        for metric in values.infos:
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
            for metric in values.infos:
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


def _change(draw: Bootstrap, here: Array, before: Array, metric: MetricInfo) -> tuple[Interval, Interval | None]:
    """The paired difference, and the relative one where a share means something."""
    relative = draw.relative(here, before, metric.geometric) if not metric.nats else None
    return draw.difference(here, before, metric.geometric), relative


def all_loss_tests(
    values: PassageValues, books: Sequence[BookInfo], metric: MetricInfo, draws: Draws
) -> tuple[LossTest, ...]:
    """Which books lost more than which, at every λ, on all seen passages."""
    roles = [(book.name, book.role) for book in books]

    def column(book: str, scale: float) -> Array:
        return values.column(values.ids(book, "seen"), scale, metric.name)

    return tuple(
        test for scale in values.scales if scale != 0 for test in loss_tests(roles, scale, metric, column, draws)
    )


def memberships(values: PassageValues, books: Sequence[BookInfo], draws: Draws) -> tuple[Membership, ...]:
    """For each book and λ, how well Min-K % tells seen passages from unseen ones."""
    found = []
    quick = min(draws.resamples, 500)
    for book, seen, unseen in _told_apart(values, books):
        level = 0.5
        if values.references:
            level = auc(*(values.reference_column(ids, values.references[0], "min_k") for ids in (seen, unseen)))
        for scale in values.scales:
            first, second = (values.column(ids, scale, "min_k") for ids in (seen, unseen))
            interval = auc_interval(first, second, quick, draws.level, draws.seed)
            found.append(Membership(book, scale, interval, priv_leak(interval.value, level)))
    return tuple(found)


def reference_memberships(
    values: PassageValues, books: Sequence[BookInfo], draws: Draws
) -> tuple[ReferenceMembership, ...]:
    """The same of each reference model."""
    found = []
    for book, seen, unseen in _told_apart(values, books):
        for name in values.references:
            first, second = (values.reference_column(ids, name, "min_k") for ids in (seen, unseen))
            interval = auc_interval(first, second, min(draws.resamples, 500), draws.level, draws.seed)
            found.append(ReferenceMembership(name, book, interval))
    return tuple(found)


def _told_apart(values: PassageValues, books: Sequence[BookInfo]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each book that can be tested for membership, with its seen passages and the unseen ones."""
    if not any(info.name == "min_k" for info in values.infos):
        return
    for book in books:
        seen, unseen = values.ids(book.name, "seen"), unseen_ids(values, books, book.name)
        if seen and unseen:
            yield book.name, seen, unseen


def unseen_ids(values: PassageValues, books: Sequence[BookInfo], book: str) -> list[str]:
    """What a book's seen passages are compared with: text that was declared unseen, else its held-out passages."""
    declared = [name for other in books if other.role == "unseen" for name in values.ids(other.name, "held_out")]
    return declared or values.ids(book, "held_out")
