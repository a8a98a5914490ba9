"""Machine code gives the bits of the torch path, whatever is summed, and there is no need for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_taskvec.algebra.deltas import Dense, Difference, LowRank, Rows
from hf_taskvec.algebra.formulas import Formula, sum_formula
from hf_taskvec.algebra.rounding import round_once
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.errors import BadValueError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# What rounding, or a sign, goes wrong with.
SPECIAL = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-8 + 2**-40, -(1 + 3 * 2**-8), 2.0**-126, 2.0**-133, -(2.0**-134), 1e-40]
SPECIAL += [2.0**-14, 2.0**-24, -(2.0**-25), 3 * 2.0**-25, 65504.0, 65519.0, 1e4, -3e38, 0.1]
numbers = st.sampled_from(SPECIAL) | st.floats(-1e4, 1e4) | st.floats(-1e-4, 1e-4)
weights = st.sampled_from([1.0, -1.0, 2.0, -2.0, 3.0, -0.6, 0.2, 0.7, 1e-3, -1.75])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def both(whole: Sum, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole sum by machine code, and by torch."""
    found = []
    for fused in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not fused:
                patch.setattr(Formula, "_code", lambda *_: None)
            if dtype == torch.float64:
                found.append(whole.rows(0, whole.shape[0]))
            else:
                out = torch.empty(whole.shape, dtype=dtype)
                whole.into(out, "w")
                found.append(out)
    return found[0], found[1]


@st.composite
def expressions(draw: st.DrawFn) -> tuple[list[Term], InMemory | None]:
    """A few changes of all stored kinds, over tensors some of which are shared."""
    length = draw(st.sampled_from([1, 16, 21]))

    def source() -> InMemory:
        values = torch.tensor(draw(st.lists(numbers, min_size=length, max_size=length)), dtype=torch.float64)
        stored = values.to(draw(st.sampled_from(DTYPES)))
        return InMemory(torch.where(stored.isfinite(), stored, torch.zeros_like(stored)))

    pool = [source() for _ in range(4)]
    one = st.sampled_from(pool)
    kinds = st.sampled_from(["difference", "dense", "parts", "rows"])
    terms = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(kinds)
        if kind == "dense":
            delta = Dense((draw(one),))
        elif kind == "parts":
            delta = Dense((draw(one), draw(one)))
        else:
            delta = Difference(draw(one), draw(one))
        terms.append(Term(draw(weights), Rows(range(length), delta, length) if kind == "rows" else delta))
    return terms, draw(st.none() | one)


@given(expressions(), st.sampled_from(DTYPES))
def test_every_sum_has_the_bits_of_torch(expression: tuple[list[Term], InMemory | None], dtype: torch.dtype) -> None:
    terms, target = expression
    shape = (terms[0].delta.shape if terms else target.shape) if terms or target else (3,)
    try:
        fused, plain = both(Sum(shape, terms, target), dtype)
    except BadValueError:  # too large for the dtype
        return
    assert torch.equal(bits(fused), bits(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_comes_through(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    whole = Sum(tuple(finite.shape), [Term(1.0, Dense((InMemory(finite),)))])
    for out in (dtype, torch.float32, torch.float64):
        fused, _ = both(whole, out)
        assert torch.equal(bits(fused.to(dtype)), bits(finite))
    out = torch.empty_like(every)
    assert not sum_formula([(1.0, every)]).write(out, 0, len(every))  # some are not finite, and it says so


@pytest.mark.parametrize("length", [1, 5, 6, 1023, 5000])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_the_last_elements_are_as_right_as_all_others(length: int, dtype: torch.dtype) -> None:
    base, tuned, other = (torch.randn(length, 3).to(dtype) for _ in range(3))
    fused, plain = both(
        Sum((length, 3), [Term(-0.6, Difference(InMemory(base), InMemory(tuned)))], InMemory(other)), dtype
    )
    assert torch.equal(bits(fused), bits(plain))


@pytest.mark.parametrize("dtype", DTYPES)
def test_machine_code_is_what_runs(dtype: torch.dtype) -> None:
    tensors = [torch.randn(40).to(dtype) for _ in range(3)]
    whole = sum_formula([(1.0, tensors[0])], [(-0.6, [(-1.0, tensors[1]), (1.0, tensors[2])])])
    out = torch.full((40,), 7, dtype=dtype)
    assert whole.write(out, 0, 40)
    assert torch.equal(out, round_once(whole.rows(0, 40), dtype))


def test_rows_that_do_not_lie_one_after_the_other_are_read_right() -> None:
    wide = torch.randn(40, 64).bfloat16()
    across, every_other = wide.T, torch.randn(64, 80)[:, ::2]
    buffer = torch.zeros(64 * 40 * 4 + 8, dtype=torch.uint8)
    buffer[2 : 2 + 64 * 40 * 4] = torch.randn(64, 40).view(torch.uint8).flatten()
    askew = torch.frombuffer(bytearray(buffer.numpy().tobytes()), dtype=torch.float32, count=64 * 40, offset=2)
    sources = [InMemory(across), InMemory(every_other), InMemory(askew.view(64, 40))]
    for one in sources:
        for other in sources:
            fused, plain = both(Sum((64, 40), [Term(0.3, Difference(one, other))], one), torch.bfloat16)
            assert torch.equal(bits(fused), bits(plain))


@pytest.mark.parametrize("rank", [1, 32, 40])
def test_products_of_factors_are_added_before_the_rounding(rank: int) -> None:
    left, right, base = torch.randn(70, rank), torch.randn(rank, 90) / 50, torch.randn(70, 90).bfloat16()
    term = Term(-0.7, LowRank(InMemory(left), InMemory(right), 0.5))
    fused, plain = both(Sum((70, 90), [term], InMemory(base)), torch.bfloat16)
    assert torch.equal(bits(fused), bits(plain))
    exact = base.double() - 0.35 * left.double() @ right.double()
    assert (fused.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_the_order_of_operations_is_as_documented() -> None:
    """`a - 0.7 b + 0.2 c`: exact differences, times their weights, from the left; then what is whole; in fp64."""
    torch.manual_seed(0)
    target, base, *tuned = (torch.randn(200, 50).bfloat16() for _ in range(5))
    one, two, three = (t.double() - base.double() for t in tuned)
    decimal = (1.5 * one + -0.7 * two) + 0.2 * three
    for first, wanted in (
        (1.5, decimal + target.double()),
        (1.0, (-0.7 * two + 0.2 * three) + (target.double() + one)),
    ):
        weights = zip((first, -0.7, 0.2), tuned, strict=True)
        terms = [Term(w, Difference(InMemory(base), InMemory(t))) for w, t in weights]
        fused, _ = both(Sum((200, 50), terms, InMemory(target)), torch.bfloat16)
        assert torch.equal(bits(fused), bits(round_once(wanted, torch.bfloat16)))


WITHOUT = """
import sys, warnings
sys.modules["llvmlite"] = None
import torch
from hf_taskvec import TaskVector
torch.manual_seed(1)
base, tuned = torch.randn(300, 300).bfloat16(), torch.randn(300, 300).bfloat16()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        found = (-0.6 * TaskVector.from_tensors({"w": tuned - base})).dense("w", "bfloat16")
print(sum("llvmlite cannot be used" in str(each.message) for each in told), found.view(torch.int16).sum().item())
"""


def test_without_llvmlite_the_bits_are_the_same_and_one_line_says_so() -> None:
    with_it = WITHOUT.replace('sys.modules["llvmlite"] = None', "")
    told, plain = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for code in (WITHOUT, with_it)
    )
    assert (told[0], plain[0]) == ("1", "0")
    assert told[1] == plain[1]


def test_small_tensors_do_not_wait_for_the_compiler() -> None:
    code = (
        "import sys, torch; from hf_taskvec import TaskVector;"
        "TaskVector.from_tensors({'w': torch.ones(9)}).dense('w'); print('llvmlite' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_what_is_too_large_is_refused_by_name() -> None:
    large = torch.full((4, 4), 60000.0, dtype=torch.float16)
    with pytest.raises(BadValueError, match=r"w: the result .* is too large for float16"):
        Sum((4, 4), [Term(2.0, Dense((InMemory(large),)))]).into(torch.empty_like(large), "w")
