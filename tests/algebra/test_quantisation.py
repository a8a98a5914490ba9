"""Codes and scales are those of bitsandbytes and torchao, element for element."""

import math

import pytest
import torch

from hf_taskvec.algebra.quantisation import SCHEMES, block_size, check_scheme, quantise, quantised_values
from hf_taskvec.errors import BadValueError

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (5, 7), (3, 64), (33, 65), (24, 96), (2, 1000)]


def matrices(dtype: torch.dtype, shape: tuple[int, int]) -> list[torch.Tensor]:
    """Small weights, weights with zeros all over a block and a row, large and tiny ones, and equal steps (ties)."""
    torch.manual_seed(0)
    weights = torch.randn(shape) * 0.02
    zeros = weights.clone()
    zeros.view(-1)[:64] = 0
    zeros[-1] = 0
    outlying = weights * torch.logspace(-6, 3, weights.numel()).view(shape)
    steps = (torch.arange(weights.numel()) % 33 - 16).float().view(shape) / 16
    return [each.to(dtype) for each in (weights, zeros, outlying, steps)]


def nf4_codes(matrix: torch.Tensor) -> torch.Tensor:
    flat, whole = matrix.flatten(), matrix.numel() // 64 * 64
    parts = [flat[:whole].view(-1, 64), flat[whole:].view(1, -1)]
    return torch.cat([quantise(part, "nf4").codes.flatten() for part in parts if part.numel()])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nf4_is_that_of_bitsandbytes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for matrix in matrices(dtype, shape):
        packed, _ = functional.quantize_4bit(matrix, quant_type="nf4")
        theirs = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten()[: matrix.numel()]
        assert torch.equal(nf4_codes(matrix), theirs)
        # Its own kernel for even rows; the other one is compiled for each shape, which takes seconds. As one long row:
        # on processors with AVX-512 it takes wrong blocks where a row of several is no multiple of 64 (0.50.2).
        if shape[1] % 2 == 0:
            flat = functional.dequantize_4bit(*functional.quantize_4bit(matrix.flatten(), quant_type="nf4"))
            assert torch.equal(quantised_values(matrix, "nf4"), flat.view(shape))


def test_half_way_between_two_values_of_nf4_it_is_the_lower_as_in_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values = functional.get_4bit_type("nf4", device="cpu")
    bounds = (values[:-1] + values[1:]) / 2
    row = torch.zeros(1, 64)
    row[0, 0], row[0, 1:16] = 1, bounds
    row[0, 16:31], row[0, 31:46] = (torch.nextafter(bounds, torch.tensor(side)) for side in (-2.0, 2.0))
    codes = quantise(row, "nf4").codes[0]
    assert codes[1:16].tolist() == codes[16:31].tolist() == list(range(15))
    assert codes[31:46].tolist() == list(range(1, 16))
    packed, _ = functional.quantize_4bit(row, quant_type="nf4")
    assert torch.equal(codes, torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_that_of_bitsandbytes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for matrix in matrices(dtype, shape):
        held = bitsandbytes.nn.Int8Params(matrix.clone(), requires_grad=False).to("cpu")
        codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(matrix.half())
        ours = quantise(matrix, "int8")
        assert torch.equal(ours.codes, held.CB) and torch.equal(ours.scales, held.SCB)
        assert torch.equal(ours.codes, codes) and torch.equal(ours.scales, scales)
        theirs = bitsandbytes.functional.int8_vectorwise_dequant(held.CB, held.SCB)
        assert torch.equal(quantised_values(matrix, "int8"), theirs.to(dtype))


@pytest.mark.parametrize("shape", [*SHAPES, (6, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_fp8_and_int4_are_those_of_torchao(scheme: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """torchao is not in the test environment: transformers imports it wherever it finds it, and it then prints."""
    quantization = pytest.importorskip("torchao.quantization")
    for matrix in matrices(dtype, shape):
        layer = torch.nn.Linear(*matrix.T.shape, bias=False)
        layer.weight = torch.nn.Parameter(matrix, requires_grad=False)
        group = quantization.PerGroup(128) if matrix.shape[1] % 128 == 0 else quantization.PerAxis(0)
        config = {
            "fp8": quantization.Float8WeightOnlyConfig(),
            "int4": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        }[scheme]
        quantization.quantize_(layer, config)
        theirs = layer.weight.dequantize().nan_to_num_(nan=0.0)  # its rows of zeros become NaN in float8
        assert torch.equal(quantised_values(matrix, scheme), theirs)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_becomes_the_nearest_of_the_numbers_that_its_block_has(dtype: torch.dtype, scheme: str) -> None:
    """By brute force over all codes, in fp64. int8 rounds weights to fp16 first, int4 computes in their own dtype."""
    torch.manual_seed(1)
    blocks = (torch.randn(4, 64) * 0.02).to(dtype)
    found = quantise(blocks, scheme)
    every = {
        "nf4": torch.arange(16, dtype=torch.uint8),
        "int8": torch.arange(-127, 128, dtype=torch.int8),
        "fp8": torch.arange(256, dtype=torch.int32).to(torch.uint8),
        "int4": torch.arange(-8, 8, dtype=torch.int8),
    }[scheme]
    for row, codes, scale in zip(blocks, found.codes, found.scales, strict=True):
        numbers = type(found)(scheme, every[None], scale[None].float()).values(torch.float64)[0]
        distances = (row.double()[:, None] - numbers).abs().nan_to_num(nan=math.inf)
        chosen = type(found)(scheme, codes[None], scale[None].float()).values(torch.float64)[0]
        slack = {"int8": 2.0**-10, "int4": 16 * torch.finfo(dtype).eps}.get(scheme, 1e-6)
        assert ((row.double() - chosen).abs() <= distances.amin(dim=1) + slack * scale.double().item()).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bin_is_as_wide_as_the_weights_that_get_its_code(scheme: str) -> None:
    """Measured by a fine ruler through the whole block."""
    ruler = torch.linspace(-1, 1, 200_001)[None] * 0.02
    found = quantise(torch.cat([ruler, torch.zeros(1, ruler.shape[1])]), scheme)
    widths = found.bin_widths()
    assert (widths[1] == 0).all() or scheme == "int4"
    codes, counts = found.codes[0].unique(return_counts=True)
    if scheme in ("int8", "int4"):  # the outermost bins are cut off by the largest weight
        codes, counts = codes[1:-1], counts[1:-1]
    step = 0.02 * 2 / 200_000
    slack = 4 * step + (0.02 * 2**-10 if scheme == "int8" else 0)  # fp16's own steps
    for code, count in zip(codes, counts, strict=True):
        width = widths[0][found.codes[0] == code][0].item()
        # A float8's step changes at a power of 2, so its bin is narrower on one side; that of the largest is cut off.
        near = [width, width * 0.75, width / 2] if scheme == "fp8" else [width]
        assert any(abs(count.item() * step - each) <= slack for each in near), (code, count.item() * step, width)


def test_schemes_are_known_by_name() -> None:
    assert [check_scheme(scheme) for scheme in SCHEMES] == list(SCHEMES)
    assert [block_size(scheme, 256) for scheme in SCHEMES] == [64, 256, 256, 128]
    with pytest.raises(BadValueError, match=r"no quantisation scheme 'nf5'. Did you mean 'nf4'\? Use nf4, int8"):
        check_scheme("nf5")
