"""What a checkpoint will hold: its tensors, in which files, and its config."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch

from hf_taskvec.algebra.rounding import dtype_name
from hf_taskvec.algebra.sums import Term
from hf_taskvec.application.checkpoint_writing import OutputFiles, OutputTensor, PackedOutput
from hf_taskvec.application.token_rows import PlacedRows
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.files.safetensors_writer import TensorSpec, shard
from hf_taskvec.models.checkpoint import Checkpoint
from hf_taskvec.models.tensor_files import file_of
from hf_taskvec.models.vocabulary_size import grown_config
from hf_taskvec.quantised.packed_weight import PackedWeight, ScaledWeight
from hf_taskvec.sizes import parse_size

#: what becomes of a base whose weights are stored in fewer bits
RequantiseChoice = Literal["same", "bf16"]
_CHOICES: tuple[str, ...] = get_args(RequantiseChoice)

# The stored tensors of a weight that an edit changes; what else belongs to it stays.
_CHANGED_ROLES = ("codes", "scales", "zeros")


def check_choice(
    choice: RequantiseChoice | None, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> RequantiseChoice | None:
    """The choice itself, if it is one for this base.

    Raises:
        `BadValueError`: If it is none, or none is made where one is needed.
    """
    if choice not in (None, *_CHOICES):
        raise BadValueError(f"requantise={choice!r} is not one of {', '.join(map(repr, _CHOICES))}.")
    packed = checkpoint.unpacked.packed
    if not packed and choice is not None:
        raise BadValueError(
            f"requantise={choice!r}, but no weight of {checkpoint.where} is stored in fewer bits. Leave it out."
        )
    if packed and choice is None:
        formats = sorted({each.format_name for each in packed.values()})
        raise BadValueError(
            f"{checkpoint.where} stores {len(packed)} weights as {', '.join(formats)}. Pass requantise='same' to store "
            "the edited weights so again, or requantise='bf16' for a model without quantisation."
        )
    if choice == "same" and dtype is not None:
        raise BadValueError("dtype= cannot be chosen with requantise='same'. Use requantise='bf16'.")
    return choice


def plan_output(
    placed: PlacedRows,
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    max_shard_size: int | str | None,
    requantise: RequantiseChoice | None,
) -> dict[str, dict[str, OutputTensor]]:
    """File -> its tensors, named and ordered as the base stores them; in its files too, unless a size is given.

    Args:
        placed (`PlacedRows`):
            What is to be applied.
        checkpoint (`Checkpoint`):
            The base.
        dtype (`torch.dtype`, *optional*):
            Of the result.
        max_shard_size (`int` or `str`, *optional*):
            The largest size of one file.
        requantise (`str`, *optional*):
            What `check_choice` gave.

    Raises:
        `UnsupportedError`: If a weight cannot be stored as it was.
    """
    vector, stored, canonical = placed.vector, checkpoint.stored, checkpoint.canonical_of
    tensors: dict[str, OutputTensor] = {}
    home: dict[str, str] = {}
    weight_of: dict[str, tuple[ScaledWeight, str]] = {}
    for raw, source in checkpoint.unpacked.weights.items():
        name = canonical.get(raw, raw)
        name = checkpoint.layout.tied.get(name, name)
        terms = vector[name].terms if raw in canonical and name in vector else ()
        if isinstance(source, PackedWeight) and requantise == "same":
            if name in placed.cleared:
                raise UnsupportedError(
                    f"{source.name} gets rows of added tokens, so it cannot be stored as it was. Use requantise='bf16'."
                )
            tensors |= _packed(source, terms, weight_of)
            continue
        to = dtype if dtype is not None and raw in canonical else source.dtype  # buffers stay as they are
        if isinstance(source, PackedWeight) and dtype is None:
            to = torch.bfloat16
        spec = TensorSpec(to, terms[0].delta.shape if terms else source.shape)
        tensors[raw] = OutputTensor(raw, source, terms, spec, cleared=placed.cleared.get(name, ()))
        home[raw] = file_of(source).path.name
    if requantise == "same":
        for raw in checkpoint.unpacked.beside:
            tensors[raw] = OutputTensor(raw, stored[raw], (), TensorSpec(stored[raw].dtype, stored[raw].shape))
    if max_shard_size is None and all(file_of(s).path.suffix == ".safetensors" for s in stored.values()):
        files: dict[str, dict[str, OutputTensor]] = {}
        for raw in (each for each in stored if each in tensors):
            files.setdefault(file_of(stored[raw]).path.name, {})[raw] = tensors.pop(raw)
        for raw, tensor in tensors.items():  # whose stored tensors have other names
            files.setdefault(home[raw], {})[raw] = tensor
    else:
        most = parse_size("5GB" if max_shard_size is None else max_shard_size)
        layout = shard({raw: each.spec for raw, each in tensors.items()}, most, "model")
        files = {file: {raw: tensors[raw] for raw in names} for file, names in layout.items()}
    return {file: _written_together(each, weight_of) for file, each in files.items()}


def _packed(
    weight: PackedWeight, terms: tuple[Term, ...], weight_of: dict[str, tuple[ScaledWeight, str]]
) -> dict[str, OutputTensor]:
    """The stored tensors of a weight, and in `weight_of` for each that an edit changes the weight and its role."""
    if terms and (not isinstance(weight, ScaledWeight) or terms[0].delta.shape != weight.shape):
        why = "grows" if isinstance(weight, ScaledWeight) else f"is stored as {weight.format_name}"
        raise UnsupportedError(f"{weight.name} {why}, so it cannot be stored as it was. Use requantise='bf16'.")
    made = {}
    for role, name, source in weight.parts:
        changed = terms if role in _CHANGED_ROLES else ()
        made[name] = OutputTensor(name, source, changed, TensorSpec(source.dtype, source.shape))
        if changed and isinstance(weight, ScaledWeight):
            weight_of[name] = (weight, role)
    return made


def _written_together(
    tensors: Mapping[str, OutputTensor], weight_of: Mapping[str, tuple[ScaledWeight, str]]
) -> dict[str, OutputTensor]:
    """The tensors of a file, those of one weight knowing each other."""
    together: dict[str, PackedOutput] = {}
    for raw in (each for each in tensors if each in weight_of):
        weight, role = weight_of[raw]
        before = together.get(weight.name, PackedOutput(weight, {}))
        together[weight.name] = PackedOutput(weight, {**before.names, role: raw})
    return {
        raw: replace(tensor, packed=together[weight_of[raw][0].name]) if raw in weight_of else tensor
        for raw, tensor in tensors.items()
    }


def output_config(
    checkpoint: Checkpoint, files: OutputFiles, dtype: torch.dtype | None, requantise: RequantiseChoice | None
) -> dict[str, Any]:
    """The output's config; none for a base without one, which does not get half of one."""
    config = dict(checkpoint.config)
    if not config:
        return config
    if requantise == "bf16":
        config.pop("quantization_config", None)
        dtype = dtype or torch.bfloat16
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype_name(dtype)
    shapes = dict(checkpoint.layout.shapes)
    sizes = set()
    for each in files.values():
        for raw, tensor in each.items():
            if tensor.spec.shape != tensor.source.shape:
                name = checkpoint.canonical_of[raw]
                shapes[checkpoint.layout.tied.get(name, name)] = tensor.spec.shape
                sizes.add((tensor.source.shape[0], tensor.spec.shape[0]))
    return grown_config(config, *min(sizes), shapes) if sizes else config
