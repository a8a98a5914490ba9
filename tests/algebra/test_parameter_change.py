"""What `vector["name"]` gives: a small readable object, not a tensor and not a tuple."""

import pytest
import torch
from support.kinds_of_change import KINDS, SHAPE

from hf_taskvec import TaskVector
from hf_taskvec.algebra.sums import Term


@pytest.mark.parametrize("kind", KINDS)
def test_it_tells_shape_rank_norm_and_value(kind: str) -> None:
    delta, dense = KINDS[kind](torch.Generator().manual_seed(1))
    change = TaskVector({"w": [Term(-0.5, delta)]})["w"]
    assert (change.name, change.shape) == ("w", SHAPE)
    assert change.rank == delta.rank and change.is_low_rank == ("low rank" in kind)
    assert change.norm == pytest.approx(0.5 * dense.norm().item(), rel=1e-12)
    torch.testing.assert_close(change.dense("float64"), -0.5 * dense, rtol=1e-12, atol=1e-12)


def test_the_rank_of_a_sum_is_at_most_the_smaller_side() -> None:
    torch.manual_seed(0)
    vector = TaskVector.from_tensors({"w": (torch.randn(6, 4), torch.randn(4, 5))})
    other = TaskVector.from_tensors({"w": (torch.randn(6, 4), torch.randn(4, 5))})
    assert vector["w"].rank == 4 and (vector + other)["w"].rank == 5
    assert TaskVector.from_tensors({"b": torch.ones(3)})["b"].rank == 1


def test_it_is_equal_to_the_same_change_alone() -> None:
    vector = TaskVector.from_tensors({"w": torch.ones(2, 2)})
    assert vector["w"] == vector["w"] and vector["w"] != (2 * vector)["w"]
    assert len({vector["w"], vector["w"]}) == 1


def test_reading_a_text_of_it_reads_no_tensor() -> None:
    vector = TaskVector.from_tensors({"w": (torch.ones(4, 1), torch.full((1, 3), float("nan")))})
    assert repr(vector["w"]) == "ParameterChange('w', shape=[4, 3], rank=1, low-rank)"


def test_a_notebook_shows_the_expression_and_the_parameters_escaped() -> None:
    tensors = {f"layer.{number}.<w>": torch.ones(2, 3) for number in range(9)}
    shown = (-0.5 * TaskVector.from_tensors(tensors, name="hp1"))._repr_html_()
    assert "-0.5*hp1" in shown and "layer.0.&lt;w&gt;" in shown and "2 × 3" in shown
    assert "<w>" not in shown and "1 more" in shown
    assert "0 parameters" in TaskVector({})._repr_html_()
