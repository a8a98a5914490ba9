"""A vector weighed by importances, against the plain formula in fp64, and with importances of a real model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_vectors import LARGE, assert_close, some_adapters, some_vectors
from support.tiny_models import DENSE, DTYPES, added, make, tensors, tuned_copy
from support.token_rows import rows

from hf_taskvec import TaskVector, combine, rules
from hf_taskvec.analysis import gradient_importance
from hf_taskvec.analysis.gradients import ImportanceMeasure
from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.publishing.notation import evaluate_expression

MATRIX = "model.layers.0.mlp.fc1.weight"


def plain(v: torch.Tensor, f: torch.Tensor, k: torch.Tensor, power: float = 1.0) -> torch.Tensor:
    """v f^p / (f^p + k^p), element by element in Python's own numbers, and 0 where both are 0."""

    def share(f: float, k: float) -> float:
        return 0.0 if f == 0.0 else f**power / (f**power + k**power)

    pairs = zip(f.double().flatten().tolist(), k.double().flatten().tolist(), strict=True)
    return v.double() * torch.tensor([share(*pair) for pair in pairs], dtype=torch.float64).view(v.shape)


def vector(tensor: torch.Tensor, name: str) -> TaskVector:
    return TaskVector.from_tensors({"w": tensor}, name=name)


@settings(max_examples=100)
@given(
    st.sampled_from([(), (0,), (4, 0), (9,), (6, 5), (2, 3, 4)]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    st.sampled_from([0.25, 1.0, 2, 3.5]),
    st.sampled_from([None, [1.0, 1.0, 1.0], [-0.5, 2.0, 0.25], [3.0, 1.0, 0.0], [1.0, 0.0, 1.0]]),
    st.integers(0, 10_000),
)
def test_it_is_the_plain_formula(
    shape: tuple[int, ...], dtype: torch.dtype, power: float, weights: list[float] | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(shape, generator=generator).to(dtype)
    # A third of the importances is 0, and the others are of very different sizes.
    f, k = (
        (torch.randint(0, 3, shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)).to(dtype)
        for _ in range(2)
    )
    merged = combine([vector(v, "v"), vector(f, "f"), vector(k, "k")], "importance", weights, power=power)
    scale, more, less = weights or [1.0, 1.0, 1.0]
    expected = scale * plain(v, more * f.double(), less * k.double(), power)
    found = merged.dense("w", "float64") if "w" in merged else torch.zeros(shape, dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-45)


def test_parameters_of_many_tiles_and_low_rank_vectors() -> None:
    v, f, k = some_vectors(shape=LARGE)
    sizes = [
        TaskVector.from_tensors({n: each.dense(n).abs() for n in each}, name=f"i{i}") for i, each in enumerate((f, k))
    ]
    merged = combine([v, *sizes], "importance")
    shares = {n: f.dense(n, "float64").abs() for n in v}
    shares = {n: each / (each + k.dense(n, "float64").abs()) for n, each in shares.items()}
    assert_close(merged, {n: v.dense(n, "float64") * shares[n] for n in v})
    adapter, other, another = some_adapters()
    sizes = [TaskVector.from_tensors({n: each.dense(n).abs() for n in each}, name="i") for each in (other, another)]
    weighed = combine([adapter, *sizes], "importance", power=2)
    assert_close(weighed, {n: plain(adapter.dense(n, "float64"), *(i.dense(n) for i in sizes), 2) for n in adapter})


def test_extreme_importances_give_shares_of_0_and_1() -> None:
    """Nothing overflows on the way: neither squares of what is tiny nor quotients of what is far apart."""
    f = torch.tensor([1e-300, 1e300, 1e-300, 1e300, 5e-324, 1e-200], dtype=torch.float64)
    k = torch.tensor([1e300, 1e-300, 1e-300, 1e300, 0.0, 3e-200], dtype=torch.float64)
    v = torch.ones(6, dtype=torch.float64)
    for power, last in ((1.0, 0.25), (2.0, 0.1), (50.0, 0.0)):
        found = combine([vector(v, "v"), vector(f, "f"), vector(k, "k")], "importance", power=power).dense("w")
        assert found[:5].tolist() == [0.0, 1.0, 0.5, 0.5, 1.0]
        assert found[5].item() == pytest.approx(last, rel=1e-6, abs=1e-20)


def test_what_matters_for_nothing_is_not_changed() -> None:
    v, zero = vector(torch.ones(3), "v"), vector(torch.zeros(3), "zero")
    f = vector(torch.tensor([0.0, 1.0, 2.0]), "f")
    assert combine([v, zero, zero], "importance").norm() == 0.0
    assert combine([v, f, zero], "importance").dense("w").tolist() == [0.0, 1.0, 1.0]
    assert combine([v, zero, f], "importance").norm() == 0.0
    assert combine([v, f, f], "importance", power=9).dense("w").tolist() == [0.0, 0.5, 0.5]
    assert len(combine([v, f, zero], "importance", [1.0, 0.0, 1.0])) == 0
    assert combine([v, f, f], "importance", [1.0, 1.0, 0.0]).dense("w").tolist() == [0.0, 1.0, 1.0]


def test_only_what_the_vector_changes_is_changed() -> None:
    one = torch.ones(2)
    v = TaskVector.from_tensors({"x": one}, name="v")
    every = TaskVector.from_tensors({"x": one, "y": one}, name="i")
    assert list(combine([v, every, every], "importance")) == ["x"]
    for importances, place in (([v, every], "the second vector, for"), ([every, v], "the third, for")):
        with pytest.raises(BadValueError, match=rf"y: {place} .* has no importance for it.*filter\(exclude="):
            combine([every, *importances], "importance")
    assert set(combine([every, every, v], "importance", [1.0, 1.0, 0.0])) == {"x", "y"}


def test_the_expression_tells_how_it_was_made() -> None:
    v, f, k = (vector(torch.ones(2), name) for name in ("v", "forget", "keep"))
    edit = -1.2 * combine([v, f, 2 * k], "importance", power=2)
    assert edit.expression == "-1.2*combine([v, forget, 2*keep], 'importance', power=2)"
    assert evaluate_expression(edit.expression, {"v": v, "forget": f, "keep": k}) == edit
    assert edit.provenance.rules == (("importance", "https://arxiv.org/abs/2601.22030"),)
    assert str(rules()["importance"]).startswith("importance(power=1.0): The first vector, each element times f / (f +")
    # A weight and a factor say the same.
    weighed = combine([v, f, k], "importance", [-1.2, 1.0, 2.0], power=2)
    assert torch.allclose(weighed.dense("w"), edit.dense("w"))


# With a model.


@pytest.mark.parametrize("architecture", DENSE)
def test_importances_of_a_model_weigh_its_vectors(architecture: str) -> None:
    """All names are found: tied weights, GPT-2's transposed ones, GPT-NeoX's head of another name on disk."""
    base = make(architecture)
    v = TaskVector.from_finetuned(base, tuned_copy(base))
    forget, keep = (gradient_importance(base, rows(seed), name=name) for seed, name in ((0, "forget"), (1, "keep")))
    weighed = combine([v, forget, keep], "importance")
    assert set(weighed) == set(v)
    for name in v:
        expected = plain(v.dense(name), forget.dense(name), keep.dense(name))
        assert torch.allclose(weighed.dense(name, "float64"), expected, rtol=1e-6, atol=1e-12), name


@pytest.mark.parametrize("measure", ["absolute", "squared"])
@pytest.mark.parametrize("seed", range(4))
def test_kept_text_suffers_less_by_the_same_forgetting(measure: ImportanceMeasure, seed: int) -> None:
    """To first order: the length of the kept text's gradient that an edit meets, for each step of forgetting."""
    model = make("phi", seed=seed).double()
    forgotten, kept = rows(seed), rows(seed + 10)
    v = TaskVector.from_gradient(model, forgotten, 1.0)
    sizes = [
        gradient_importance(model, data, measure=measure, name=f"i{n}") for n, data in enumerate((forgotten, kept))
    ]
    cost = []
    for edit in (v, *(combine([v, *sizes], "importance", power=power) for power in (0.5, 1, 2))):
        met = sum((edit.dense(n, "float64").abs() * sizes[1].dense(n, "float64")).sum().item() for n in edit)
        cost.append(met / edit.dot(v))
    assert cost == sorted(cost, reverse=True) and cost[-1] < 0.9 * cost[0], cost


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_streamed_live_and_saved_on_its_own_base(dtype: torch.dtype, tmp_path: Path) -> None:
    base = make("gpt2", dtype)
    base.save_pretrained(tmp_path / "base")
    tuned = tuned_copy(base)
    tuned.save_pretrained(tmp_path / "tuned")
    v = TaskVector.from_finetuned(tmp_path / "base", tmp_path / "tuned")
    # Measured at the fine-tune, which does not become a second base of the edit.
    importances = [gradient_importance(tuned, rows(seed), measure="squared", name=f"i{seed}") for seed in (0, 1)]
    edit = -0.7 * combine([v, *importances], "importance", power=0.5)
    edit.apply(tmp_path / "base", tmp_path / "out", threads=2, strict_base=True)
    loaded = TaskVector.load(edit.save(tmp_path / "vector"))
    streamed = tensors(tmp_path / "out")
    with edit.applied_to(base):
        live = {name: value.clone() for name, value in base.state_dict().items()}
    for name, source in tensors(tmp_path / "base").items():
        assert torch.equal(streamed[name].read(), added(loaded, name, source)), name
        assert torch.equal(streamed[name].read(), live[name]), name
    assert loaded.provenance == edit.provenance and loaded.norm() > 0


# Bad input.


@pytest.mark.parametrize("power", [0, -1, 0.0, math.nan, math.inf, "2", True, None, [1.0]])
def test_powers_that_make_no_sense_are_refused(power: Any) -> None:
    one = [vector(torch.ones(2), name) for name in "abc"]
    with pytest.raises(BadValueError, match=r"power=.* must be (above 0|a finite number)"):
        combine(one, "importance", power=power)


def test_what_makes_no_sense_is_refused() -> None:
    a, b, c, d = (vector(torch.ones(2), name) for name in "abcd")
    with pytest.raises(BadValueError, match="takes three vectors, not 4: a task vector, the importance"):
        combine([a, b, c, d], "importance")
    with pytest.raises(BadValueError, match="at least 3 vectors, and there are 2"):
        combine([a, b], "importance")
    for weights in ([1.0, -1.0, 1.0], [-1.0, 1.0, -0.5]):
        with pytest.raises(BadValueError, match="that of an importance must not be negative"):
            combine([a, b, c], "importance", weights)
    with pytest.raises(MissingNameError, match=r"no option 'powr'. Did you mean 'power'\?"):
        combine([a, b, c], "importance", powr=2)


@pytest.mark.parametrize("place", [1, 2])
def test_negative_importances_are_refused_by_name(place: int) -> None:
    """A task vector in an importance's place, when it is read; also where the other importance is 0."""
    bad = vector(torch.tensor([0.0, 3.0, -1e-30]), "bad")
    three = [vector(torch.tensor([1.0, 1.0, 0.0]), "v"), *(vector(torch.zeros(3), name) for name in "fk")]
    three[place] = bad
    merged = combine(three, "importance")
    with pytest.raises(BadValueError, match=r"w: bad has an importance of -1e-30. Importances are 0 or more"):
        merged.dense("w")
    three[place] = -1 * vector(torch.ones(3), "i")
    with pytest.raises(BadValueError, match=r"w: -i has an importance of -1\."):
        combine(three, "importance").norm()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_name(place: int, value: float) -> None:
    three = [vector(torch.zeros(3), name) for name in "vfk"]
    three[place] = vector(torch.tensor([0.0, value, 1.0]), "bad")
    with pytest.raises(BadValueError, match="w: the weights contain NaN"):
        combine(three, "importance").dense("w")
