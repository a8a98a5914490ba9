"""How good a recommended λ was, by what the sweep measured."""

import copy
import dataclasses

import pytest
from support.tiny_books import make_books, make_tokenizer, tiny_llama, train

from hf_taskvec import TaskVector
from hf_taskvec.analysis import recommend_scales
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation import protocols, sweep


@pytest.fixture(scope="module")
def report():
    """A sweep over the grid with the recommended λ among it: made-up books, a tiny model, a real vector."""
    tokenizer, books = make_tokenizer(), make_books()
    base = tiny_llama()
    joint = train(copy.deepcopy(base), tokenizer, books, 150)
    vector = TaskVector.from_finetuned(base, train(copy.deepcopy(base), tokenizer, books[:1], 100))
    protocol = protocols.get(prompt_length=14, answer_length=8, samples=12)
    with vector.edit(joint, 0.0) as edit:
        grid = recommend_scales(0.0).scales_with([0, -0.4])
        return sweep(joint, edit, grid, books, protocol, tokenizer=tokenizer, resamples=100, permutations=100)


def test_a_recommendation_is_judged_by_the_sweep(report) -> None:
    found = report.judge(recommend_scales(0.0).sweep_scale)
    at = {c.scale: c for c in report.choice.candidates}
    assert (
        recommend_scales(0.0).sweep_scale == -1.0 and f"of their {report.choice.criteria.headline}, " in found.sentence
    )
    chosen = report.choice.scale
    expected = "; the sweep chose none." if chosen is None else f"; the sweep chose λ={chosen:.3g}."
    assert found.sentence.endswith("; it is the λ that the sweep chose." if chosen == -1.0 else expected)
    assert found.forget_loss == pytest.approx(1 - at[-1.0].forget / at[0.0].forget)
    assert found.worst_retain_loss == at[-1.0].worst_retain and found.qualifies == at[-1.0].qualifies
    assert f"{found.forget_loss:.0%}" in found.sentence and "λ=-1" in str(found)
    assert str(found).startswith("Theory recommended λ=-1: on the half of the passages that chooses λ,")


def test_one_half_of_the_passages_decides_all_of_it(report) -> None:
    """Another λ that, on the half that chooses, forgets as much and keeps more, beats it, whatever all passages say."""
    at = {c.scale: c for c in report.choice.candidates}
    better = dataclasses.replace(at[-0.4], forget=at[-1.0].forget, worst_retain=at[-1.0].worst_retain - 0.1)
    worse = dataclasses.replace(at[-0.4], forget=at[0.0].forget, worst_retain=at[-1.0].worst_retain + 0.1)
    start = dataclasses.replace(at[0.0], worst_retain=at[-1.0].worst_retain)
    assert at[-1.0].forget < at[0.0].forget
    for other, beaten in ((better, True), (worse, False)):
        choice = dataclasses.replace(
            report.choice,
            scale=None,
            candidates=(start, other, at[-1.0]),
            pareto=(-1.0,) if beaten else (),  # of all passages: not looked at
        )
        found = dataclasses.replace(report, choice=choice).judge(recommend_scales(0.0).sweep_scale)
        assert found.on_pareto_front != beaten
        assert ("another λ forgets as much and keeps more" in str(found)) == beaten


def test_a_scale_that_was_not_evaluated_is_not_judged(report) -> None:
    with pytest.raises(BadValueError, match="scales_with"):
        report.judge(recommend_scales(-0.5).sweep_scale)
    with pytest.raises(BadValueError, match="recommends no λ"):
        report.judge(recommend_scales(1.0).sweep_scale)
    with pytest.raises(BadValueError, match="chose no λ"):
        dataclasses.replace(report, choice=None).judge(recommend_scales(0.0).sweep_scale)
