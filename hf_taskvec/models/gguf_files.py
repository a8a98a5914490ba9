"""GGUF files of llama.cpp, as transformers reads them: its own tables of names, and the gguf package's dequantisation.

transformers makes fp32 weights of a GGUF file, whatever its blocks hold. Where it only reorders the rows of a matrix,
as of Llama's queries and keys, rows are made when they are asked for; a matrix that it changes in another way is made
whole each time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from hf_taskvec.algebra.sources import Source
from hf_taskvec.errors import MismatchError, UnsupportedError
from hf_taskvec.models.meta_models import build_meta_model, most_parameters
from hf_taskvec.models.tensor_files import StoredTensor, TensorFile
from hf_taskvec.quantised.packed_weight import Opened, PackedWeight
from hf_taskvec.quantised.reading import UnpackedModel

# What transformers does with a tensor beside dequantising it: from a numpy array to another.
_Process = Callable[[Any], Any]


def is_gguf(where: str | Path) -> bool:
    """Whether this is a GGUF file of this machine."""
    path = Path(where)
    return path.suffix == ".gguf" and path.is_file()


@dataclass(frozen=True)
class GgufWeight(PackedWeight):
    """A tensor of a GGUF file as transformers has it; role `blocks`.

    Args:
        kind (`int`):
            ggml's number of the type.
        order (`torch.Tensor`, *optional*):
            The stored row of each row, where they are in another order.
        process (`Callable`, *optional*):
            What transformers makes of the whole tensor, where it does more than that.
    """

    kind: int
    order: torch.Tensor | None = field(default=None, compare=False)
    process: _Process | None = field(default=None, compare=False)

    @property
    @override
    def format_name(self) -> str:
        from gguf import GGMLQuantizationType

        return f"GGUF {GGMLQuantizationType(self.kind).name}"

    @override
    def unpack(self, opened: Opened, start: int, stop: int) -> torch.Tensor:
        blocks = opened["blocks"]
        if self.process is not None:
            whole = torch.from_numpy(self.process(_dequantised(blocks, self.kind)).copy())
            return whole[start:stop]
        rows = blocks[start:stop] if self.order is None else blocks[self.order[start:stop]]
        return torch.from_numpy(_dequantised(rows, self.kind).copy())

    @property
    @override
    def row_unit(self) -> int:
        return self.size[0] if self.process is not None else 1


def _dequantised(blocks: torch.Tensor, kind: int) -> Any:
    from gguf import GGMLQuantizationType, dequantize

    stored = blocks.view(torch.uint8) if blocks.dtype == torch.bfloat16 else blocks
    return dequantize(stored.contiguous().numpy(), GGMLQuantizationType(kind))


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file holds.

    Args:
        config (`Mapping[str, Any]`):
            The config that transformers makes of its metadata.
        stored (`Mapping[str, StoredTensor]`):
            Its tensors under their names in the file.
        unpacked (`UnpackedModel`):
            The weights under their names in transformers.
    """

    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]
    unpacked: UnpackedModel


def open_gguf(path: Path) -> GgufModel:
    """A GGUF file's weights as transformers reads them; no weight is read.

    Raises:
        `UnsupportedError`: If the gguf package is missing, or transformers does not read this architecture.
        `CorruptFileError`: If the file is damaged.
    """
    file = TensorFile(path)
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name).to_dict()
        shapes = {name: _shape(file.header(name)[0], file.kinds[name]) for name in file.names}
        names = _Names(path, settings, shapes)
    except UnsupportedError:
        raise
    except NotImplementedError as error:
        raise UnsupportedError(f"{path.name}: {error}. Convert the model to safetensors in bf16.") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UnsupportedError(
            f"{path.name} is not read by this version of transformers ({type(error).__name__}: {str(error)[:200]}). "
            "Convert the model to safetensors in bf16."
        ) from None
    weights: dict[str, Source] = {}
    stored = {name: StoredTensor(file, name) for name in file.names}
    for name, source in stored.items():
        if name in names.without_weight:
            continue
        weight = names.weight(name, source, file.kinds[name])
        weights[weight.name] = weight
    return GgufModel(settings, stored, UnpackedModel(weights))


class _Names:
    """transformers' tables for one file: which weight a tensor is, and what is to be done with it."""

    #: tables that transformers computes itself
    without_weight = frozenset({"rope_freqs.weight"})

    def __init__(self, path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
        )

        self._file, self._shapes = path.name, shapes
        self._parsed = load_gguf_checkpoint(str(path))
        # transformers finds processors by llama.cpp's name of the architecture, which the file's metadata have
        architecture = _architecture(path)
        self._processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=self._parsed["config"])
        model = build_meta_model(config, most_parameters(config, shapes))
        if any(tensor.ndim == 3 for tensor in model.state_dict().values()):
            raise UnsupportedError(
                f"{path.name} is a mixture of experts, which is not read from GGUF. Convert it to safetensors in bf16."
            )
        self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)

    def _process(self, name: str) -> _Process:
        def process(weights: Any) -> Any:
            return self._processor.process(
                weights=weights, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": {}}
            ).weights

        return process

    def weight(self, name: str, source: StoredTensor, kind: int) -> GgufWeight:
        """The weight that a tensor is."""
        import numpy as np

        if name not in self._names:
            raise MismatchError(
                f"{self._file}: {name} is not among the tensors that transformers knows of this architecture. Convert "
                "the model to safetensors in bf16."
            )
        process, parts = self._process(name), (("blocks", name, source),)
        shape = self._shapes[name]
        found = process(np.broadcast_to(np.float32(0), shape))
        size, order = tuple(found.shape), None
        if len(shape) == 2 and size == shape:
            moved = process(np.arange(shape[0], dtype=np.float64)[:, None]).reshape(-1)
            if sorted(moved.tolist()) == list(range(shape[0])):
                order = torch.from_numpy(moved.astype(np.int64))
                is_same = torch.equal(order, torch.arange(shape[0], device="cpu"))
                return GgufWeight(self._names[name], size, torch.float32, parts, kind, None if is_same else order)
        return GgufWeight(self._names[name], size, torch.float32, parts, kind, None, process)


def _shape(stored: tuple[int, ...], kind: int) -> tuple[int, ...]:
    """The shape of what a tensor of blocks stands for."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return (*stored[:-1], stored[-1] // size * elements) if elements > 1 else stored


def _architecture(path: Path) -> str:
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import read_field

    return str(read_field(GGUFReader(path), "general.architecture")[0])
