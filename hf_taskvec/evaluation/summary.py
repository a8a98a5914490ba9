"""From the values of single passages to the numbers of a report: intervals, tests, membership, choice."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hf_taskvec.evaluation.books import SPLITS, Split
from hf_taskvec.evaluation.choice import Choice, Half, choose
from hf_taskvec.evaluation.losses import LossTest, loss_tests
from hf_taskvec.evaluation.metrics import METRICS, Metric
from hf_taskvec.evaluation.report import BookInfo, Membership, PassageResult, Score
from hf_taskvec.evaluation.statistics import Array, Draws, auc_interval


@dataclass(frozen=True)
class Values:
    """The values of all passages at all λ, by book, split and metric.

    Args:
        passages: the results, each with the same values of λ.
        scales: those values, 0 first.
        reference: the values of a model that never saw the forget books, by passage id.
    """

    passages: Sequence[PassageResult]
    scales: Sequence[float]
    reference: dict[str, dict[str, float]] | None = None

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that were measured."""
        return [metric for name, metric in METRICS.items() if name in self.passages[0].at[0].values]

    def ids(self, book: str, split: Split) -> list[str]:
        return [p.id for p in self.passages if p.book == book and p.split == split]

    def column(self, ids: Sequence[str], scale: float, metric: str) -> Array:
        wanted, place = set(ids), self.scales.index(scale)
        return np.array([p.at[place].values[metric] for p in self.passages if p.id in wanted])

    def reference_column(self, ids: Sequence[str], metric: str) -> Array | None:
        if self.reference is None:
            return None
        return np.array([self.reference[name][metric] for name in ids])


def all_scores(values: Values, books: Sequence[BookInfo], draws: Draws) -> tuple[Score, ...]:
    """Every metric of every book and split at every λ, compared with λ=0 on the same passages."""
    scores = []
    for book in books:
        for split in SPLITS:
            ids = values.ids(book.name, split)
            if not ids:
                continue
            draw = draws.bootstrap(len(ids))
            for metric in values.metrics:
                before = values.column(ids, 0.0, metric.name)
                for scale in values.scales:
                    here = values.column(ids, scale, metric.name)
                    change = relative = None
                    if scale != 0:
                        change = draw.difference(here, before, metric.geometric)
                        if metric.ratio:
                            relative = draw.relative(here, before, metric.geometric)
                    value = draw.mean(here, metric.geometric)
                    scores.append(Score(book.name, split, scale, metric.name, len(ids), value, change, relative))
    return tuple(scores)


def all_loss_tests(values: Values, books: Sequence[BookInfo], metric: Metric, draws: Draws) -> tuple[LossTest, ...]:
    """Which books lost more than which, at every λ, on all seen passages."""
    roles = [(book.name, book.role) for book in books]

    def column(book: str, scale: float) -> Array:
        return values.column(values.ids(book, "seen"), scale, metric.name)

    return tuple(
        test for scale in values.scales if scale != 0 for test in loss_tests(roles, scale, metric, column, draws)
    )


def memberships(values: Values, books: Sequence[BookInfo], draws: Draws) -> tuple[Membership, ...]:
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
    values: Values,
    books: Sequence[BookInfo],
    metric: Metric,
    *,
    margin: float,
    retain_bound: float,
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

    def half(ids: dict[tuple[str, Split], list[str]]) -> Half:
        seen = sorted(name for book in forget for name in ids[book, "seen"])
        held = sorted(name for book in forget for name in ids[book, "held_out"])
        # `column` answers in the order of the passages, and the reference must follow it.
        order = [p.id for p in values.passages if p.id in set(seen)]
        return Half(
            forget={s: values.column(seen, s, metric.name) for s in values.scales},
            retain={
                book: {s: values.column(ids[book, "seen"], s, metric.name) for s in values.scales} for book in retain
            },
            held_out=values.column(held, 0.0, metric.name),
            reference=values.reference_column(order, metric.name),
        )

    choosing, reporting = half(halves[0]), half(halves[1])
    kind: Literal["retrain", "held_out"] = "held_out" if values.reference is None else "retrain"
    smallest = min(
        len(part)
        for h in (choosing, reporting)
        for part in (h.forget[0.0], h.held_out if h.reference is None else h.reference)
    )
    if smallest == 0:
        reason = "no λ can be chosen: there are too few passages, or neither held-out ones nor a reference model"
        return Choice(None, reason, metric.name, kind, margin, retain_bound, (), None, ())
    found = choose(
        values.scales,
        choosing,
        reporting,
        metric,
        margin=margin,
        retain_bound=retain_bound,
        draws=draws,
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
