"""Reports with the numbers that a test wants, without a model: one run of one seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hf_taskvec.evaluation import Criteria, UnlearningReport, protocols
from hf_taskvec.evaluation.reporting.report_parts import BookInfo, EditInfo, Score, Settings, Timing
from hf_taskvec.evaluation.scoring.drop_tests import LossTest
from hf_taskvec.evaluation.scoring.metrics import METRICS, PRIMARY
from hf_taskvec.evaluation.scoring.scale_choice import Candidate, Choice, NeverSeen
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.scoring.verdict import (
    MembershipVerdict,
    MetricVerdict,
    RetainedLoss,
    Verdict,
    overall,
    placed,
)
from hf_taskvec.evaluation.texts.leaks import LeakReport

ROLES = {"alice": "forget", "looking": "aligned", "oz": "retain"}
SCALES = (0.0, -0.2, -0.4, -0.6)


def around(value: float, width: float = 0.05) -> Interval:
    return Interval(value, value - width, value + width)


def made_report(
    seed: int,
    *,
    relative: float | dict[str, float | None] = 1.0,
    scale: float | None = -0.4,
    nearest: float | None = None,
    membership: float = 0.0,
    retained: float | dict[str, float] = 0.03,
    lost: tuple[float, float, float] = (0.3, 0.2, 0.05),
    criteria: Criteria = Criteria(),  # noqa: B008 (a frozen value)
) -> UnlearningReport:
    """A report whose verdict has these R, membership difference and losses; `lost` is of forget, aligned and retain."""
    by_metric = relative if isinstance(relative, dict) else dict.fromkeys(PRIMARY, relative)
    kept = retained if isinstance(retained, dict) else dict.fromkeys(PRIMARY, retained)
    metrics = tuple(_metric(name, value) for name, value in by_metric.items())
    members = (
        MembershipVerdict(
            book="alice",
            auc=around(0.52 + membership),
            reference=around(0.52),
            difference=around(membership),
            priv_leak=-100 * membership / 0.48,
            outcome=placed(around(-membership), -0.15, 0.15),
            reference_knows=False,
        ),
    )
    losses = tuple(
        RetainedLoss("oz", name, around(value, 0.01), "kept" if value <= 0.08 else "lost")
        for name, value in kept.items()
    )
    outcome = overall(metrics, members)
    verdict = Verdict(
        outcome, outcome, metrics, members, losses, "kept" if all(x.outcome == "kept" for x in losses) else "lost"
    )
    judged = nearest if scale is None else scale
    amounts = dict(zip(ROLES, lost, strict=True))
    tests = tuple(
        LossTest(
            one,
            two,
            judged or 0.0,
            "rouge_l",
            amounts[one],
            amounts[two],
            around(amounts[one] - amounts[two]),
            0.01,
            (9, 9),
        )
        for one, two in (("alice", "oz"), ("looking", "oz"), ("alice", "looking"))
    )
    choice = Choice(
        scale=scale,
        reason="made up",
        criteria=criteria,
        never_seen=NeverSeen("reference", "retrained"),
        candidates=(),
        nearest=nearest,
        verdict=verdict,
        tests=tests,
        pareto=(),
    )
    return UnlearningReport(
        protocol=protocols.get(),
        model=f"model-{seed}",
        edit="made-up",
        references=(),
        scales=SCALES,
        metrics=tuple(METRICS[name].info for name in PRIMARY),
        books=tuple(BookInfo(name, role, f"{name}-{seed}", seed, 18, 18) for name, role in ROLES.items()),
        leaks=LeakReport(0, 8, (), ()),
        left_out=0,
        scores=tuple(
            Score(name, "seen", at, "rouge_l", 18, around(0.8 + at), None, None) for name in ROLES for at in SCALES
        ),
        reference_scores=(),
        tests=(),
        membership=(),
        reference_membership=(),
        choice=choice,
        passages=(),
        settings=Settings(seed, 100, 0.95, 100, 8, 1, "", False),
        versions={},
        timing=Timing(1.0, 1.0, 1, 0, 1.0, 1, 0),
    )


def made_report_of_edits(
    seed: int,
    distances: Mapping[str, float],
    judged: str,
    *,
    chosen: bool = True,
    relative: Mapping[str, float | None] | None = None,
    **more: float,
) -> UnlearningReport:
    """A report of named edits of these distances; `relative` is R of each by every metric, 1 if it is not named."""
    ordered = sorted(distances, key=lambda name: distances[name])
    number = float(ordered.index(judged) + 1)
    plain = made_report(seed, scale=number if chosen else None, nearest=None if chosen else number, **more)
    assert plain.choice is not None
    given = [0.0, *((relative or {}).get(name, 1.0) for name in ordered)]
    candidates = tuple(_candidate(float(place), value) for place, value in enumerate(given))
    return replace(
        plain,
        scales=tuple(candidate.scale for candidate in candidates),
        scores=(),
        choice=replace(plain.choice, candidates=candidates),
        edits=tuple(EditInfo(name, name, f"{name}-{seed}", distances[name]) for name in ordered),
    )


def _candidate(scale: float, relative: float | None) -> Candidate:
    good = relative is not None and 0.8 <= relative <= 1.2
    return Candidate(
        scale=scale,
        forget=0.5,
        target=0.5,
        relative={} if relative is None else dict.fromkeys(PRIMARY, relative),
        retained=dict.fromkeys(PRIMARY, 0.01 * scale),
        membership=0.3 - 0.1 * scale,
        forgets=good,
        worst_retain=0.01 * scale,
        shortfall=0.0 if good else 0.5,
        qualifies=good,
    )


def _metric(name: str, relative: float | None) -> MetricVerdict:
    found = None if relative is None else around(relative)
    return MetricVerdict(
        book="alice",
        metric=name,
        passages=9,
        before=0.8,
        after=around(0.8 - 0.6 * (relative or 0.0)),
        never=0.2,
        gap=around(0.6),
        difference=around(0.6 - 0.6 * (relative or 0.0)),
        relative=found,
        outcome="untestable" if found is None else placed(found, 0.8, 1.2),
        needed=None,
    )
