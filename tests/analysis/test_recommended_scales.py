"""λ from theory: the regions of Theorems 1 to 3, and the sweep's origin."""

import math
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_taskvec.analysis import Correlation, recommend_scales
from hf_taskvec.analysis.recommended_scales import PRACTICAL_MARGIN
from hf_taskvec.errors import BadValueError

correlations = st.floats(-1, 1, allow_nan=False)


@pytest.mark.parametrize(
    ("alpha", "verdict"), [(0.0, "works"), (0.1, "works"), (0.5, "works"), (1.0, "works"), (-0.5, "impossible")]
)
def test_adding_is_theorem_1(alpha: float, verdict: str) -> None:
    add = recommend_scales(alpha, beta=0.01).add
    assert add.verdict == verdict
    if verdict == "works":
        assert add.low == add.scale == pytest.approx(1 - alpha + 0.01)


@pytest.mark.parametrize(
    ("alpha", "verdict", "low", "high"),
    [
        (0.0, "works", -2.0, 0.0),  # (A)
        (-0.9, "works", -1 / 0.81, -0.009),  # (B)
        (-0.5, "works", -2.0, -0.005),  # (B), where −α⁻² is beyond c/β
        (0.5, "hard", 0.0, 0.25),  # (C)
        (0.95, "impossible", None, None),
    ],
)
def test_forgetting_is_theorem_2(alpha: float, verdict: str, low: float | None, high: float | None) -> None:
    forget = recommend_scales(alpha).forget
    assert (forget.verdict, forget.low, forget.high) == (verdict, pytest.approx(low), pytest.approx(high))


@given(st.floats(-1, 0), st.floats(-1, 0))
def test_more_contradictory_tasks_have_a_nearer_end_of_the_region(one: float, other: float) -> None:
    """From (A) to (B) the region's lower end does not jump, and it never reaches beyond c/β."""
    more, less = sorted((one, other))
    lows = [recommend_scales(alpha, irrelevant=0.2).forget.low for alpha in (less, more)]
    assert -2 <= lows[0] <= lows[1] <= -1
    assert recommend_scales(-1e-200, irrelevant=0).forget.low == pytest.approx(-2)
    narrow = recommend_scales(-1.0, beta=0.5, c=1e-4).forget
    assert narrow.low == narrow.high == narrow.scale == -0.5


@given(correlations)
def test_in_the_sweep_forgetting_never_adds(alpha: float) -> None:
    """The trap: case (C) speaks of positive λ, because its model holds nothing of the task yet."""
    forget = recommend_scales(alpha).forget
    seen = forget.in_sweep
    assert seen.verdict == forget.verdict and seen.origin == "sweep" and seen.in_sweep is seen
    if forget.low is None:
        assert seen.scale is None
    else:
        assert seen.low <= seen.scale <= seen.high < 0
        assert seen.high == pytest.approx(forget.high - 1)
        assert seen.scale in seen and forget.scale in forget and 0.5 not in seen


@given(st.floats(0.21, 0.89), st.floats(0.21, 0.89))
def test_more_aligned_tasks_have_a_narrower_region(one: float, other: float) -> None:
    less, more = sorted((one, other))
    width = [(r.high - r.low) for r in (recommend_scales(a).forget for a in (less, more))]
    assert width[0] >= width[1] > 0


def test_theorem_3_holds_with_the_corrected_constant_only() -> None:
    """Both sums hold with the corrected constant; with the printed one the second does not."""
    gammas, c = (0.792, -0.637), 0.02
    found = recommend_scales(gammas=gammas, c=c).transfer
    first = sum(s * g for s, g in zip(found.scales, gammas, strict=True))
    second = sum(s * g**2 for s, g in zip(found.scales, gammas, strict=True))
    assert first >= 1 + c and second == pytest.approx(1 + c)
    assert found.verdict == "works" and found.holds(found.scales)
    squares, fourths = sum(g**2 for g in gammas), sum(g**4 for g in gammas)
    printed = [s * math.sqrt(fourths / squares) for s in found.scales]
    assert sum(s * g for s, g in zip(printed, gammas, strict=True)) == pytest.approx(1.02)
    assert sum(s * g**2 for s, g in zip(printed, gammas, strict=True)) == pytest.approx(0.75, abs=0.005)
    assert not found.holds(printed)


@given(st.lists(correlations, min_size=1, max_size=5))
def test_the_scales_meet_both_sums_and_the_bound(gammas: list[float]) -> None:
    values = torch.tensor(gammas, dtype=torch.float64)
    nonzero = values[values.abs() > 1e-3]
    assume(len(nonzero) == len(values) and ((nonzero > 0).any() or nonzero.max() - nonzero.min() > 1e-2))
    found = recommend_scales(gammas=gammas).transfer
    if found.verdict == "impossible":
        assert found.scales == () and "with λ" not in str(recommend_scales(gammas=gammas))
        return
    scales = torch.tensor(found.scales, dtype=torch.float64)
    assert (scales * values).sum() >= 1.02 * (1 - 1e-6)
    assert (scales * values**2).sum() >= 1.02 * (1 - 1e-6)
    assert scales.abs().max() <= 2 * (1 + 1e-6) and found.holds(found.scales)


def test_where_the_closed_form_is_too_large_another_is_given() -> None:
    """Within a bound that the closed form just misses, less of the one and more of the other will do."""
    gammas = (0.6, -0.9)
    free = recommend_scales(gammas=gammas, c=0.02, beta=0.001).transfer  # the bound is far away
    hard = recommend_scales(gammas=gammas, c=0.02, beta=0.02 / (0.99 * max(map(abs, free.scales)))).transfer
    assert free.verdict == "works" and hard.verdict == "hard" and not hard.holds(free.scales)
    assert hard.holds(hard.scales) and max(map(abs, hard.scales)) < max(map(abs, free.scales))


@given(st.lists(correlations, min_size=2, max_size=2), st.sampled_from([1.0, PRACTICAL_MARGIN]))
def test_the_verdict_agrees_with_a_search_over_a_grid(gammas: list[float], margin: float) -> None:
    """Whether any λ in the box meets both sums, asked of many λ."""
    nonzero = [g for g in gammas if abs(g) > 1e-6]
    assume(nonzero and (max(nonzero) > 0 or max(nonzero) - min(nonzero) > 1e-6))
    found = recommend_scales(gammas=gammas, margin=margin).transfer
    axis = torch.linspace(-2, 2, 201, dtype=torch.float64)
    x, y = torch.meshgrid(axis, axis, indexing="ij")
    sums = torch.minimum(x * gammas[0] + y * gammas[1], x * gammas[0] ** 2 + y * gammas[1] ** 2)
    best = sums.max().item()
    needed = margin + 0.02
    assume(abs(best - needed) > 0.05)  # a grid cannot tell closer
    assert (found.verdict != "impossible") == (best > needed)
    if found.verdict == "hard":  # no λ of the grid is gentler
        gentler = torch.maximum(x.abs(), y.abs()) < max(map(abs, found.scales)) * (1 - 1e-9)
        assert not bool(((sums >= needed) & gentler).any())


def test_scales_grow_in_proportion_to_the_margin() -> None:
    strict, practical = (recommend_scales(gammas=(0.792, -0.637), margin=m).transfer for m in (1.0, PRACTICAL_MARGIN))
    ratio = (0.2 + 0.02) / (1 + 0.02)
    assert practical.scales == pytest.approx([s * ratio for s in strict.scales])


def test_theorem_3_is_about_tasks_that_are_irrelevant_to_each_other() -> None:
    alone = recommend_scales(gammas=[0.8, 0.7]).transfer
    apart = recommend_scales(gammas=[0.8, 0.7], between=[0.1]).transfer
    related = recommend_scales(gammas=[0.8, 0.7], between=[-0.88]).transfer
    assert alone is not None and related is not None
    assert apart == alone and alone.verdict == "works"
    assert related.verdict == "hard" and related.scales == alone.scales and related.closed_form
    assert "correlated (|α| = 0.88)" in related.why and "promises nothing" in related.why
    with pytest.raises(BadValueError, match="between"):
        recommend_scales(gammas=[0.8, 0.7], between=[1.5])


@given(st.floats(-1, 1))
def test_what_is_printed_is_recommended(alpha: float) -> None:
    """The λ that somebody types from a message is in the region."""
    found = recommend_scales(alpha)
    assert found.add is not None and found.forget is not None
    for region in (found.add, found.forget, found.forget.in_sweep):
        if region.scale is not None:
            (printed,) = re.findall(r"first λ = (\S+)\.", str(region))
            assert float(printed) in region and float(printed) == pytest.approx(region.scale, abs=1e-9)


def test_a_correlation_is_taken_as_it_is() -> None:
    found = recommend_scales(Correlation(0.4, 0.3, 0.5, "last", (3, 4)))
    assert found.alpha == 0.4 and found.transfer is None
    assert "aligned" in str(found) and "hard" in str(found)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(BadValueError, match="needs alpha="):
        recommend_scales()
    with pytest.raises(BadValueError, match=r"alpha=1.5 is not a correlation"):
        recommend_scales(1.5)
    with pytest.raises(BadValueError, match="alpha=nan"):
        recommend_scales(float("nan"))
    with pytest.raises(BadValueError, match="contradicts all tasks alike"):
        recommend_scales(gammas=(-0.4, -0.4, 0.0))
    with pytest.raises(BadValueError, match="contradicts all tasks alike"):
        recommend_scales(gammas=[-0.3])
    with pytest.raises(BadValueError, match="condition A"):
        recommend_scales(gammas=(0.0, 0.0))
    with pytest.raises(BadValueError, match="condition A"):
        recommend_scales(gammas=())
    with pytest.raises(BadValueError, match="beta=0"):
        recommend_scales(0.1, beta=0)
    with pytest.raises(BadValueError, match="2 tasks"):
        recommend_scales(gammas=(0.5, 0.5)).transfer.holds([1.0])


def test_the_recommended_scale_joins_the_grid() -> None:
    assert recommend_scales(0.0).scales_with([0, -0.2, -0.4]) == [0, -0.2, -0.4, -1.0]
    assert recommend_scales(0.3).scales_with([-1.0, 0]) == [0, -1.0]
    assert recommend_scales(0.99).scales_with([0, -0.5]) == [0, -0.5]
    assert recommend_scales(-0.5).scales_with([0])[-1] == pytest.approx(-1.005)
