"""The search for λ: what it finds, how often it evaluates, and what it refuses."""

import pytest

from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.merging import search_scale


def test_a_grid_tries_both_bounds_and_prefers_the_smallest_magnitude() -> None:
    found = search_scale(lambda scale: 1.0 if scale in (-0.5, 0.25) else 0.0, (-1.0, 1.0), budget=9)
    assert (found.scale, found.score) == (0.25, 1.0)
    assert [scale for scale, _ in found.tried] == [-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_bounded_search_keeps_to_its_budget() -> None:
    calls: list[float] = []

    def score(scale: float) -> float:
        calls.append(scale)
        return -((scale - 0.37) ** 2)

    found = search_scale(score, method="bounded", budget=15)
    assert len(calls) <= 15 and len(found.tried) == len(set(calls))
    assert found.scale == pytest.approx(0.37, abs=2e-3)


def test_progress_counts_the_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    search_scale(lambda scale: scale, budget=3, progress=True)
    assert "3/3" in capsys.readouterr().err
    search_scale(lambda scale: scale, budget=3)
    assert capsys.readouterr().err == ""


def test_a_search_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(BadValueError, match="the smaller first"):
        search_scale(lambda scale: scale, (1.0, 0.0))
    with pytest.raises(BadValueError, match="at least 2 evaluations"):
        search_scale(lambda scale: scale, budget=1)
    with pytest.raises(MissingNameError, match=r"no search method 'gird'.*grid"):
        search_scale(lambda scale: scale, method="gird")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="score at λ=0 is not a number"):
        search_scale(lambda scale: float("nan"))
