"""A sparse tensor is the tensor that it stands for, whichever rows are asked for; nonsense is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra import sparse_tensors
from hf_taskvec.algebra.deltas import Dense
from hf_taskvec.algebra.sources import InMemory, RowsOf, Transposed, rows_of
from hf_taskvec.algebra.sparse_tensors import BLOCK, INTEGERS, Sparse, collect
from hf_taskvec.algebra.sums import Sum, Term

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(1,), (7, 3), (3, 5, 2), (2, BLOCK), (3, BLOCK // 2 + 1), (BLOCK + 1,), (700, 200)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def some_tensor(shape: tuple[int, ...], dtype: torch.dtype, share: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    chosen = torch.rand(shape, generator=generator)
    values[chosen < share / 4] = -0.0
    values[chosen > share] = 0.0
    return values


def sparse_of(tensor: torch.Tensor) -> Sparse:
    """By the definition: one block after the other, all numbers by torch."""
    blocks = tensor.reshape(-1).split(BLOCK)
    places = [bits(block).nonzero().flatten() for block in blocks]
    counts = torch.tensor([len(each) for each in places], dtype=torch.int32)
    values = torch.cat([block[each] for block, each in zip(blocks, places, strict=True)])
    offsets = torch.cat(places).to(torch.uint16)
    return Sparse(tuple(tensor.shape), InMemory(counts), InMemory(offsets), InMemory(values), "w")


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from([0.0, 0.03, 0.5, 1.0]), st.data())
def test_any_rows_are_those_of_the_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, share: float, data: st.DataObject
) -> None:
    tensor = some_tensor(shape, dtype, share, data.draw(st.integers(0, 100)))
    source = sparse_of(tensor)
    ends = sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=4)))
    for fast in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not fast:
                patch.setattr(sparse_tensors, "can_compile", lambda: False)
            assert torch.equal(bits(source.read()), bits(tensor))
            for start, stop in pairwise(ends):
                assert torch.equal(bits(source.readable().rows(start, stop)), bits(tensor[start:stop]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1000, BLOCK, 2 * BLOCK + 1000])
def test_what_is_collected_is_what_has_bits(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for share in (0.0, 0.05, 1.0):
        block = some_tensor((size,), dtype, share, 0)
        expected = bits(block).nonzero().flatten()
        for _ in range(2):
            offsets, values = torch.empty(size, dtype=torch.uint16), torch.empty(size, dtype=dtype)
            count = collect(block, offsets, values)
            assert offsets[:count].tolist() == (expected % BLOCK).tolist()
            assert torch.equal(bits(values[:count]), bits(block[expected]))
            monkeypatch.setattr(sparse_tensors, "can_compile", lambda: False)
        monkeypatch.undo()


def test_views_of_it_are_views_of_the_tensor() -> None:
    tensor = some_tensor((700, 200), torch.bfloat16, 0.1, 1)
    source = sparse_of(tensor)
    assert torch.equal(Transposed(source).read(), tensor.t())
    for index in (range(100, 500), (650, 3, 4)):
        rows = tensor[list(index)]
        view = RowsOf(source, index)
        assert torch.equal(view.read(), rows)
        assert torch.equal(rows_of(view.readable(), 1, 3), rows[1:3])
    assert source.roots == (source.counts, source.offsets, source.values)
    assert source.nbytes < tensor.nbytes / 4


def test_several_in_one_sum_have_memory_of_their_own() -> None:
    tensors = [some_tensor((600, 1000), torch.bfloat16, 0.1, seed) for seed in range(4)]
    dense, sparse = (
        Sum((600, 1000), [Term(weight, Dense((made(a), made(b)))) for weight, (a, b) in weighted], made(tensors[3]))
        for made in (InMemory, sparse_of)
        for weighted in [[(0.3, tensors[:2]), (-2.0, tensors[1:3])]]
    )
    for start, stop in dense.tiles():
        assert torch.equal(sparse.rows(start, stop), dense.rows(start, stop))
        found = sparse.rounded(start, stop, torch.bfloat16, "w").clone()
        assert torch.equal(found, dense.rounded(start, stop, torch.bfloat16, "w"))


def test_measures_and_pruning_see_the_same_numbers() -> None:
    tensor, low = (
        some_tensor((300, 400), torch.float32, 0.2, 5),
        some_tensor((300, 400), torch.float32, 0.01, 6) * 2**-24,
    )
    one, other = (
        TaskVector({"layers.0.mlp.fc1.weight": [Term(0.7, Dense((made(tensor), made(low))))]})
        for made in (InMemory, sparse_of)
    )
    assert one.norm() == other.norm()
    assert one.dot(other) == one.dot(one)
    name = "layers.0.mlp.fc1.weight"
    assert torch.equal(one.prune_rows(0.25).dense(name), other.prune_rows(0.25).dense(name))


SIZE = (3, BLOCK)


def made(**changed: Any) -> Sparse:
    """Two positions in the first block, none in the second, three in the last one."""
    given = {"counts": [2, 0, 3], "offsets": [5, 65535, 0, 1, 7], "values": [1.0] * 5, "size": SIZE, **changed}
    counts, offsets = torch.tensor(given["counts"]), torch.tensor(given["offsets"])
    sources = (counts.to(torch.int32), offsets.to(torch.uint16), torch.tensor(given["values"]))
    return Sparse(given["size"], *map(InMemory, sources), "fc.weight")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"counts": [2, 0, 2]}, "counts do not add up to the 5 elements"),
        ({"counts": [6, -4, 3]}, "counts do not add up"),
        ({"counts": [2**31 - 1, 2**31 - 1, 7]}, "counts do not add up"),
        ({"counts": [3, 0, 2]}, "positions in block 0 are not in order"),
        ({"offsets": [5, 5, 0, 1, 7]}, "block 0 are not in order, or not each there once"),
        ({"offsets": [5, 6, 1, 0, 7]}, "block 2 are not in order"),
        ({"size": (2 * BLOCK + 7,)}, "a position in block 2 is beyond its 131079 elements"),
    ],
)
def test_positions_that_contradict_themselves_are_refused_by_name(changed: dict[str, Any], why: str) -> None:
    assert made().read().sum() == 5
    source = made(**changed)
    for _ in range(2):
        with pytest.raises(TaskVectorError, match=rf"fc\.weight is damaged: .*{why}.*save the vector again"):
            source.readable()


@pytest.mark.parametrize(
    "changed",
    [
        {"counts": [5]},
        {"offsets": [1]},
        {"values": [1] * 5},
        {"values": [[1.0]] * 5},
        {"size": ()},
        {"size": (3, 2 * BLOCK)},
        {"size": (-3, -BLOCK)},
        {"size": (*SIZE, *[1] * 100)},
    ],
)
def test_tensors_that_do_not_fit_are_refused_at_once(changed: dict[str, Any]) -> None:
    with pytest.raises(TaskVectorError, match=r"fc\.weight: counts, offsets and values are .* do not make a tensor"):
        made(**changed)
