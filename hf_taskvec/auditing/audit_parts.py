"""What an audit's report is made of: what each attack brought back from three models."""

from dataclasses import dataclass
from typing import Literal, get_args

from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.scoring.verdict import Outcome, Verdict

AttackGroup = Literal["relearn", "quantise", "sample", "prompt", "inside", "membership"]
ATTACKS: tuple[AttackGroup, ...] = get_args(AttackGroup)


@dataclass(frozen=True)
class MetricResult:
    """One metric of the three models under one attack, on the same passages.

    Args:
        metric (`str`):
            Which.
        untouched, edited, reference (`Interval`):
            The mean scores.
        difference (`Interval`):
            The edited model's minus the reference's, paired.
    """

    metric: str
    untouched: Interval
    edited: Interval
    reference: Interval
    difference: Interval


@dataclass(frozen=True)
class AttackPoint:
    """The three models at one moment of an attack.

    Args:
        step (`int`):
            How much of the attack was made: training steps, or samples; 0 where there is nothing to count.
        passages (`int`):
            How many were asked.
        results (`tuple` of `MetricResult`):
            Every metric that was asked for.
        verdict (`Verdict`):
            Relative forgetting between the attacked untouched model (0) and the attacked reference (1).
    """

    step: int
    passages: int
    results: tuple[MetricResult, ...]
    verdict: Verdict


@dataclass(frozen=True)
class Robustness:
    """How far an attack moved the edited model beside the reference, by one metric; 1 is robust.

    Args:
        metric (`str`):
            A score of knowledge.
        one_sided (`float`):
            `min(Δ_reference / Δ_edited, 1)` for relearning, `min(m_after / m_before, 1)` for quantising.
        symmetric (`float`):
            `1 − |Δ_edited − Δ_reference| / (|Δ_edited| + |Δ_reference|)`; for quantising with m before and after.
    """

    metric: str
    one_sided: float
    symmetric: float


@dataclass(frozen=True)
class Finding:
    """What came of one attack.

    Args:
        attack (`str`):
            Its name.
        group (`str`):
            Its kind; of an attack that another package adds, its name there.
        words (`str`):
            What was done, in a sentence without its full stop.
        points (`tuple` of `AttackPoint`):
            On the way; the last one is the whole attack.
        robustness (`tuple` of `Robustness`):
            For relearning and quantising.
        left_out (`int`):
            Passages that could not be asked in this way.
    """

    attack: str
    group: str
    words: str
    points: tuple[AttackPoint, ...]
    robustness: tuple[Robustness, ...]
    left_out: int

    @property
    def last(self) -> AttackPoint:
        """The whole attack."""
        return self.points[-1]


@dataclass(frozen=True)
class LayerView:
    """The mean log-probability of the true text, read off after one layer by the logit lens; 0 is the embedding."""

    layer: int
    untouched: Interval
    edited: Interval
    reference: Interval


@dataclass(frozen=True)
class InsideFinding:
    """What the models' inner layers know.

    Args:
        lens (`tuple` of `LayerView`):
            The logit lens over layers.
        depth (`Interval`, *optional*):
            Unlearning depth (the variant of UDS for books): 0 as the untouched model, 1 as the reference.
        depth_reason (`str`, *optional*):
            Why there is none.
        depth_untouched, depth_reference (`float`, *optional*):
            The depth of those two, which must be 0 and 1.
        reference_drops, edited_drops (`tuple` of `float`):
            What each layer's states of the reference and of the edited model cost the untouched one, in nats a token.
    """

    lens: tuple[LayerView, ...]
    depth: Interval | None
    depth_reason: str | None
    depth_untouched: float | None
    depth_reference: float | None
    reference_drops: tuple[float, ...]
    edited_drops: tuple[float, ...]


@dataclass(frozen=True)
class MembershipFinding:
    """One membership test: how well it tells seen passages from unseen ones.

    Args:
        book, test (`str`):
            Of which book, and by what.
        untouched, edited, reference (`Interval`):
            The AUC of each model.
        difference (`Interval`):
            The edited model's minus the reference's, paired.
        priv_leak (`float`, *optional*):
            PrivLeak of the edited model, in percent.
        outcome (`str`):
            Where the difference lies, as of any metric.
    """

    book: str
    test: str
    untouched: Interval
    edited: Interval
    reference: Interval
    difference: Interval
    priv_leak: float | None
    outcome: Outcome


@dataclass(frozen=True)
class AuditSettings:
    """How the numbers were drawn, and the budget of the attacks."""

    seed: int
    resamples: int
    level: float
    passages: int
    samples: int
    learning_rate: float
    lora_learning_rate: float
    epochs: int
    relearned_share: float
