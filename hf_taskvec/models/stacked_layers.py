"""A model whose layers are those of other models, in any order and number: what mergekit's slices describe.

Nothing is read: the tensors are those of the models, under other names.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_taskvec.algebra.parameter_names import in_layer, is_before_layers, layer_count, layer_of
from hf_taskvec.algebra.sources import Source
from hf_taskvec.errors import MismatchError, UnsupportedError
from hf_taskvec.models.checkpoint import Checkpoint
from hf_taskvec.models.layout import layout_of_config
from hf_taskvec.quantised.reading import UnpackedModel

# Where configs say how many layers there are, and what they tell of each layer.
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")


def stacked_layers(layers: Sequence[tuple[Checkpoint, int]], ends: tuple[Checkpoint, Checkpoint]) -> Checkpoint:
    """A model of the given layers.

    Args:
        layers (`Sequence[tuple[Checkpoint, int]]`):
            For each layer the model that it is taken from, and its number there.
        ends (`tuple[Checkpoint, Checkpoint]`):
            The models that what comes before the layers (and config and tokenizer), and what comes after them, is taken
            from.

    Returns:
        `Checkpoint`: What `apply` takes as a base.

    Raises:
        `UnsupportedError`: If the models' weights are stored in fewer bits, or the config cannot tell the layers.
        `MismatchError`: If the models' layers are not of one kind.
    """
    first, last = ends
    for model in (first, last, *(model for model, _ in layers)):
        if model.layout.architecture != first.layout.architecture or not model.layout.shapes:
            raise MismatchError(
                f"layers of {first.where} ({first.layout.architecture}) and of {model.where} "
                f"({model.layout.architecture}) cannot be put on each other: give models of one known architecture."
            )
        if model.unpacked.packed or model.constants:
            raise UnsupportedError(
                f"{model.where} has weights that are stored in fewer bits, or tables of integers: its layers cannot be "
                "put into another order. Apply to it first with requantise='bf16'."
            )
    tensors = stacked_tensors(layers, ends)
    config = _config(first, layers)
    layout = layout_of_config(config)
    shapes = {name: source.shape for name, source in tensors.items()}
    layout.check_whole(shapes, f"the model of {len(layers)} layers")
    if extra := shapes.keys() - layout.shapes.keys():
        raise UnsupportedError(f"the config of {first.where} cannot tell of {len(layers)} layers ({min(extra)}).")
    return replace(
        first,
        name=f"{first.name}-{len(layers)}-layers",
        tensors=tensors,
        layout=layout,
        config=config,
        files=(),
        stored=tensors,
        unpacked=UnpackedModel(tensors),
        canonical_of={name: name for name in tensors},
        is_stacked=True,
    )


def stacked_tensors(layers: Sequence[tuple[Checkpoint, int]], ends: tuple[Checkpoint, Checkpoint]) -> dict[str, Source]:
    """The tensors of the layers under the names that they have where they stand, and what is around them."""
    first, last = ends
    found: dict[str, Source] = {}
    for name, source in first.tensors.items():
        if is_before_layers(name):
            found[name] = source
    for number, (model, taken) in enumerate(layers):
        of_layer = {in_layer(name, number): each for name, each in model.tensors.items() if layer_of(name) == taken}
        if not of_layer:
            raise MismatchError(
                f"{model.where} has no layer {taken}: it has {layer_count(model.tensors)}, counted from 0. A range of "
                "layers leaves its end out."
            )
        found |= of_layer
    for name, source in last.tensors.items():
        if layer_of(name) is None and not is_before_layers(name):
            found[name] = source
    return found


def _config(model: Checkpoint, layers: Sequence[tuple[Checkpoint, int]]) -> Mapping[str, Any]:
    config, count = copy.deepcopy(dict(model.config)), layer_count(model.tensors)
    places = [key for key in _COUNTS if config.get(key) == count]
    if not places:
        raise UnsupportedError(
            f"the config of {model.where} does not say in one of {', '.join(_COUNTS)} how many layers there are."
        )
    config[places[0]] = len(layers)
    for key in _LISTS:
        if isinstance(config.get(key), list):
            config[key] = [source.config[key][number] for source, number in layers]
    return config
