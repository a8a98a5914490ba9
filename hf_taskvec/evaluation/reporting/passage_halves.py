"""The passages in two halves: one chooses λ, the other judges it. And what stands for never having seen a book."""

import random
from collections.abc import Sequence
from dataclasses import replace

from hf_taskvec.evaluation.reporting.report_parts import BookInfo
from hf_taskvec.evaluation.reporting.summary import PassageValues, unseen_ids
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.drop_tests import loss_tests
from hf_taskvec.evaluation.scoring.edit_names import EditNames
from hf_taskvec.evaluation.scoring.scale_choice import Choice, NeverSeen, choose
from hf_taskvec.evaluation.scoring.statistics import Draws, auc_interval
from hf_taskvec.evaluation.scoring.verdict import BookColumns, Half, MembershipColumns, Verdict, judge
from hf_taskvec.evaluation.texts.books import SPLITS, Split

# A model that never saw a text does not continue it like this on average.
_BY_HEART = 0.5
_Ids = dict[tuple[str, Split], list[str]]


def choose_scale(
    values: PassageValues,
    books: Sequence[BookInfo],
    criteria: Criteria,
    draws: Draws,
    *,
    split_followed: bool = False,
    score_factor: float = 1.0,
    names: EditNames | None = None,
) -> Choice | None:
    """The choice of λ; `None` without a forget book.

    Args:
        values (`PassageValues`):
            All that was measured.
        books (`Sequence[BookInfo]`):
            With their roles.
        criteria (`Criteria`):
            What forgotten and kept mean.
        draws (`Draws`):
            For the intervals; its seed also decides the halves.
        split_followed (`bool`, *optional*, defaults to `False`):
            Whether it is known that the model's training left the held-out parts out.
        score_factor (`float`, *optional*, defaults to 1):
            The protocol's, by which the margin of the rule `"margin"` is multiplied for Rouge-L.
        names (`EditNames`, *optional*):
            What the edits are called.
    """
    forget = [b.name for b in books if b.role == "forget"]
    if not forget:
        return None
    scaled = criteria.in_units(score_factor)
    halves = _halves(values, books, draws.seed)
    never_seen = _never_seen(values, books, forget, draws, split_followed, score_factor)
    choosing, reporting = (_half(values, books, forget, scaled, ids) for ids in halves)
    if min(_smallest(choosing), _smallest(reporting)) == 0:
        reason = (
            f"no {(names or EditNames()).noun} can be chosen: there are too few passages, or nothing tells what never "
            "having seen the book would look like. Give a reference model (the base, if nothing else), or text that "
            "the model never saw"
        )
        return Choice(None, reason, criteria, never_seen, (), None, None, (), ())
    infos = {info.name: info for info in values.infos}
    found = choose(values.scales, choosing, reporting, scaled, infos, never_seen=never_seen, draws=draws, names=names)
    found = replace(found, criteria=criteria)
    if not found.judged:
        return found
    tests = loss_tests(
        [(book.name, book.role) for book in books],
        found.judged,
        infos[criteria.headline],
        lambda book, scale: values.column(halves[1][book, "seen"], scale, criteria.headline),
        draws,
    )
    return replace(found, tests=tests)


def judge_scales(
    values: PassageValues,
    books: Sequence[BookInfo],
    criteria: Criteria,
    draws: Draws,
    *,
    score_factor: float = 1.0,
) -> dict[float, Verdict]:
    """The verdict on every λ, from the half of the passages that does not choose; empty without a forget book.

    Args:
        values (`PassageValues`):
            All that was measured.
        books (`Sequence[BookInfo]`):
            With their roles.
        criteria (`Criteria`):
            What forgotten and kept mean.
        draws (`Draws`):
            As for `choose_scale`.
        score_factor (`float`, *optional*, defaults to 1):
            As for `choose_scale`.
    """
    forget = [b.name for b in books if b.role == "forget"]
    scaled = criteria.in_units(score_factor)
    judging = _half(values, books, forget, scaled, _halves(values, books, draws.seed)[1])
    if not forget or _smallest(judging) == 0:
        return {}
    infos = {info.name: info for info in values.infos}
    return {scale: judge(scale, judging, scaled, infos, draws) for scale in values.scales}


def _halves(values: PassageValues, books: Sequence[BookInfo], seed: int) -> tuple[_Ids, _Ids]:
    halves: tuple[_Ids, _Ids] = ({}, {})
    for book in books:
        for split in SPLITS:
            ids = values.ids(book.name, split)
            random.Random(f"{seed}/{book.name}/{split}/halves").shuffle(ids)
            halves[0][book.name, split], halves[1][book.name, split] = ids[::2], ids[1::2]
    return halves


def _half(
    values: PassageValues, books: Sequence[BookInfo], forget: Sequence[str], criteria: Criteria, ids: _Ids
) -> Half:
    against = values.references[0] if values.references else None
    kept = [b.name for b in books if b.role == "retain" and len(values.ids(b.name, "seen")) > 1]

    def columns(book: str, metric: str, never: bool) -> BookColumns:
        seen = ids[book, "seen"]
        at = {scale: values.column(seen, scale, metric) for scale in values.scales}
        if not never:
            return BookColumns(at)
        if against is not None:
            return BookColumns(at, values.reference_column(seen, against, metric))
        return BookColumns(at, values.column(_unseen(values, books, book, ids), 0.0, metric), paired=False)

    return Half(
        forget={book: {m: columns(book, m, True) for m in criteria.judged} for book in forget},
        retain={book: {m: columns(book, m, False) for m in criteria.judged} for book in kept},
        membership={
            book: found for book in forget if (found := _membership(values, books, book, ids, against)) is not None
        },
    )


def _membership(
    values: PassageValues, books: Sequence[BookInfo], book: str, ids: _Ids, against: str | None
) -> MembershipColumns | None:
    groups = ids[book, "seen"], _unseen(values, books, book, ids)
    if not all(groups) or not any(info.name == "min_k" for info in values.infos):
        return None
    seen, unseen = ({scale: values.column(group, scale, "min_k") for scale in values.scales} for group in groups)
    reference = None
    if against is not None:
        first, second = (values.reference_column(group, against, "min_k") for group in groups)
        reference = (first, second)
    return MembershipColumns(seen, unseen, reference)


def _unseen(values: PassageValues, books: Sequence[BookInfo], book: str, ids: _Ids) -> list[str]:
    """This half's part of the unseen passages that a book is compared with."""
    wanted = set(unseen_ids(values, books, book))
    return [name for (_, split), names in ids.items() if split == "held_out" for name in names if name in wanted]


def _smallest(half: Half) -> int:
    """The fewest passages that something of a forget book rests on."""
    found = [column for book in half.forget.values() for column in book.values()]
    return min(min(len(c.at[0.0]), 0 if c.never is None else len(c.never)) for c in found)


def _never_seen(
    values: PassageValues,
    books: Sequence[BookInfo],
    forget: Sequence[str],
    draws: Draws,
    split_followed: bool,
    score_factor: float,
) -> NeverSeen:
    if values.references:
        return NeverSeen("reference", values.references[0])
    if any(book.role == "unseen" for book in books):
        return NeverSeen("unseen")
    return NeverSeen(
        "split" if split_followed else "assumed",
        contradiction=None if split_followed else _contradiction(values, forget, draws, score_factor),
    )


def _contradiction(values: PassageValues, forget: Sequence[str], draws: Draws, score_factor: float) -> str | None:
    """What speaks against held-out passages of these books being unseen: they are known as well as the seen ones."""
    metric = next((m for m in ("min_k", "rouge_l") if any(info.name == m for info in values.infos)), "rouge_l")
    for book in forget:
        seen, held_out = values.ids(book, "seen"), values.ids(book, "held_out")
        if not seen or not held_out:
            continue
        first, second = (values.column(ids, 0.0, metric) for ids in (seen, held_out))
        if not auc_interval(first, second, min(draws.resamples, 500), draws.level, draws.seed).covers(0.5):
            continue
        text = (
            f"The seen and the “held-out” passages of {book} score alike: the model hardly knew the book, or it was "
            "trained on all of it"
        )
        known = float(values.column(held_out, 0.0, "rouge_l").mean())
        if known >= _BY_HEART * score_factor:
            text = (
                f"The model knows the “held-out” passages of {book} as well as the others (Rouge-L {known:.2f}): it "
                "was trained on them too"
            )
        return text + ". Then load the book with held_out=0 and give a reference model, such as the base"
    return None
