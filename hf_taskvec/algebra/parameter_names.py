"""What the name of a parameter tells about it: its layer, its part, its group, and whether it is of the vocabulary.

Names are canonical ones, as transformers writes them to disk.
"""

import re
from collections.abc import Iterable
from numbers import Integral
from typing import Literal, get_args

from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean

#: how parameters are put into groups that have something in common, such as one coefficient
Grouping = Literal["tensor", "layer", "kind", "vector"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_VOCABULARY = re.compile(r"(embed_tokens|embed_in|embed_out|wte|word_embeddings|lm_head)\.(weight|bias)$")
# Layers that GPT-2 stores transposed and GPT-Neo or GPTBigCode, by the same names, as they are.
_PERHAPS_CONV1D = re.compile(r"(^|\.)h\.\d+\.(attn|mlp)\.(c_attn|c_proj|c_fc)\.weight$")
_BEFORE_LAYERS = re.compile(
    r"(^|\.)(embed_(?!out)\w*|embeddings|wte|wpe|word_embeddings\w*|embedding_norm)\.(\w+\.)?\w+$"
)
_PERHAPS_TIED = re.compile(r"(^|\.)(embed_\w+|wte|wpe|word_embeddings)\.weight$")


def layer_of(name: str) -> int | None:
    """The number of the layer that a parameter belongs to, if any.

    >>> layer_of("transformer.h.11.ln_1.bias"), layer_of("lm_head.weight")
    (11, None)
    """
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def in_layer(name: str, number: int) -> str:
    """The name that a layer's parameter has in another layer.

    >>> in_layer("transformer.h.11.ln_1.bias", 3)
    'transformer.h.3.ln_1.bias'
    """
    found = _LAYER.search(name)
    return name if found is None else f"{name[: found.start(1)]}{number}{name[found.end(1) :]}"


def layer_count(names: Iterable[str]) -> int:
    """How many layers parameters of these names reach, counted from the first.

    >>> layer_count(["model.embed_tokens.weight", "model.layers.3.mlp.fc1.bias"])
    4
    """
    return max((layer + 1 for name in names if (layer := layer_of(name)) is not None), default=0)


def layer_numbers(layers: int | Iterable[int], count: int) -> list[int]:
    """The numbers of some of `count` layers, each once and in order; negative ones count from the end.

    >>> layer_numbers(range(-2, 0), 24), layer_numbers(3, 24)
    ([22, 23], [3])
    """
    if isinstance(layers, str) or not isinstance(layers, Integral | Iterable):
        raise BadValueError(f"layers={layers!r} must be a number or a range of numbers, such as range(4, 8).")
    found = set()
    for each in [layers] if isinstance(layers, Integral) else layers:
        if isinstance(each, bool) or not isinstance(each, Integral):
            raise BadValueError(f"layers={layers!r}: the number of a layer is a whole number, and {each!r} is not.")
        number = int(each)
        if not -count <= number < count:
            there = f"has the layers 0 to {count - 1}; negative numbers count from the end" if count else "has no layer"
            raise BadValueError(f"layers={layers!r}: there is no layer {number}. The vector {there}.")
        found.add(number % count)
    if not found:
        raise BadValueError(f"layers={layers!r} chooses no layer. As in Python, range(4, 8) is from 4 to 7.")
    return sorted(found)


def part_of(name: str) -> str:
    """What a parameter is within its layer, or within the model.

    >>> part_of("model.layers.3.mlp.up_proj.weight"), part_of("model.embed_tokens.weight")
    ('mlp.up_proj', 'embed_tokens')
    """
    found = _LAYER.search(name)
    return (name[found.end() :] if found else name.removeprefix("model.")).removesuffix(".weight")


def group_of(name: str, by: Grouping) -> str:
    """The group that a parameter belongs to.

    Args:
        name (`str`):
            The parameter.
        by (`str`):
            `"tensor"`: each is a group of its own. `"layer"`: those of a layer are one; what is in no layer is by
            itself. `"kind"`: what has the same place in all layers (and in all experts) is one. `"vector"`: all are
            one, called `all`.

    Raises:
        `MissingNameError`: If there is no such grouping.

    >>> name = "model.layers.3.mlp.up_proj.weight"
    >>> [group_of(name, by) for by in GROUPINGS]
    ['model.layers.3.mlp.up_proj.weight', 'layer 3', 'mlp.up_proj', 'all']
    >>> group_of("lm_head.weight", "layer"), group_of("model.layers.0.mlp.experts.7.w1.weight", "kind")
    ('lm_head', 'mlp.experts.*.w1')
    """
    if by not in GROUPINGS:
        hint = did_you_mean(str(by), GROUPINGS)
        raise MissingNameError(f"no grouping by={by!r}.{hint} It is one of {', '.join(GROUPINGS)}.")
    if by == "vector":
        return "all"
    if by == "tensor":
        return name
    layer = layer_of(name)
    if by == "layer" and layer is not None:
        return f"layer {layer}"
    return _EXPERT.sub("*", part_of(name))


def is_vocabulary(name: str) -> bool:
    """Whether a parameter has one row for each token.

    >>> is_vocabulary("transformer.wte.weight"), is_vocabulary("transformer.h.0.mlp.c_fc.weight")
    (True, False)
    """
    return bool(_VOCABULARY.search(name))


def is_before_layers(name: str) -> bool:
    """Whether a parameter is used before the layers, as embeddings are; the last norm and the head are not.

    >>> is_before_layers("model.embed_tokens.weight"), is_before_layers("transformer.ln_f.bias")
    (True, False)
    """
    return layer_of(name) is None and bool(_BEFORE_LAYERS.search(name))


def perhaps_conv1d(name: str) -> bool:
    """Whether it takes the base's config to tell if a weight of this name is stored transposed.

    >>> perhaps_conv1d("transformer.h.0.attn.c_proj.weight"), perhaps_conv1d("model.layers.0.mlp.fc1.weight")
    (True, False)
    """
    return bool(_PERHAPS_CONV1D.search(name))


def perhaps_tied(name: str) -> bool:
    """Whether a parameter is an embedding, by its name: it takes the base's config to tell if a head shares it.

    >>> perhaps_tied("transformer.wte.weight"), perhaps_tied("lm_head.weight")
    (True, False)
    """
    return bool(_PERHAPS_TIED.search(name))
