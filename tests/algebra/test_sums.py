"""Evaluation: every number is rounded once, differences are exact, and bad numbers are refused by name."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import tiny_models

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra.deltas import Dense, Difference, LowRank
from hf_taskvec.algebra.exact_difference import exact_format
from hf_taskvec.algebra.rounding import parse_dtype, round_once
from hf_taskvec.algebra.sources import InMemory, Source
from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.tiles import TILE

DIGITS_AND_LEAST_EXPONENT = {torch.bfloat16: (8, -126), torch.float16: (11, -14), torch.float32: (24, -126)}
DTYPES = list(DIGITS_AND_LEAST_EXPONENT)


def nearest(value: Fraction, dtype: torch.dtype) -> float:
    """The number of `dtype` nearest to a rational number, ties to even, by exact integer arithmetic."""
    if value == 0:
        return 0.0
    digits, least = DIGITS_AND_LEAST_EXPONENT[dtype]
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, least) - digits + 1)
    return float(round(value / unit) * unit)  # Python rounds a Fraction half to even


def rounded(values: list[float], dtype: torch.dtype) -> list[float]:
    return round_once(torch.tensor(values, dtype=torch.float64), dtype).double().tolist()


finite = st.floats(min_value=-6e4, max_value=6e4)


@st.composite
def near_ties(draw: st.DrawFn) -> float:
    """A number of a 16-bit type plus half a unit, plus next to nothing: where double rounding goes wrong."""
    digits, least = draw(st.sampled_from([(8, -126), (11, -14)]))
    mantissa = draw(st.integers(0, 2 ** (digits + 1)))
    exponent = draw(st.integers(max(least, -40) - digits, 4))
    nudge = draw(st.sampled_from([0.0, 2.0**-45, 2.0**-30, 0.75 * 2.0**-24, 0.75 * 2.0**-23]))
    nudge *= draw(st.sampled_from([1, -1]))
    sign = draw(st.sampled_from([1, -1]))
    return sign * (mantissa + 0.5) * 2.0**exponent * (1 + nudge)


@given(st.lists(finite | near_ties(), min_size=1, max_size=8), st.sampled_from(DTYPES))
@example([1 + 2**-8 + 2**-40, -(1 + 2**-8 - 2**-40), 1 + 2**-8, 1 + 3 * 2**-8], torch.bfloat16)
@example(
    [k * 2.0**-25 * (1 + s * 0.75 * 2**-n) for k in (3, 5, 7, 9) for s in (1, -1) for n in (23, 24)], torch.float16
)
@example([2**-25, 2**-25 * (1 + 2**-40), 3 * 2**-25, 2**-24 * 0.75, 2**-26, 2**-14 - 2**-26], torch.float16)
@example([2.0**-134, 2.0**-134 * (1 + 2**-50), 2.0**-133 * 1.5, 2.0**-200], torch.bfloat16)
def test_round_once_is_the_nearest_number(values: list[float], dtype: torch.dtype) -> None:
    assert rounded(values, dtype) == [nearest(Fraction(v), dtype) for v in values]


@given(st.lists(finite | near_ties(), min_size=1, max_size=8))
def test_round_once_to_fp16_agrees_with_numpy(values: list[float]) -> None:
    assert rounded(values, torch.float16) == [float(np.float16(np.float64(v))) for v in values]


def test_torchs_own_conversion_rounds_twice() -> None:
    value = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert value.to(torch.bfloat16).item() != nearest(Fraction(value.item()), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_once_keeps_every_number_of_the_dtype(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype)
    numbers = numbers[numbers.isfinite()]
    assert torch.equal(round_once(numbers.double(), dtype).view(torch.int16), numbers.view(torch.int16))


def _normal(dtype: torch.dtype, seed: int, count: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-12, 4, (count,), generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_a_dense_result_is_correctly_rounded(dtype: torch.dtype, scale: float) -> None:
    base, tuned, target = (_normal(dtype, seed) for seed in range(3))
    out = torch.empty_like(target)
    terms = [Term(1.0, Difference(InMemory(base), InMemory(tuned)))]
    Sum(target.shape, terms, InMemory(target), scale).into(out, "w")
    exact = [
        Fraction(t) + int(scale) * (Fraction(a) - Fraction(b))
        for t, a, b in zip(target.tolist(), tuned.tolist(), base.tolist(), strict=True)
    ]
    assert out.tolist() == [nearest(each, dtype) for each in exact]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [-1.0, 2.0])
def test_a_vector_on_its_own_base_is_correctly_rounded(dtype: torch.dtype, scale: float) -> None:
    # Any bits at all: every exponent against every other, subnormals too, but nothing near the largest number.
    bits = torch.randint(-(1 << 15), 1 << 15, (2, 30_000), generator=torch.Generator().manual_seed(0))
    base, tuned = bits.to(torch.int16).view(dtype)
    few = (base.double().abs() < 1e4) & (tuned.double().abs() < 1e4)
    base, tuned = base[few].contiguous(), tuned[few].contiguous()
    out = torch.empty_like(base)
    Sum(base.shape, [Term(1.0, Difference(InMemory(base), InMemory(tuned)))], InMemory(base), scale).into(out, "w")
    whole = int(scale)
    exact = [
        (1 - whole) * Fraction(b) + whole * Fraction(t) for b, t in zip(base.tolist(), tuned.tolist(), strict=True)
    ]
    assert out.tolist() == [nearest(each, dtype) for each in exact]


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 2.0**127), (torch.float16, 2.0**15)])
def test_a_doubled_base_may_be_too_large_if_the_result_is_not(dtype: torch.dtype, large: float) -> None:
    base, tuned = torch.tensor([large, 1.0]).to(dtype), torch.tensor([large, 4.0]).to(dtype)
    out = torch.empty_like(base)
    whole = Sum((2,), [Term(-1.0, Difference(InMemory(base), InMemory(tuned)))], InMemory(base))
    whole.into(out, "w")
    assert out.tolist() == [large, -2.0]
    tuned[0] = -large
    with pytest.raises(TaskVectorError, match=r"w: the result .* is too large for"):
        whole.into(out, "w")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [-0.6180339887498949, 0.27182818284590453])  # at 3/5 exact ties abound
def test_other_scales_are_one_unit_off_at_most_and_rarely(dtype: torch.dtype, scale: float) -> None:
    base, tuned = _normal(dtype, 0), _normal(dtype, 1)
    out = torch.empty_like(base)
    Sum(base.shape, [Term(1.0, Difference(InMemory(base), InMemory(tuned)))], InMemory(base), scale).into(out, "w")
    exact = [
        Fraction(b) + Fraction(scale) * (Fraction(t) - Fraction(b))
        for b, t in zip(base.tolist(), tuned.tolist(), strict=True)
    ]
    wrong = [i for i, each in enumerate(exact) if out[i].item() != nearest(each, dtype)]
    assert len(wrong) <= 1
    digits, _ = DIGITS_AND_LEAST_EXPONENT[dtype]
    for i in wrong:
        size = max(abs(base[i].item()), abs(scale * (tuned[i].item() - base[i].item())))
        assert abs(Fraction(out[i].item()) - exact[i]) <= Fraction(2) ** (math.frexp(size)[1] - digits)


def _misrounded(base: torch.Tensor, terms: list[Term]) -> float:
    """The share of elements that are not fp64 rounded once; none may be a unit of the larger summand away from it."""
    out = torch.empty_like(base)
    Sum(tuple(base.shape), terms, InMemory(base)).into(out, "w")
    change = Sum(tuple(base.shape), terms).rows(0, base.shape[0])
    exact = base.double() + change
    unit = 2.0 ** (torch.frexp(torch.maximum(base.double().abs(), change.abs()))[1] - 8).double()
    # Half a unit of a result that is larger than both is a whole unit of theirs.
    assert ((out.double() - exact).abs() / unit).max() < 1.001
    return (out != tiny_models.nearest(exact, base.dtype)).double().mean().item()


def _factors(rank: int, size: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random factors of a change that is as large as `size`."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(1024, rank, generator=generator), torch.randn(rank, 1024, generator=generator)
    return left * (size / rank**0.5), right


def _low_rank(*factors: torch.Tensor) -> LowRank:
    return LowRank(*map(InMemory, factors))


_WEIGHTS = 0.02
# Of 1,024 numbers each, in one tile.
TILE_ROWS = TILE // 1024


def numbers(kind: str, count: int = 1 << 18) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A bf16 base, a fine-tune and what is taken from it, as weights are or as they could be at worst."""
    generator = torch.Generator().manual_seed(0)

    def any_bits() -> torch.Tensor:
        found = torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator, dtype=torch.int16)
        found = found.view(torch.bfloat16)
        return torch.where(found.abs() < 1e30, found, 1.0)  # also -0, and numbers below 2**-126

    base = 0.02 * torch.randn(count, generator=generator)
    change = 0.002 * torch.randn(count, generator=generator)
    if kind == "weights":
        return base.bfloat16(), (base + change).bfloat16(), base.bfloat16()
    if kind == "another model":
        return (base + change.flip(0)).bfloat16(), (base + change).bfloat16(), base.bfloat16()
    if kind == "sparse":
        kept = torch.rand(count, generator=generator) < 0.3
        return base.bfloat16() * kept, (base + change).bfloat16() * kept, base.bfloat16() * kept
    if kind == "cancelling":
        return base.bfloat16(), (0.3 * base).bfloat16(), (1.3 * base).bfloat16()
    if kind == "tiny":
        return tuple((2.0**-125 * torch.randn(count, generator=generator)).bfloat16() for _ in range(3))
    assert kind == "any bits"
    return any_bits(), any_bits(), any_bits()


@pytest.mark.parametrize("kind", ["weights", "another model", "sparse", "cancelling", "tiny", "any bits"])
@pytest.mark.parametrize("scale", [-0.6, -0.5, 0.1, 1 / 3, -2.5, 1.0009765625, 1e-3, 1e9 + 0.5, 1e-15])
def test_a_sweep_has_the_bits_of_fp64_rounded_once(kind: str, scale: float) -> None:
    """Whatever the numbers are: on its own base or another model's, sparse, cancelling, near the smallest."""
    base, tuned, other = numbers(kind)
    if scale > 1:
        tuned, other = tuned.clamp(-1e20, 1e20), other.clamp(-1e20, 1e20)
    found = Sum(base.shape, [Term(scale, Difference(InMemory(other), InMemory(tuned)))], InMemory(base))
    out = torch.empty_like(base)
    found.into(out, "w")
    exact = base.double() + scale * (tuned.double() - other.double())
    subnormal = (exact * 2.0**133).round() * 2.0**-133  # where bf16's numbers are the multiples of 2**-133
    normal = tiny_models.nearest(exact, torch.bfloat16)
    assert torch.equal(out, torch.where(exact.abs() < 2.0**-126, subnormal.bfloat16(), normal))


@pytest.mark.parametrize("size", [0.01, 0.1, 1.0, 10.0])
def test_a_low_rank_result_is_rarely_off(size: float) -> None:
    """One change of rank 32, from a hundredth of the weights' size to ten times it."""
    base = (torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * _WEIGHTS).bfloat16()
    assert _misrounded(base, [Term(-1.0, _low_rank(*_factors(32, size * _WEIGHTS, 1)))]) < 5e-5


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("stacked", [False, True])
def test_low_rank_changes_that_cancel_are_rarely_off(size: float, stacked: bool) -> None:
    """Two changes that share most of what they do: as two terms, and as one with the factors of both."""
    base = (torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * _WEIGHTS).bfloat16()
    left, right = _factors(16, size * _WEIGHTS, 1)
    nearly = left + _factors(16, _WEIGHTS, 2)[0]
    terms = [Term(1.0, _low_rank(left, right)), Term(-1.0, _low_rank(nearly, right))]
    if stacked:
        terms = [Term(1.0, _low_rank(torch.cat([left, -nearly], dim=1), torch.cat([right, right])))]
    assert _misrounded(base, terms) < 5e-5


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-4), (torch.float16, 5e-4)])
@pytest.mark.parametrize("weights", [(0.3, -0.7), (-0.6, 0.2), (0.3, -0.7, 0.2), (-0.6, 0.2, 0.1)])
def test_several_decimal_weights_are_rarely_off(dtype: torch.dtype, most: float, weights: tuple[float, ...]) -> None:
    """Against the expression as it is written, in fp64 and rounded once: decimal weights make many ties."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(512, 1024, generator=generator) for _ in range(len(weights) + 1)]
    base = (noise[0] * 0.02).to(dtype)
    tuned = [(base.float() + each * 0.002).to(dtype) for each in noise[1:]]
    exact = base.double() + sum(w * (t.double() - base.double()) for w, t in zip(weights, tuned, strict=True))
    source, out = InMemory(base), torch.empty_like(base)
    terms = [Term(w, Difference(source, InMemory(t))) for w, t in zip(weights, tuned, strict=True)]
    Sum(tuple(base.shape), terms, source).into(out, "w")
    assert (out != tiny_models.nearest(exact, dtype)).double().mean() < most


class Counted(Source):
    """A tensor that knows how often it was read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.reads = tensor, 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> torch.Tensor:
        self.reads += 1
        return self.tensor


def test_a_base_that_cancels_is_not_read() -> None:
    base, tuned = Counted(torch.ones(3)), Counted(torch.full((3,), 5.0))
    whole = Sum((3,), [Term(1.0, Difference(base, tuned))], target=base)
    out = torch.empty(3)
    whole.into(out, "w")
    assert out.tolist() == [5, 5, 5]
    assert (base.reads, tuned.reads) == (0, 1)


def test_a_base_shared_by_many_is_read_once() -> None:
    base, tuned = Counted(torch.ones(3)), [Counted(torch.full((3,), float(n))) for n in range(4)]
    out = torch.empty(3)
    Sum((3,), [Term(0.5, Difference(base, each)) for each in tuned]).into(out, "w")
    assert out.tolist() == [0.5 * (0 + 1 + 2 + 3) - 2] * 3
    assert base.reads == 1


def test_a_tiny_fine_tuned_weight_survives_a_large_base_weight() -> None:
    base, tuned = torch.tensor([2.0**100]), torch.tensor([2.0**-100])
    copy = InMemory(base.clone())  # another tensor than the vector's own base, so nothing can be folded
    out = torch.empty(1)
    Sum((1,), [Term(1.0, Difference(InMemory(base), InMemory(tuned)))], copy).into(out, "w")
    assert torch.equal(out, tuned)


def test_what_is_subtracted_comes_before_what_is_added() -> None:
    base, tuned = torch.tensor([2.0**100]), torch.tensor([0.25])
    terms = [
        Term(1.0, Dense((InMemory(torch.tensor([1.0])),))),
        Term(1.0, Difference(InMemory(base), InMemory(tuned))),
    ]
    out = torch.empty(1)
    Sum((1,), terms, InMemory(base.clone())).into(out, "w")
    assert out.item() == 1.25


def test_a_scalar_parameter_is_summed_as_any_other() -> None:
    out = torch.empty(())
    Sum((), [Term(2.0, Dense((InMemory(torch.tensor(1.5)),)))], InMemory(torch.tensor(1.0))).into(out, "w")
    assert out.item() == 4.0


def test_factors_of_rank_0_change_nothing() -> None:
    nothing = Term(2.0, LowRank(InMemory(torch.ones(3, 0)), InMemory(torch.ones(0, 2))))
    target = torch.ones(3, 2)
    assert torch.equal(Sum((3, 2), [nothing], InMemory(target)).rows(0, 3), target.double())


def test_an_expression_without_terms_is_zero_or_the_target() -> None:
    out = torch.full((2, 2), 9.0)
    Sum((2, 2), []).into(out, "w")
    assert out.count_nonzero() == 0
    Sum((2, 2), [], InMemory(torch.eye(2))).into(out, "w")
    assert torch.equal(out, torch.eye(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_name_the_parameter(bad: float) -> None:
    vector = TaskVector.from_tensors({"model.layers.3.fc1.weight": torch.tensor([[1.0, bad]])})
    with pytest.raises(TaskVectorError, match=r"model\.layers\.3\.fc1\.weight.*NaN or infinite.*Check"):
        vector.dense("model.layers.3.fc1.weight")


_USES = [(use, kind) for use in ("norm", "dot", "cosine", "compress") for kind in ("dense", "low-rank")]


@pytest.mark.parametrize(("use", "kind"), [*_USES, ("save", "dense")])
def test_no_use_passes_nan_on(use: str, kind: str, tmp_path) -> None:
    bad = torch.full((4, 4), math.nan)
    vector = TaskVector.from_tensors({"fc1.weight": bad if kind == "dense" else (bad[:, :2], bad[:2])})
    uses = {
        "norm": vector.norm,
        "dot": lambda: vector.dot(vector),
        "cosine": lambda: vector.cosine(vector),
        "compress": lambda: vector.compress(rank=1),
        "save": lambda: vector.save(tmp_path / "v", dtype="bfloat16"),
    }
    with pytest.raises(TaskVectorError, match=r"fc1\.weight.*NaN or infinite"):
        uses[use]()


def test_overflow_names_the_parameter_and_the_remedy() -> None:
    vector = TaskVector.from_tensors({"fc1.weight": torch.tensor([7e4])})
    with pytest.raises(TaskVectorError, match=r"fc1\.weight.*7e\+04.*too large for float16.*smaller scale"):
        vector.dense("fc1.weight", "float16")
    assert vector.dense("fc1.weight", "bfloat16").isfinite().all()


def test_a_second_look_at_large_numbers_leaves_small_ones_alone() -> None:
    """Near bf16's largest number the sum overflows, and is looked at again; the smallest are rounded as ever."""
    for k in range(1, 40):
        values = [(k + 0.5) * 2.0**-133 * (1 + 2.0**-40), 3.392e38, 3.392e38]
        found = round_once(torch.tensor(values, dtype=torch.float64), torch.bfloat16, "w").double().tolist()
        assert found[0] == (k + 1) * 2.0**-133


def test_a_number_that_rounds_to_the_largest_is_no_overflow() -> None:
    vector = TaskVector.from_tensors({"w": torch.tensor([65510.0])})
    assert vector.dense("w", "float16").item() == 65504


def exact_value(delta: Dense | None, index: int) -> Fraction:
    return (
        sum((Fraction(s.read().reshape(-1)[index].item()) for s in delta.tensors), Fraction(0))
        if delta
        else Fraction(0)
    )


_EXPONENTS = {
    torch.bfloat16: (-130, 126),
    torch.float16: (-24, 14),
    torch.float32: (-148, 126),
    torch.float64: (-1000, 1022),
}


@st.composite
def number_pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers of any magnitude, subnormal to nearly the largest, each in a dtype of its own."""
    pair = []
    for dtype in (draw(st.sampled_from([*_EXPONENTS])), draw(st.sampled_from([*_EXPONENTS]))):
        low, high = _EXPONENTS[dtype]
        value = draw(st.floats(-1.99, 1.99)) * 2.0 ** draw(st.integers(low, high))
        pair.append(torch.tensor([value], dtype=torch.float64).to(dtype))
    return pair[0], pair[1]


def exact_difference(tuned: torch.Tensor, base: torch.Tensor, name: str = "w") -> Dense | None:
    """The difference as a vector of live models holds it: sharing no memory with either."""
    return Difference(InMemory(base), InMemory(tuned)).owned(name)


@given(number_pairs())
def test_exact_difference_is_exact(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    tuned, base = pair
    delta = exact_difference(tuned, base)
    assert exact_value(delta, 0) == Fraction(tuned.item()) - Fraction(base.item())
    same_sign = math.copysign(1.0, tuned.item()) == math.copysign(1.0, base.item())  # -0.0 is not 0.0
    assert (delta is None) == (tuned.item() == base.item() and same_sign)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_typical_difference_is_exact_and_small(dtype: torch.dtype) -> None:
    base = _normal(dtype, 0)
    tuned = (base.double() + _normal(torch.float64, 1) * 1e-3).to(dtype)
    delta = exact_difference(tuned, base)
    assert delta is not None
    for i in range(len(base)):
        assert exact_value(delta, i) == Fraction(tuned[i].item()) - Fraction(base[i].item())
    assert sum(each.nbytes for each in delta.tensors) <= 2 * base.nbytes


def test_the_smallest_exact_format_is_found() -> None:
    ones = torch.ones(4)
    cases = [
        (ones, ones * 3, torch.bfloat16, 1),
        (ones + 2**-12, ones, torch.bfloat16, 1),
        (ones * 1.0009765625, ones * 0, torch.float16, 1),
        (ones + 2**-20, ones * 0, torch.float32, 1),
        (ones * 2.0**60, ones, torch.float32, 2),
        (ones.double() * (1 + 2.0**-20), ones.double() * 0, torch.float32, 1),
        (ones.bfloat16() * 256, ones.bfloat16() * 0.0078125, torch.bfloat16, 2),
    ]
    for tuned, base, dtype, parts in cases:
        form = exact_format(tuned, base, "w")
        assert (form.dtype, form.parts) == (dtype, parts), (tuned[0], base[0])
    assert exact_format(ones, ones, "w").parts == 0


def test_exact_difference_refuses_nan_by_name() -> None:
    with pytest.raises(TaskVectorError, match=r"lm_head\.weight.*NaN"):
        exact_difference(torch.tensor([math.nan]), torch.tensor([1.0]), "lm_head.weight")


def test_a_difference_too_large_for_any_dtype_is_refused_by_name() -> None:
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    with pytest.raises(TaskVectorError, match=r"fc1\.weight"):
        exact_difference(largest, -largest, "fc1.weight")


def test_dtypes_are_parsed_and_others_refused() -> None:
    assert parse_dtype("bfloat16") is torch.bfloat16
    for bad in ("int8", "nothing", torch.int64):
        with pytest.raises(TaskVectorError, match="Use one of: bfloat16, float16, float32, float64"):
            parse_dtype(bad)


@pytest.mark.parametrize("scale", [-0.4, -1.0])
def test_many_tiles_have_the_bits_of_single_ones(scale: float) -> None:
    """Also where machine code leaves some of them to torch: those with numbers below the smallest normal one."""
    shape = (TILE_ROWS * 11 + 3, 1024)
    base = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(_WEIGHTS).bfloat16()
    tuned = (base.float() * 1.01).bfloat16()
    base[TILE_ROWS * 9 + 1], tuned[TILE_ROWS * 9 + 1] = 2.0**-130, 2.0**-129
    found = Sum(shape, [Term(scale, Difference(InMemory(tuned), InMemory(base)))], InMemory(base))
    out = torch.empty_like(base)
    found.into(out, "w")
    tiles = [found.rounded(start, stop, torch.bfloat16, "w").clone() for start, stop in found.tiles()]
    assert len(tiles) > 8 and torch.equal(out.view(torch.int16), torch.cat(tiles).view(torch.int16))
