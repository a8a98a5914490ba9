"""How far an attack moved a score, in one figure: 1 is robust, 0 is not. Both forms of the literature, each by name.

`m` is a score of knowledge before and after an attack (higher is more of the book; use `1 − UDS` for the unlearning
depth), `Δ = m_after − m_before`. The one-sided forms are those of open-unlearning (Dorna et al. 2025, as the code of
the unlearning depth score states them), the symmetric ones those that the depth score's authors report.
"""

from hf_taskvec.errors import BadValueError


def one_sided_relearning_robustness(gain: float, reference_gain: float) -> float:
    """`min(Δ_reference / Δ_edited, 1)`: 1 if relearning gives the edited model no more than the reference.

    An edited model that gains nothing is robust (1), whatever the reference does. A reference that gains nothing
    while the edited model does gives 0: all of the gain is what was still there.

    Args:
        gain (`float`):
            Δ of the edited model.
        reference_gain (`float`):
            Δ of the model that never saw the book, attacked in the same way.

    Returns:
        `float`: Between 0 and 1.

    Example:
        >>> one_sided_relearning_robustness(gain=0.4, reference_gain=0.1)  # four times as fast as learning anew
        0.25
        >>> one_sided_relearning_robustness(0.1, 0.4), one_sided_relearning_robustness(0.0, 0.0)
        (1.0, 1.0)

    """
    if gain <= 0:
        return 1.0
    return min(max(reference_gain / gain, 0.0), 1.0)


def symmetric_relearning_robustness(gain: float, reference_gain: float) -> float:
    """`1 − |Δ_edited − Δ_reference| / (|Δ_edited| + |Δ_reference|)`: 1 only if relearning moves both alike.

    To gain *less* than the reference counts against the edit too: it hides the book or is broken. Gains of opposite
    signs give 0. Where neither model moves, both move alike: 1.

    Args:
        gain (`float`):
            Δ of the edited model.
        reference_gain (`float`):
            Δ of the model that never saw the book, attacked in the same way.

    Returns:
        `float`: Between 0 and 1.

    Example:
        >>> symmetric_relearning_robustness(0.75, 0.25), symmetric_relearning_robustness(0.25, 0.75)
        (0.5, 0.5)
        >>> symmetric_relearning_robustness(0.0, 0.0), symmetric_relearning_robustness(0.2, -0.1)
        (1.0, 0.0)

    """
    return _alike(gain, reference_gain)


def one_sided_quantisation_robustness(before: float, after: float) -> float:
    """`min(m_after / m_before, 1)`: 1 if quantising takes nothing away from the score.

    This form judges whether a *score* survives quantising. It does not see knowledge that comes back (`m_after` above
    `m_before` is 1): use the symmetric form for that. Where nothing was there before, nothing was taken away: 1.

    Args:
        before (`float`):
            The score of knowledge, 0 or more, at full precision.
        after (`float`):
            The same, quantised.

    Returns:
        `float`: Between 0 and 1.

    Raises:
        `BadValueError`: If a score is negative: a ratio needs a true zero.

    Example:
        >>> one_sided_quantisation_robustness(0.4, 0.1), one_sided_quantisation_robustness(0.1, 0.4)
        (0.25, 1.0)

    """
    _check_scores(before, after)
    return min(after / before, 1.0) if before else 1.0


def symmetric_quantisation_robustness(before: float, after: float) -> float:
    """`1 − |m_after − m_before| / (m_before + m_after)`: 1 only if quantising leaves the score as it was.

    Both knowledge that comes back and knowledge that is destroyed lower it. From or to nothing is 0; where there is
    nothing before and after, nothing moved: 1.

    Args:
        before (`float`):
            The score of knowledge, 0 or more, at full precision.
        after (`float`):
            The same, quantised.

    Returns:
        `float`: Between 0 and 1.

    Raises:
        `BadValueError`: If a score is negative: a ratio needs a true zero.

    Example:
        >>> symmetric_quantisation_robustness(0.25, 0.75), symmetric_quantisation_robustness(0.0, 0.0)
        (0.5, 1.0)

    """
    _check_scores(before, after)
    return _alike(before, after)


def _alike(one: float, other: float) -> float:
    size = abs(one) + abs(other)
    return 1 - abs(one - other) / size if size else 1.0


def _check_scores(before: float, after: float) -> None:
    if before < 0 or after < 0:
        raise BadValueError(
            f"before={before!r} and after={after!r} must not be negative: use a score of knowledge from 0 upwards, "
            "such as Rouge-L or a probability, not a log-probability."
        )
