"""Choosing the parameters of some layers, in every architecture."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import ARCHITECTURES, TinyModels

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.publishing.notation import evaluate_expression

DEEP = 6


def deep(count: int = DEEP) -> TaskVector:
    """A vector over some layers, an embedding and a head."""
    names = [f"model.layers.{number}.{part}.weight" for number in range(count) for part in ("attn", "mlp")]
    every = ["model.embed_tokens.weight", *names, "lm_head.weight"]
    return TaskVector.from_tensors({name: torch.ones(2) for name in every}, name="v")


def numbers_of(vector: TaskVector) -> list[int]:
    found = {int(match[1]) for name in vector if (match := re.search(r"layers\.(\d+)", name))}
    return sorted(found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_and_the_rest_make_the_whole(architecture: str, models: TinyModels) -> None:
    v = models.pair(architecture).vector()
    first, last = v.filter(layers=0), v.filter(layers=-1)
    assert len(first) > 4 and len(last) > 4
    # GPT-2, GPT-Neo and GPT-J say `h`, the others `layers`; expert numbers are no layers.
    assert all(re.search(r"(?:^|\.)(?:layers|h)\.0\.", name) for name in first)
    assert all(re.search(r"(?:^|\.)(?:layers|h)\.1\.", name) for name in last)
    rest = v.filter(exclude=[re.compile(r"(?:^|\.)(?:layers|h)\.\d")])
    assert len(rest) >= 2  # an embedding and the last norm, at least
    assert first + last + rest == v
    assert v.filter(layers=range(2)) == first + last
    assert v.filter(layers=[1], outside=True) == last + rest


@given(st.lists(st.integers(-DEEP, DEEP - 1), min_size=1, max_size=9), st.booleans())
def test_numbers_count_as_in_a_list(numbers: list[int], outside: bool) -> None:
    kept = deep().filter(layers=numbers, outside=outside)
    assert numbers_of(kept) == sorted({list(range(DEEP))[number] for number in numbers})
    assert ("lm_head.weight" in kept) == ("model.embed_tokens.weight" in kept) == outside


@given(st.integers(-DEEP, DEEP), st.integers(-DEEP, DEEP), st.sampled_from([1, 2, 3, -1]))
def test_ranges_are_those_of_python(start: int, stop: int, step: int) -> None:
    chosen = range(start, stop, step)
    valid = [number for number in chosen if -DEEP <= number < DEEP]
    if len(chosen) == 0 or len(valid) < len(chosen):
        with pytest.raises(BadValueError, match=r"chooses no layer|no layer 6"):
            deep().filter(layers=chosen)
    else:
        assert numbers_of(deep().filter(layers=chosen)) == sorted({number % DEEP for number in valid})


def test_the_expression_tells_the_layers_and_gives_them_again() -> None:
    v = deep()
    kept = v.filter(include="*.mlp.*", layers=range(-2, 0))
    assert kept.expression == "filter(v, include=['*.mlp.*'], layers=[4, 5])"
    assert list(kept) == ["model.layers.4.mlp.weight", "model.layers.5.mlp.weight"]
    both = -0.5 * v.filter(layers=np.int64(1), outside=True) + kept
    assert both.expression.startswith("-0.5*filter(v, layers=[1], outside=True) + ")
    again = evaluate_expression(both.expression, {"v": v})
    assert again == both and again.expression == both.expression
    assert v.filter(layers=range(DEEP), outside=True) == v


def test_the_end_is_the_last_layer_that_the_vector_changes() -> None:
    v = deep().filter(layers=range(4))
    assert numbers_of(v.filter(layers=-1)) == [3]
    gap = deep().filter(exclude="*.layers.2.*")
    assert numbers_of(gap.filter(layers=range(1, 4))) == [1, 3]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (6, "there is no layer 6. The vector has the layers 0 to 5"),
        (-7, "there is no layer -7"),
        (range(4, 10**15), "there is no layer 6"),
        (itertools.count(), "there is no layer 6"),
        (range(4, 4), r"chooses no layer. As in Python, range\(4, 8\) is from 4 to 7"),
        ([], "chooses no layer"),
        (True, "True is not"),
        ([1, 2.0], "2.0 is not"),
        (1.5, "must be a number or a range"),
        ("1", "must be a number or a range"),
        ({"a": 1}, "'a' is not"),
    ],
)
def test_what_is_no_layer_is_refused(layers: Any, said: str) -> None:
    with pytest.raises(BadValueError, match=said):
        deep().filter(layers=layers)


def test_layers_of_which_nothing_is_left_are_refused() -> None:
    v = deep()
    gap = v.filter(exclude="*.layers.2.*")
    with pytest.raises(BadValueError, match=r"nothing is left in the layers \[2\]"):
        gap.filter(layers=2)
    with pytest.raises(BadValueError, match=r"nothing is left in the layers \[0, 1\]"):
        v.filter(include="lm_head.weight", layers=range(2))
    assert list(v.filter(include="lm_head.weight", layers=0, outside=True)) == ["lm_head.weight"]
    with pytest.raises(BadValueError, match="The vector has no layer"):
        v.filter(include="lm_head.weight").filter(layers=0)
    for outside in (1, "yes", None):
        with pytest.raises(BadValueError, match=f"outside={outside!r} is an option of layers="):
            v.filter(layers=0, outside=outside)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="outside=True is an option of layers="):
        v.filter(outside=True)
    with pytest.raises(MissingNameError, match="matches none"):
        v.filter(include="*.moe.*", layers=0)
