"""Which of a model's stored tensors make weights of fewer bits, by its config and their names.

| `quant_method` of the config | tensors of a weight `x.weight` | module |
|---|---|---|
| `fp8` | `x.weight`, `x.weight_scale_inv` (or `x.scale`, `x.qscale_weight`, `x.weight_scale`) | `scaled_matrix` |
| `mxfp4` | `x_blocks`, `x_scales` of a weight `x` | `mxfp4_experts` |
| `compressed-tensors` | `x.weight`, `x.weight_scale`, perhaps `x.weight_zero_point` | `scaled_matrix` |
| `compressed-tensors` | `x.weight_packed`, `x.weight_scale`, `x.weight_shape`, … | `packed_integers` |
| `gptq`, `awq` | `x.qweight`, `x.qzeros`, `x.scales`, perhaps `x.g_idx` | `packed_integers` |

What a model needs to run besides (scales of activations) belongs to no weight, and is kept apart.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_taskvec.algebra.rounding import FLOATS, dtype_name
from hf_taskvec.algebra.sources import Source, numel
from hf_taskvec.errors import CorruptFileError, MismatchError, UnsupportedError
from hf_taskvec.quantised.bit_fields import words_for
from hf_taskvec.quantised.mxfp4_experts import BLOCK_BYTES, Mxfp4Experts
from hf_taskvec.quantised.packed_integers import AWQ_BITS, Awq, Gptq, PackQuantized
from hf_taskvec.quantised.packed_weight import PackedWeight
from hf_taskvec.quantised.scaled_matrix import EXPONENTS, FLOAT_CODES, Fp4Matrix, ScaledMatrix

#: role in the format, name in the files, and the tensor itself
PackedPart = tuple[str, str, Source]

#: the way out for whatever cannot be read
OTHERWISE = (
    "Use the model in bf16, or load it with transformers, dequantise it there (dequantize=True in its quantisation "
    "config, or model.dequantize()), and save that."
)
# Scales of what flows through a model, not of its weights.
_ACTIVATIONS = re.compile(r"\.(activation_scale|input_scale|output_scale|qscale_act|[kvq]_scale|input_zero_point)$")
_FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_BITS = 8


@dataclass(frozen=True)
class UnpackedModel:
    """A model's stored tensors, those of fewer bits put together.

    Args:
        weights (`Mapping[str, Source]`):
            Name -> what the model holds, in the order of the files.
        beside (`frozenset` of `str`):
            The names of stored tensors that quantised layers need, and a model without quantisation does not have.
    """

    weights: Mapping[str, Source]
    beside: frozenset[str] = frozenset()

    @property
    def packed(self) -> dict[str, PackedWeight]:
        """The weights of fewer bits."""
        return {name: each for name, each in self.weights.items() if isinstance(each, PackedWeight)}


def unpack_model(stored: Mapping[str, Source], config: Mapping[str, Any], where: str) -> UnpackedModel:
    """Put together the weights that are stored in fewer bits; nothing is read.

    Args:
        stored (`Mapping[str, Source]`):
            Every tensor of the model's files.
        config (`Mapping[str, Any]`):
            The model's config.
        where (`str`):
            What the model is called in a message.

    Raises:
        `UnsupportedError`: If the format is not known, naming it.
        `MismatchError`: If tensors that belong together do not fit each other, or one is missing.
    """
    settings = config.get("quantization_config")
    if not settings and not any(source.dtype in FLOAT_CODES for source in stored.values()):
        return UnpackedModel(stored)
    if settings is not None and not isinstance(settings, dict):
        raise CorruptFileError(f"{where}: quantization_config in its config is no mapping. Download the model again.")
    if not settings and (scaled := next((name for name in stored if name.endswith(".weight_scale_2")), None)):
        raise UnsupportedError(
            f"{where} has {scaled}, as NVFP4 has, and its config does not say how it is quantised (ModelOpt does in "
            f"hf_quant_config.json). That is not read here. {OTHERWISE}"
        )
    reader = _Reader(stored, settings or {}, _model_dtype(config), where)
    method = reader.settings.get("quant_method", "fp8")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedError(
            f"{where} is quantised by {method!r}, which is not read here: {', '.join(_METHODS)} are. {OTHERWISE}"
        )
    for packed in _METHODS[method](reader):
        reader.found[packed.name] = packed
        reader.used |= {name for _, name, _ in packed.parts}
    return reader.result()


def _model_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which transformers loads the model by itself."""
    texts = config.get("text_config")
    for each in (config, texts if isinstance(texts, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            named = each.get(key)
            found = getattr(torch, named, None) if isinstance(named, str) else None
            if found in FLOATS:
                return found
    return torch.bfloat16


class _Reader:
    """The stored tensors of one model, and what was found among them."""

    def __init__(
        self, stored: Mapping[str, Source], settings: Mapping[str, Any], dtype: torch.dtype, where: str
    ) -> None:
        self.stored, self.settings, self.dtype, self.where = stored, settings, dtype, where
        self.found: dict[str, PackedWeight] = {}
        self.used: set[str] = set()

    def ending(self, suffix: str) -> Iterator[str]:
        """What stands before the suffix in each name that has it."""
        return (name.removesuffix(suffix) for name in self.stored if name.endswith(suffix))

    def part(self, role: str, name: str, weight: str) -> PackedPart:
        """A tensor that must be there.

        Raises:
            `MismatchError`: If it is not.
        """
        if name not in self.stored:
            raise MismatchError(
                f"{self.where}: {weight} is stored in fewer bits, and {name}, without which it cannot be read, is in "
                "none of its files. Download the model again whole; if it was published so, it cannot be used."
            )
        return (role, name, self.stored[name])

    def check(self, part: PackedPart, dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
        """Refuse a stored tensor that does not fit the others.

        Raises:
            `MismatchError`: Naming it, what it is, and what it must be.
        """
        _, name, source = part
        if source.dtype in dtypes and source.shape in shapes:
            return
        wanted = " or ".join(_name(each) for each in dtypes)
        raise MismatchError(
            f"{self.where}: {name} is {_name(source.dtype)} of shape {list(source.shape)}, and must be {wanted} of "
            f"shape {' or '.join(str(list(each)) for each in shapes)}. The file is damaged, or of a variant of the "
            f"format that is not known. {OTHERWISE}"
        )

    def block(self, parts: Sequence[PackedPart], size: tuple[int, ...], declared: Any) -> tuple[int, int]:
        """The rows and columns that share a scale, from the shape of the scales.

        A declared block counts where it gives as many scales as there are: nothing else tells how blocks lie that do
        not fill a matrix.

        Raises:
            `MismatchError`: If no blocks give as many.
        """
        codes, scales = parts[0], parts[1]
        if len(size) not in (2, 3) or 0 in size:
            self.check(codes, (codes[2].dtype,), ((1, 1),))
        shape, lead, (rows, columns) = scales[2].shape, size[:-2], size[-2:]
        self.check(scales, (*_FLOAT_SCALES, *EXPONENTS), (shape,))
        if len(shape) == len(size) and shape[:-2] == lead:
            wanted = declared if isinstance(declared, list) and len(declared) == 2 else [0, 0]
            if all(type(each) is int and each > 0 for each in wanted):
                block = (min(wanted[0], rows), min(wanted[1], columns))
                if shape[-2:] == (-(-rows // block[0]), -(-columns // block[1])):
                    return block
            down, across = shape[-2:]
            if down and across and rows % down == 0 and columns % across == 0:
                return (rows // down, columns // across)
        if numel(shape) == numel(lead):
            return (rows, columns)
        self.check(scales, (scales[2].dtype,), ((*lead, rows), (*lead, rows, 1), (*lead, 1, 1)))
        return (1, columns)

    def scaling(self, weight: str, of_experts: torch.dtype) -> torch.dtype:
        """The dtype in which transformers has the scales of a weight of compressed-tensors."""
        return of_experts if _EXPERT.search(weight) else self.dtype

    def number(self, key: str) -> int:
        """A whole number of the settings."""
        found = self.settings.get(key)
        if type(found) is not int:
            raise CorruptFileError(
                f"{self.where}: quantization_config in its config has {key}={found!r}, which must be a whole number. "
                "Download the model again."
            )
        return found

    def result(self) -> UnpackedModel:
        """The weights in the order of the files; what is left over must be plain."""
        first = {packed.parts[0][1]: name for name, packed in self.found.items()}
        beside = {name for name in self.stored if _ACTIVATIONS.search(name) and name not in self.used}
        weights: dict[str, Source] = {}
        for name, source in self.stored.items():
            if name in first:
                weights[first[name]] = self.found[first[name]]
            elif name not in self.used and name not in beside:
                if isinstance(source.dtype, str) or source.dtype in FLOAT_CODES:
                    raise MismatchError(
                        f"{self.where}: {name} is stored as {_name(source.dtype)}, and no tensor beside it has its "
                        f"scales. {OTHERWISE}"
                    )
                weights[name] = source
        return UnpackedModel(weights, frozenset(beside))


def _name(dtype: torch.dtype | str) -> str:
    return dtype if isinstance(dtype, str) else dtype_name(dtype)


# FP8.

_FP8_SCALES = ("weight_scale_inv", "scale", "qscale_weight", "weight_scale")


def _fp8(reader: _Reader) -> Iterator[PackedWeight]:
    declared = reader.settings.get("weight_block_size")
    for name, codes in reader.stored.items():
        is_fp4 = codes.dtype == torch.int8 and len(codes.shape) > 1
        if codes.dtype not in FLOAT_CODES and not is_fp4:
            continue
        before, _, last = name.rpartition(".")
        names = [f"{before}.{each}" for each in _FP8_SCALES] if last == "weight" else [f"{name}_scale_inv"]
        scales = next((each for each in names if each in reader.stored), names[0])
        parts = (("codes", name, codes), reader.part("scales", scales, name))
        size = (*codes.shape[:-1], 2 * codes.shape[-1]) if is_fp4 else codes.shape
        block = reader.block(parts, size, declared)
        kind = Fp4Matrix if is_fp4 else ScaledMatrix
        yield kind(name, size, reader.dtype, parts, block, torch.float32)


# MXFP4.


def _mxfp4(reader: _Reader) -> Iterator[PackedWeight]:
    for name in reader.ending("_blocks"):
        codes, scales = (reader.part(role, f"{name}_{end}", name) for role, end in _MXFP4)
        shape = codes[2].shape
        reader.check(codes, (torch.uint8,), ((*shape[:3], BLOCK_BYTES) if len(shape) == 4 else (1, 1, 1, BLOCK_BYTES),))
        reader.check(scales, (torch.uint8,), (shape[:3],))
        experts, outputs, blocks, _ = shape
        yield Mxfp4Experts(name, (experts, blocks * 2 * BLOCK_BYTES, outputs), reader.dtype, (codes, scales))


_MXFP4 = (("codes", "blocks"), ("scales", "scales"))


# compressed-tensors.

_COMPRESSED = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "mixed-precision", "dense")


# Experts, which transformers puts together itself, it makes of scales as they are stored; for all other layers it has
# scales in the model's dtype.
_EXPERT = re.compile(r"\.experts\.\d+\.")


def _groups(settings: Any) -> list[dict[str, Any]]:
    """The groups of a config of compressed-tensors, or of a part of it."""
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    return [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []


def _compressed(reader: _Reader) -> Iterator[PackedWeight]:
    sparse = reader.settings.get("sparsity_config")
    is_dense = not sparse or (isinstance(sparse, dict) and sparse.get("format") == "dense")
    if not is_dense or _groups(reader.settings.get("transform_config")):
        raise UnsupportedError(
            f"{reader.where}: its weights are rotated, or some of them left out (transform_config or sparsity_config "
            f"in its quantization_config), which is not read here. {OTHERWISE}"
        )
    schemes = _groups(reader.settings)
    for form in [reader.settings.get("format"), *(each.get("format") for each in schemes)]:
        if form is not None and form not in _COMPRESSED:
            raise UnsupportedError(
                f"{reader.where} is stored in compressed-tensors' format {form!r}, which is not read here: "
                f"{', '.join(_COMPRESSED)} are. {OTHERWISE}"
            )
    weights = [each["weights"] for each in schemes if isinstance(each.get("weights"), dict)]
    declared = [each.get("block_structure") for each in weights] or [None]
    for name in reader.ending("weight_packed"):
        yield _pack_quantized(reader, name, [each.get("num_bits") for each in weights])
    for name in reader.ending("weight_scale"):
        if f"{name}weight_packed" in reader.stored:
            continue
        weight, scales = f"{name}weight", reader.part("scales", f"{name}weight_scale", f"{name}weight")
        codes = reader.part("codes", weight, weight)
        if codes[2].dtype in FLOATS:
            continue  # scales beside plain weights, which compressed-tensors calls dense
        reader.check(codes, (*FLOAT_CODES, torch.int8), (codes[2].shape,))
        zeros = f"{name}weight_zero_point"
        parts = [codes, scales]
        if zeros in reader.stored:
            parts.append(reader.part("zeros", zeros, weight))
            reader.check(parts[-1], (torch.int8, *FLOATS, *FLOAT_CODES), (scales[2].shape,))
        blocks = {reader.block(parts, codes[2].shape, each) for each in declared}
        if len(blocks) > 1:
            raise UnsupportedError(
                f"{reader.where}: which block of {weight} a scale belongs to is not clear from the config, which has "
                f"several block_structures. {OTHERWISE}"
            )
        yield ScaledMatrix(
            weight, codes[2].shape, reader.dtype, tuple(parts), blocks.pop(), reader.scaling(weight, torch.float32)
        )


def _pack_quantized(reader: _Reader, name: str, declared: list[Any]) -> PackedWeight:
    weight = f"{name}weight"
    codes, scales, shape = (
        reader.part(role, f"{name}weight_{end}", weight)
        for role, end in (("codes", "packed"), ("scales", "scale"), ("shape", "shape"))
    )
    reader.check(shape, (torch.int64, torch.int32), ((2,),))
    size = tuple(int(each) for each in shape[2].read())
    words = codes[2].shape
    outputs = words[0] if len(words) == 2 else 0
    fitting = [bits for bits in range(1, _MOST_BITS + 1) if outputs and words[1] == words_for(max(size[1], 1), bits)]
    bits = next((each for each in declared if each in fitting), None)
    if bits is None or size[0] != outputs or size[1] < 1:
        raise MismatchError(
            f"{reader.where}: {codes[1]} of shape {list(words)} does not hold a weight of shape {list(size)} in any of "
            f"the numbers of bits that the config names ({declared}). Download the model again."
        )
    reader.check(codes, (torch.int32,), (words,))
    count = scales[2].shape[-1] if len(scales[2].shape) == 2 else 1
    whole = (1, 1) if len(scales[2].shape) == 2 else (1,)
    reader.check(scales, _FLOAT_SCALES, ((outputs, count if count and size[1] % count == 0 else 1), whole))
    parts = [codes, scales, shape]
    if f"{name}weight_zero_point" in reader.stored:
        zeros = reader.part("zeros", f"{name}weight_zero_point", weight)
        reader.check(zeros, (torch.int32,), ((words_for(outputs, bits), count),))
        parts.append(zeros)
    if f"{name}weight_g_idx" in reader.stored:
        groups = reader.part("groups", f"{name}weight_g_idx", weight)
        reader.check(groups, (torch.int32, torch.int64), ((size[1],),))
        parts.append(groups)
    product = reader.scaling(weight, scales[2].dtype)
    return PackQuantized(weight, size, reader.dtype, tuple(parts), bits, size[1] // count, product)


# GPTQ and AWQ.


def _gptq(reader: _Reader) -> Iterator[PackedWeight]:
    form, bits = reader.settings.get("checkpoint_format", "gptq"), reader.number("bits")
    if form not in ("gptq", "gptq_v2") or bits not in range(2, _MOST_BITS + 1):
        raise UnsupportedError(
            f"{reader.where} is stored by GPTQ as {form!r} in {bits} bits, which is not read here: 'gptq' and "
            f"'gptq_v2' in 2 to {_MOST_BITS} are. {OTHERWISE}"
        )
    for name in reader.ending("qweight"):
        words = reader.stored[f"{name}qweight"].shape
        inputs = words[0] * 32 // bits if words else 0
        parts, outputs, group = _transposed(reader, name, bits, inputs)
        reader.check(parts[0], (torch.int32,), ((words_for(inputs, bits), outputs),))
        if f"{name}g_idx" in reader.stored:
            parts.append(reader.part("groups", f"{name}g_idx", f"{name}weight"))
            reader.check(parts[-1], (torch.int32, torch.int64), ((inputs,),))
        size = (outputs, inputs)
        yield Gptq(f"{name}weight", size, reader.dtype, tuple(parts), bits, group, parts[1][2].dtype, form == "gptq")


def _awq(reader: _Reader) -> Iterator[PackedWeight]:
    form, bits = str(reader.settings.get("version", reader.settings.get("format", "gemm"))), reader.number("bits")
    if form.lower() != "gemm" or bits != AWQ_BITS:
        raise UnsupportedError(
            f"{reader.where} is stored by AWQ as {form!r} in {bits} bits, which is not read here: 'gemm' in {AWQ_BITS} "
            f"is. {OTHERWISE}"
        )
    for name in reader.ending("qweight"):
        words = reader.stored[f"{name}qweight"].shape
        inputs = words[0] if words else 0
        parts, outputs, group = _transposed(reader, name, bits, inputs)
        reader.check(parts[0], (torch.int32,), ((inputs, words_for(outputs, bits)),))
        yield Awq(f"{name}weight", (outputs, inputs), reader.dtype, tuple(parts), bits, group, parts[1][2].dtype)


def _transposed(reader: _Reader, name: str, bits: int, inputs: int) -> tuple[list[PackedPart], int, int]:
    """The parts that GPTQ and AWQ share, how many outputs there are, and how many inputs share a scale."""
    weight = f"{name}weight"
    roles = (("codes", "qweight"), ("scales", "scales"), ("zeros", "qzeros"))
    codes, scales, zeros = (reader.part(role, f"{name}{end}", weight) for role, end in roles)
    group, shape = reader.number("group_size"), scales[2].shape
    group = inputs if group < 1 else group
    outputs = max(1, shape[-1]) if shape else 1
    groups = -(-inputs // max(1, group))
    reader.check(scales, _FLOAT_SCALES, ((groups, outputs),))
    reader.check(zeros, (torch.int32,), ((groups, words_for(outputs, bits)),))
    if not inputs or outputs * bits % 32:
        reader.check(codes, (), ((32, 32),))
    return [codes, scales, zeros], outputs, group


_METHODS: dict[str, Callable[[_Reader], Iterator[PackedWeight]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
