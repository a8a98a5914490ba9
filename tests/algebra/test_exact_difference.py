"""The parts of a difference: machine code and torch give the same bits, and the change is their exact sum at any λ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_taskvec.algebra import exact_difference
from hf_taskvec.algebra.deltas import Dense, Difference
from hf_taskvec.algebra.exact_difference import exact_format, exact_parts
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sparse_tensors import BLOCK, INTEGERS, Sparse
from hf_taskvec.algebra.sums import Sum, Term

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAIRS = [(a, b) for a in DTYPES for b in DTYPES]
# What rounding, or a sign, goes wrong with: zeros, ties, subnormals, numbers far apart.
SPECIAL = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7, 2.0**-126, 2.0**-133, -(2.0**-134), 1e-40, 2.0**-149]
SPECIAL += [2.0**-14, 2.0**-24, -(2.0**-25), 3 * 2.0**-25, 2.0**-10, 30000.0, -30000.0, 256.0, 2.0**-7, 0.1, 3e-5]
numbers = st.sampled_from(SPECIAL) | st.floats(-3e4, 3e4) | st.floats(-1e-4, 1e-4)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def repeated(values: list[float], size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype).repeat(-(-size // len(values)))[:size]


def pair_of(size: int, tuned: torch.dtype, base: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A base and its fine-tune, such as there are."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(size, generator=generator) * 0.02).to(base)
    return (weights.float() + torch.randn(size, generator=generator) * 0.002).to(tuned), weights


def by_torch(tuned: torch.Tensor, base: torch.Tensor) -> tuple[exact_difference.Format, list[torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_difference, "can_compile", lambda: False)
        return exact_format(tuned, base, "w"), [part.read() for part in exact_parts(tuned, base, "w")]


@settings(max_examples=60)
@given(
    st.sampled_from(PAIRS), st.lists(numbers, min_size=1, max_size=13), st.lists(numbers, min_size=1, max_size=11)
)  # fmt: skip
def test_machine_code_gives_the_bits_of_torch(
    dtypes: tuple[torch.dtype, torch.dtype], tuned: list[float], base: list[float]
) -> None:
    a, b = (repeated(values, 2 * BLOCK + 5, dtype) for values, dtype in zip((tuned, base), dtypes, strict=True))
    form, parts = by_torch(a, b)
    assert exact_format(a, b, "w") == form
    found = [part.read() for part in exact_parts(a, b, "w")]
    assert [part.dtype for part in found] == [part.dtype for part in parts]
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, parts, strict=True))


@pytest.mark.parametrize(("tuned", "base"), PAIRS)
def test_a_fine_tune_gives_the_bits_of_torch(tuned: torch.dtype, base: torch.dtype) -> None:
    a, b = pair_of(2 * BLOCK + 77, tuned, base)
    form, parts = by_torch(a, b)
    assert exact_format(a, b, "w") == form
    found = [part.read() for part in exact_parts(a, b, "w")]
    assert found and all(torch.equal(bits(x), bits(y)) for x, y in zip(found, parts, strict=True))


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.3, -0.6180339887498949, 7.0, 1e-3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_give_the_bits_of_the_difference_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    tuned, base = pair_of(10 * BLOCK + 16, dtype, dtype)
    special = [each for each in SPECIAL if 0 < abs(each) < 300]
    tuned[:40], base[:40] = repeated(special, 40, dtype), repeated(special[1:], 40, dtype)
    parts = exact_parts(tuned, base, "w")
    assert isinstance(parts[1], Sparse)
    shape, target = tuple(base.shape), InMemory(base)
    live, kept = (
        Sum(shape, [Term(1.0, delta)], target, scale) for delta in (Difference(target, InMemory(tuned)), Dense(parts))
    )
    one, other = torch.empty_like(base), torch.empty_like(base)
    live.into(one, "w")
    kept.into(other, "w")
    # Where `2 * base - tuned` cancels, zero has a sign of its own in either: adding zero takes it away.
    assert torch.equal(bits(one + 0.0), bits(other + 0.0))
    assert scale != 1.0 or torch.equal(bits(other), bits(tuned))


def test_each_part_is_sparse_where_that_is_smaller() -> None:
    tuned, base = pair_of(3 * BLOCK, torch.bfloat16, torch.bfloat16)
    form = exact_format(tuned, base, "w")
    assert (form.parts, form.is_sparse(0), form.is_sparse(1)) == (2, False, True)
    few = base.clone()
    few[::100] = tuned[::100]
    form = exact_format(few, base, "w")
    assert (form.parts, form.is_sparse(0), form.is_sparse(1)) == (2, True, True)
    far = exact_format(tuned * 64, base, "w")
    assert (far.parts, far.is_sparse(0), far.is_sparse(1)) == (2, False, False)
    small = exact_format(tuned[:300], base[:300], "w")
    assert not small.is_sparse(0) and not small.is_sparse(1)  # three tensors are described by more bytes than one


def test_what_the_dtype_cannot_hold_takes_a_wider_one() -> None:
    base = torch.full((BLOCK,), -60000.0, dtype=torch.float16)
    form = exact_format(-base, base, "w")
    assert (form.dtype, form.parts) == (torch.float32, 1)
    assert torch.equal(exact_parts(-base, base, "w")[0].read(), torch.full((BLOCK,), 120000.0))


def test_a_whole_number_of_blocks_with_nan_is_refused_by_name() -> None:
    tuned, base = pair_of(BLOCK, torch.bfloat16, torch.bfloat16)
    tuned[BLOCK // 2] = torch.nan
    with pytest.raises(ValueError, match=r"fc\.weight.*NaN"):
        exact_format(tuned, base, "fc.weight")
