"""Expressions over elements: torch and machine code agree in every bit, whatever the expression."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_taskvec.algebra.computed_deltas import Tiles
from hf_taskvec.algebra.deltas import Dense, Difference, LowRank
from hf_taskvec.algebra.elementwise import Element, evaluate, factor, stored
from hf_taskvec.algebra.formulas import MOST_PRODUCTS, Formula, FormulaBuilder
from hf_taskvec.algebra.machine_code import MachineCode, compiled, machine_code, rounds_to_bfloat
from hf_taskvec.algebra.measures import gram
from hf_taskvec.algebra.rounding import round_once
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Term

COUNT, INPUTS, FACTORS = 37, 3, (0.3, -2.0, 0.0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PRECISIONS = (torch.float32, torch.float64)
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
# Subnormal numbers, signed zeros, ties, what overflows when it is multiplied, infinities and NaN.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 2.0**-126, 1 + 2**-23, 3e38, -3e38, 0.1, float("inf"), float("nan")]


@st.composite
def elements(draw: st.DrawFn, precision: torch.dtype, depth: int = 4) -> Element:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        if draw(st.booleans()):
            return stored(draw(st.integers(0, INPUTS - 1)), precision)
        return factor(draw(st.integers(0, len(FACTORS) - 1)), precision)
    one = draw(elements(precision, depth - 1))
    match draw(st.sampled_from(["add", "subtract", "multiply", "divide", "magnitude", "choose", "single"])):
        case "magnitude":
            return abs(one)
        case "single" if precision == torch.float32:
            other = draw(elements(torch.float64, depth - 1))
            return other.single()
        case "choose":
            other, yes, no = (draw(elements(precision, depth - 1)) for _ in range(3))
            return (one > other).choose(yes, no)
        case "add":
            return one + draw(elements(precision, depth - 1))
        case "subtract":
            return one - draw(elements(precision, depth - 1))
        case "divide":
            return one / draw(elements(precision, depth - 1))
        case _:
            return one * draw(elements(precision, depth - 1))


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@given(st.data())
def test_machine_code_does_what_torch_does(precision: torch.dtype, data: st.DataObject) -> None:
    element = data.draw(elements(precision))
    numbers = st.lists(st.sampled_from(SPECIAL) | st.floats(-4, 4, width=32), min_size=COUNT, max_size=COUNT)
    inputs = [torch.tensor(data.draw(numbers), dtype=torch.float32) for _ in range(INPUTS)]
    out = torch.empty(COUNT, dtype=precision)
    machine_code((element,), (torch.float32,) * INPUTS, precision)(COUNT, inputs, FACTORS, out)
    wanted = evaluate(element, inputs, FACTORS).expand(COUNT)
    known = ~wanted.isnan()  # a NaN has many bits
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out[known].view(INTEGERS[precision]), wanted[known].view(INTEGERS[precision]))


def test_an_expression_is_one_object() -> None:
    assert stored(0) + factor(1) * stored(2) is stored(0) + factor(1) * stored(2)
    assert stored(0) is not stored(0, torch.float32)


def changes() -> dict[str, list[Term]]:
    torch.manual_seed(3)
    base, tuned = (InMemory(torch.randn(300, 70).bfloat16()) for _ in range(2))
    left, right = InMemory(torch.randn(300, 2)), InMemory(torch.randn(2, 70))
    return {
        "difference": [Term(1.0, Difference(base, tuned))],
        "scaled": [Term(0.3, Difference(base, tuned))],
        "low rank": [Term(1.0, LowRank(left, right))],
        "half": [Term(1.0, Dense((InMemory(torch.randn(300, 70).half()),)))],
        "few": [Term(1.0, Dense((InMemory(torch.randn(3)),)))],
        "scalar": [Term(1.0, Dense((InMemory(torch.tensor(-2.5)),)))],
    }


@pytest.mark.parametrize("kind", list(changes()))
@pytest.mark.parametrize(("first", "shift", "bins"), [(0, 15, 1 << 16), (0x3F800000, 0, 1 << 15), (0x3F000000, 10, 7)])
def test_magnitudes_are_counted_by_both(
    kind: str, first: int, shift: int, bins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = Tiles(tuple(changes()[kind]))
    found = tiles.count_magnitudes(first, shift, bins)
    magnitudes = tiles.rows(0, tiles.shape[0] if tiles.shape else 1, tiles.dtype).float().abs().view(torch.int32)
    places = (magnitudes.flatten() - first) >> shift
    assert torch.equal(found, torch.bincount(places[(places >= 0) & (places < bins)], minlength=bins))
    monkeypatch.setattr(Formula, "_code", lambda *_: None)
    assert torch.equal(Tiles(tuple(changes()[kind])).count_magnitudes(first, shift, bins), found)


def test_what_is_made_for_a_tile_is_read_beside_what_is_stored() -> None:
    build = FormulaBuilder()
    table, made = torch.randn(50, 4).bfloat16(), torch.randn(20, 4)
    whole = build.formula(build.times(-0.5, build.made()) + build.tensor(table))
    out = torch.empty(20, 4, dtype=torch.float32)
    assert whole.write(out, 10, 30, [made])
    assert torch.equal(out, (-0.5 * made.double() + table[10:30].double()).float())


@pytest.mark.parametrize("count", [1, 3, MOST_PRODUCTS])
@pytest.mark.parametrize("rows", [1, 30, 37])
def test_inner_products_count_each_element_once(rows: int, count: int) -> None:
    torch.manual_seed(rows)
    base, *tuned = (torch.randn(rows, 41).to(DTYPES[n % len(DTYPES)]) for n in range(count + 1))
    build = FormulaBuilder()
    elements = [build.times(n + 0.5, build.combined([(-1.0, base), (1.0, each)])) for n, each in enumerate(tuned)]
    found = build.formula(elements[0]).products(elements[1:], 0, rows)
    flat = torch.stack([(n + 0.5) * (each.double() - base.double()) for n, each in enumerate(tuned)]).flatten(1)
    assert found is not None
    torch.testing.assert_close(found, flat @ flat.T, rtol=1e-12, atol=1e-12)
    terms = [(Term(n + 0.5, Difference(InMemory(base), InMemory(each))),) for n, each in enumerate(tuned)]
    torch.testing.assert_close(gram("w", terms), found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "factors", [(2.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 2.0), (4.0, -2.0), (3.0, -2.0)], ids=str
)
def test_two_bf16_numbers_are_added_in_fp32_with_the_bits_of_fp64(factors: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(7)
    sign_and_digits = torch.randint(0x8080, (2, 253, 1024), dtype=torch.int32, generator=generator) & 0x807F
    # All distances of exponents; no sum is too large for bf16, or so small that torch rounds it.
    larger = torch.randint(60, 248, (253, 1), dtype=torch.int32, generator=generator).expand(253, 1024)
    smaller = (larger - torch.arange(253)[:, None] // 2).clamp(min=30)
    bits = sign_and_digits | (torch.stack([larger, smaller]) << 7)
    one, other = (each.to(torch.int16).view(torch.bfloat16) for each in bits[:, torch.randperm(253)])
    build = FormulaBuilder()
    whole = build.formula(build.combined([(factors[0], one), (factors[1], other)]))
    out = torch.empty_like(one)
    compiled.clear()
    assert whole.write(out, 0, 253)
    total = factors[0] * one.double() + factors[1] * other.double()
    assert torch.equal(bits_of(out), bits_of(round_once(total, torch.bfloat16)))
    assert {elements[0].precision for elements, _, _ in compiled} == {
        torch.float64 if 3.0 in factors else torch.float32
    }


@pytest.mark.parametrize("by_instruction", [True, False])
def test_bf16_is_the_same_by_one_instruction_and_without(by_instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every bf16 number what is at it, next to it, half-way to the next one and next to that."""
    if by_instruction and not rounds_to_bfloat():
        pytest.skip("this processor has no such instruction")
    monkeypatch.setattr("hf_taskvec.algebra.vector_instructions.rounds_to_bfloat", lambda: by_instruction)
    upper = torch.arange(0x0080, 0x7F7F, dtype=torch.int32)[:, None] << 16
    numbers = (upper | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).flatten()
    numbers = numbers.view(torch.float32)
    numbers = torch.cat([numbers, -numbers])
    out = torch.empty(numbers.shape, dtype=torch.bfloat16)
    code = MachineCode((stored(0, torch.float32),), (torch.float32,), torch.bfloat16)
    assert code(len(numbers), [numbers], [], out)
    assert torch.equal(bits_of(out), bits_of(numbers.bfloat16()))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)
