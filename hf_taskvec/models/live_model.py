"""Live models: their weights under canonical names, to read and to write.

A weight is whatever `save_pretrained` stores: a parameter, or a persistent buffer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hf_taskvec.algebra.blocks import Block
from hf_taskvec.algebra.sources import InMemory, Source
from hf_taskvec.errors import MismatchError, UnsupportedError
from hf_taskvec.models.checkpoint import Checkpoint, canonical_tensors
from hf_taskvec.models.layout import Layout, layout_of_model, unwrapped, without_peft
from hf_taskvec.models.model_classes import class_of_model
from hf_taskvec.models.restructured import HeldPart, Part, can_be_sharded, held_of_parts
from hf_taskvec.models.sharded_weights import Gathered, block_of, is_sharded, local_part, reshard, without_wrappers


def live_checkpoint(model: torch.nn.Module) -> Checkpoint:
    """A live model's own tensors under canonical names: not copies, so for immediate use only.

    Offloaded weights are brought to the CPU. Of a PEFT-wrapped model these are the base model's weights. Those that are
    sharded over processes are gathered when they are read, by all of the processes in one order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    inner = without_peft(without_wrappers(model))
    kind = class_name(inner)
    what = f"live {kind}"
    layout = layout_of_model(inner)
    weights = _stored_weights(inner, layout)
    held = {weight.name: weight.whole() for weight in weights}
    if layout.renamed or layout.restructured:
        # transformers remembers which conversions the model's own files needed; canonical names are those of all.
        plain = object.__new__(type(inner))  # copy.copy() would make a new model of one that `fully_shard` sharded
        plain.__dict__ = {**vars(inner), "_weight_conversions": None}
        state = revert_weight_conversion(plain, {name: source.read() for name, source in held.items()})
        held = {name: InMemory(tensor) for name, tensor in state.items()}
    stored: dict[str, Source] = held
    placed = layout.place(stored, what, [kind])
    integers = [weight.name for weight in weights if weight.is_constant] if not layout.shapes else layout.constants
    tensors, constants = canonical_tensors(placed, stored, layout, what, [kind], integers)
    config = inner.config.to_dict() if layout.architecture else {}
    return Checkpoint(name=what, tensors=tensors, layout=layout, config=config, constants=constants)


@dataclass
class LiveWeight:
    """One parameter or buffer of a live model, wherever it is held: on a device, or offloaded by accelerate."""

    name: str
    module: torch.nn.Module
    attribute: str
    #: every layer that uses the parameter (several if it is tied), and as what
    owners: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    #: PEFT trains a copy of it (`modules_to_save`, trained tokens), and the model uses that one
    is_shadowed: bool = False

    @property
    def _parameter(self) -> torch.Tensor:
        found = self.module._parameters.get(self.attribute)
        return self.module._buffers[self.attribute] if found is None else found  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self._parameter.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._parameter.shape)

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold parts of it."""
        return is_sharded(self._parameter)

    @property
    def sharded(self) -> Any:
        """The parameter as a `DTensor`."""
        return self._parameter.data

    @cached_property
    def block(self) -> Block | None:
        """Which part this process holds; `None` if that is the whole."""
        return block_of(self.sharded, self.name) if self.is_sharded else None

    @property
    def is_constant(self) -> bool:
        """Whether it is an integer buffer, which no vector changes."""
        return self.attribute in self.module._buffers and not self.dtype.is_floating_point

    @property
    def is_quantised(self) -> bool:
        """Whether bitsandbytes (or another library) holds it in fewer than 16 bits."""
        return type(self._parameter).__name__ in ("Params4bit", "Int8Params") or self.dtype.itemsize < 2

    @property
    def is_offloaded(self) -> bool:
        """Whether accelerate keeps it on the CPU or on disk, and leaves a tensor without data in its place."""
        return self._parameter.is_meta

    @property
    def is_on_cpu(self) -> bool:
        """Whether it is in the memory of the CPU, where the model uses it."""
        return self._parameter.device.type == "cpu"

    @property
    def is_in_place(self) -> bool:
        """Whether what is written to `value()` is in the model."""
        return not self.is_offloaded

    @property
    def parameter(self) -> torch.nn.Parameter | None:
        """The live parameter that it is; None for a buffer."""
        return self.module._parameters.get(self.attribute)

    def as_source(self) -> Source:
        """The parameter's shape, for checks; of a quantised layer the shape that it stands for."""
        shape = self.shape
        if self.is_quantised:
            shape = (self.module.out_features, self.module.in_features)  # type: ignore[assignment]
        return InMemory(torch.empty(shape, device="meta"))

    def _offloads(self) -> Iterator[tuple[Any, str]]:
        """Where accelerate stores the offloaded weight, and under which key: once for each layer that uses it."""
        for module, attribute in self.owners:
            hook: Any = vars(module).get("_hf_hook")
            if hook is None:
                raise UnsupportedError(
                    f"{self.name} is on the meta device and has no values, and accelerate did not put them elsewhere. "
                    "Load the model's weights first, e.g. with from_pretrained()."
                )
            hooks = getattr(hook, "hooks", [hook])
            weights = next(each.weights_map for each in hooks if getattr(each, "weights_map", None) is not None)
            yield weights.dataset, weights.prefix + attribute

    def whole(self) -> Source:
        """The parameter as it is now, for immediate use; of a sharded one all parts, when it is read."""
        return Gathered(self.sharded) if self.is_sharded else InMemory(self.value().detach().cpu())

    def value(self) -> torch.Tensor:
        """The tensor itself, or what is stored of it elsewhere; of a sharded one what this process holds."""
        if not self.is_offloaded:
            return local_part(self._parameter)
        dataset, key = next(self._offloads())
        return dataset[key]

    def write(self, value: torch.Tensor) -> None:
        """Put another value in the parameter's place; an offloaded one is held by the CPU from then on."""
        if not self.is_offloaded:
            local_part(self._parameter).copy_(value)
            return
        for dataset, key in self._offloads():
            _in_memory(dataset)[key] = value

    def original(self) -> Source:
        """What the parameter holds now, whatever becomes of it.

        If it is offloaded to disk it is read from there again, else it is a copy.
        """
        value = self.value().detach()
        if self.is_offloaded:
            dataset, key = next(self._offloads())
            if _in_memory(dataset) is not dataset and key not in dataset.state_dict:
                return OnDisk(dataset, key, value.to("meta"))
        return InMemory(value.cpu().clone())

    def restore(self, original: Source) -> None:
        """Put the original back; what is offloaded to disk is read from there again."""
        if not isinstance(original, OnDisk):
            self.write(original.read())
            return
        for dataset, key in self._offloads():
            if key in dataset.index:
                dataset.state_dict.pop(key, None)
            else:
                dataset.state_dict[key] = original.read()


class PartedWeight(LiveWeight):
    """A stored tensor that is no live parameter of its own, but parts of some: an expert, projections in one piece.

    Args:
        name (`str`):
            The stored tensor's.
        weights (`Sequence[LiveWeight]`):
            Live parameters.
        parts (`Sequence[Part]`):
            Which part of each it is.

    """

    def __init__(self, name: str, weights: Sequence[LiveWeight], parts: Sequence[Part]) -> None:
        owners = [owner for weight in weights for owner in weight.owners]
        first, shadowed = weights[0], any(weight.is_shadowed for weight in weights)
        super().__init__(name, first.module, first.attribute, owners, shadowed)
        self._weights, self._whole_parts = weights, parts

    @cached_property
    def _held(self) -> tuple[Block, list[HeldPart]] | None:
        """Which block of it this process holds, and where that is in what it holds of each live parameter."""
        blocks = [(weight.shape, weight.block) for weight in self._weights]
        held = [
            part.held(shape, block)
            for part, (shape, block) in zip(self._whole_parts, blocks, strict=True)
            if block is not None
        ]
        return held_of_parts(self._whole_parts, held) if held else None

    @cached_property
    def block(self) -> Block | None:
        """Which part of it this process holds; `None` if that is the whole."""
        return None if self._held is None else self._held[0]

    @property
    def _parts(self) -> Iterator[tuple[LiveWeight, Part | HeldPart]]:
        """Each live parameter, and where in it (or in what this process holds of it) the stored tensor is."""
        parts = self._whole_parts if self._held is None else self._held[1]
        return zip(self._weights, parts, strict=True)

    def _view(self, parameter: torch.Tensor, weight: LiveWeight, part: Part | HeldPart) -> torch.Tensor:
        if isinstance(part, Part) and not parameter.is_contiguous():
            raise UnsupportedError(
                f"{weight.name} is not contiguous in the live model, so {self.name} cannot be found in it. Make it so: "
                "parameter.data = parameter.data.contiguous()."
            )
        return part.of_live(parameter)

    @property
    def parameter(self) -> None:
        """None: it is a part of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, as it is stored."""
        last = self._whole_parts[-1]
        shape = list(last.shape)
        if shape:
            shape[last.dim] += last.start
        return tuple(shape)

    @property
    def is_quantised(self) -> bool:
        """Whether one of the live parameters is quantised."""
        return any(weight.is_quantised for weight in self._weights)

    @property
    def is_offloaded(self) -> bool:
        """Whether one of the live parameters is offloaded."""
        return any(weight.is_offloaded for weight in self._weights)

    @property
    def is_on_cpu(self) -> bool:
        """Whether all of the live parameters are on the CPU."""
        return all(weight.is_on_cpu for weight in self._weights)

    @property
    def is_in_place(self) -> bool:
        """Whether what is written to `value()` is in the model: not if it is put together."""
        return len(self._weights) == 1 and not self.is_offloaded

    def as_source(self) -> Source:
        """Its shape, for checks."""
        return InMemory(torch.empty(self.shape, device="meta"))

    def value(self) -> torch.Tensor:
        """A view of the live parameter; of several, a copy."""
        found = [self._view(weight.value(), weight, part) for weight, part in self._parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=self._whole_parts[0].dim)

    def write(self, value: torch.Tensor) -> None:
        """Put another value in its place in the live parameters."""
        for weight, part in self._parts:
            whole = weight.value().clone() if weight.is_offloaded else weight.value()
            self._view(whole, weight, part).copy_(part.of_stored(value))
            if weight.is_offloaded:
                weight.write(whole)

    def original(self) -> Source:
        """A copy of what it is now."""
        return InMemory(self.value().detach().cpu().clone(memory_format=torch.contiguous_format))

    def restore(self, original: Source) -> None:
        """Put the original back."""
        self.write(original.read())


@dataclass(frozen=True, eq=False)
class OnDisk(Source):
    """A weight that accelerate offloaded to disk, whatever is held in memory in its place."""

    dataset: Any
    key: str
    like: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.like.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.like.dtype

    def read(self) -> torch.Tensor:
        """The weight as it is on disk."""
        from accelerate.utils import OffloadedWeightsLoader

        return OffloadedWeightsLoader({}, self.dataset.save_folder, self.dataset.index)[self.key]


def _in_memory(dataset: Any) -> dict[str, torch.Tensor]:
    """The part of accelerate's store that is in memory, which takes precedence over what is on disk."""
    from accelerate.utils import OffloadedWeightsLoader

    return dataset.state_dict if isinstance(dataset, OffloadedWeightsLoader) else dataset


def class_name(model: torch.nn.Module) -> str:
    """The name of a model's class, without what `fully_shard` makes of it."""
    return (class_of_model(model) or type(model)).__name__


def live_weights(model: torch.nn.Module) -> dict[str, LiveWeight]:
    """Canonical name -> the live weight; tied ones once, and of what is stored in another form the parts.

    What cannot be told by parts, because transformers puts the elements in another order (or processes hold pieces of
    the live parameters that are no block of it), is left out.

    Raises:
        `MismatchError`: If the config ties weights that the live model holds apart.
        `UnsupportedError`: If weights are sharded by FullyShardedDataParallel, FSDP's first version.
    """
    inner = without_peft(without_wrappers(model))
    layout = layout_of_model(inner)
    kind = class_name(inner)
    found = {weight.name: weight for weight in _stored_weights(inner, layout) if not weight.is_constant}
    alike = [name for name in found if not layout.live_form(name)]
    weights = {canonical: found[name] for canonical, name in layout.place(alike, f"live {kind}", [kind]).items()}
    for alias, owner in layout.tied.items():
        if alias in weights and owner in weights:
            same = weights[alias]._parameter is weights[owner]._parameter
            if not same and not weights[owner].is_offloaded and not weights[alias].is_shadowed:
                raise MismatchError(
                    f"the config ties {alias} to {owner}, but the live model has two separate weights. Call "
                    "model.tie_weights(), or set model.config.tie_word_embeddings = False."
                )
            weights[owner].owners += weights.pop(alias).owners
    for name, parts in layout.parts.items():
        inside = [found.get(part.live) or found.get(part.live.removeprefix(layout.prefix)) for part in parts]
        present = [weight for weight in inside if weight is not None]
        if len(present) == len(parts) and _can_be_told(present, parts):
            weights[name] = PartedWeight(name, present, parts)
    return weights


def _can_be_told(weights: Sequence[LiveWeight], parts: Sequence[Part]) -> bool:
    """Whether each process can tell what it holds of a stored tensor that consists of these parts: the same for all."""
    sharded = [weight.sharded for weight in weights if weight.is_sharded]
    alike = {(each.device_mesh, each.placements) for each in sharded}
    if not sharded:
        return True
    return (
        len(sharded) == len(weights) and len(alike) == 1 and can_be_sharded(parts, [weight.shape for weight in weights])
    )


def _stored_weights(model: Any, layout: Layout) -> list[LiveWeight]:
    """Without what the class never saves, such as positions that are calculated; tied weights are of those saved."""
    never = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) - set(layout.tied)
    return [weight for weight in _all_weights(model) if weight.name not in never]


def _all_weights(model: torch.nn.Module) -> list[LiveWeight]:
    """Everything that is stored of the model, named as without PEFT's wrappers; what PEFT added is left out."""
    weights = []
    reshard(model)
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "the model is sharded by FullyShardedDataParallel, which keeps its weights in flat pieces without "
                "names. Shard it with torch.distributed.fsdp.fully_shard (fsdp_version: 2 in accelerate)."
            )
        for attribute in _own_tensors(module):
            name = unwrapped(f"{path}.{attribute}" if path else attribute)
            if name is None:
                continue
            shadowed = bool({"original_module", "token_adapter"} & set(path.split(".")))
            weights.append(LiveWeight(name, module, attribute, [(module, attribute)], shadowed))
    return weights


def _own_tensors(module: torch.nn.Module) -> list[str]:
    """The names of a module's own parameters, and of its buffers but for those that are not stored."""
    buffers = [(n, each) for n, each in module._buffers.items() if n not in module._non_persistent_buffers_set]
    found = [name for name, each in [*module._parameters.items(), *buffers] if each is not None]
    if "quantization_scheme" in vars(module):  # compressed-tensors leaves what it unpacked a weight of beside it
        return [name for name in found if not name.startswith(("weight_", "input_", "output_"))]
    return found
