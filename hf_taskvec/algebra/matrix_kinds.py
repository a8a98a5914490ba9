"""Which matrix of a transformer a parameter is: its layer, its kind (Q, K, V, O, QKV, MLP-1, MLP-2), fused or not.

Names are the canonical ones (`models/layout.py`), so one table serves files, live models and vectors.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_taskvec.algebra.parameter_names import perhaps_conv1d
from hf_taskvec.errors import MismatchError

Kind = Literal["Q", "K", "V", "O", "QKV", "MLP-1", "MLP-2"]
KINDS: tuple[Kind, ...] = ("Q", "K", "V", "O", "QKV", "MLP-1", "MLP-2")

# Fewer lists of layers than `parameter_names.layer_of` knows: in MPT (`blocks`) nothing has a kind, since the table
# below lacks the name of its attention (`Wqkv`); nor in Swin, whose `layers` are stages of several blocks.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|layer|block)\.(\d+)\.(?!blocks\.)(.+)\.weight$")
_CROSS = re.compile(r"(?:^|\.)(?:crossattention|cross_attn|encoder_attn|EncDecAttention)\.")
_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)$")
# The end of a name -> its kind, the longer ends before the shorter ones. `c_proj` and `dense` are told apart by the
# modules that they are in.
_KINDS: dict[str, Kind] = {
    "q_proj": "Q",
    "k_proj": "K",
    "v_proj": "V",
    "o_proj": "O",
    "out_proj": "O",
    "self_attn.dense": "O",
    "attention.dense": "O",
    "attn.c_proj": "O",
    "qkv_proj": "QKV",
    "query_key_value": "QKV",
    "c_attn": "QKV",
    "gate_up_proj": "MLP-1",
    "gate_proj": "MLP-1",
    "up_proj": "MLP-1",
    "w1": "MLP-1",
    "w3": "MLP-1",
    "fc1": "MLP-1",
    "fc_in": "MLP-1",
    "c_fc": "MLP-1",
    "dense_h_to_4h": "MLP-1",
    "down_proj": "MLP-2",
    "w2": "MLP-2",
    "fc2": "MLP-2",
    "fc_out": "MLP-2",
    "mlp.c_proj": "MLP-2",
    "dense_4h_to_h": "MLP-2",
    # BERT, and with `attention` twice ViT
    **dict.fromkeys(("self.query", "attention.query"), "Q"),
    **dict.fromkeys(("self.key", "attention.key"), "K"),
    **dict.fromkeys(("self.value", "attention.value"), "V"),
    "attention.output.dense": "O",
    "intermediate.dense": "MLP-1",
    "output.dense": "MLP-2",
    # T5
    "SelfAttention.q": "Q",
    "SelfAttention.k": "K",
    "SelfAttention.v": "V",
    "SelfAttention.o": "O",
    **dict.fromkeys(("DenseReluDense.wi", "DenseReluDense.wi_0", "DenseReluDense.wi_1"), "MLP-1"),
    "DenseReluDense.wo": "MLP-2",
}


@dataclass(frozen=True)
class MatrixPlace:
    """Which matrix of a transformer it is."""

    layer: int
    kind: Kind
    #: its number in a mixture of experts
    expert: int | None = None


def place_of(name: str) -> MatrixPlace | None:
    """The place of a matrix in its transformer; None for what is none of the seven kinds (norms, embeddings, routers).

    Attention to another model's output is none of them either.

    >>> place_of("model.layers.3.self_attn.q_proj.weight")
    MatrixPlace(layer=3, kind='Q', expert=None)
    >>> place_of("transformer.h.0.mlp.c_proj.weight").kind, place_of("transformer.h.0.attn.c_proj.weight").kind
    ('MLP-2', 'O')
    """
    found = _LAYER.search(name)
    if found is None or _CROSS.search(name):
        return None
    layer, rest = int(found[1]), found[2]
    expert = _EXPERT.search(rest)
    modules = rest.split(".")
    kind = next((known for n in (3, 2, 1) if (known := _KINDS.get(".".join(modules[-n:])))), None)
    return None if kind is None else MatrixPlace(layer, kind, int(expert[1]) if expert else None)


def is_transposed(name: str, shape: tuple[int, ...], conv1d: frozenset[str] | None = None) -> bool:
    """Whether outputs lie along axis 1, as GPT-2's `Conv1D` has it.

    Args:
        name (`str`):
            The parameter.
        shape (`tuple[int, ...]`):
            Its shape as it is stored.
        conv1d (`frozenset[str]`, *optional*):
            The names of which it is known. Without them it is told from GPT-2's names and shapes: the inner size of an
            MLP and of QKV is the larger one, and GPT-2's O, which is square, counts as transposed.
    """
    if conv1d is not None:
        return name in conv1d
    if not perhaps_conv1d(name):
        return False
    return shape[0] >= shape[1] if name.endswith("mlp.c_proj.weight") else shape[0] <= shape[1]


def stores_transposed(architecture: str) -> bool:
    """Whether a model class stores attention and MLPs transposed (`Conv1D`), told from its name.

    >>> stores_transposed("GPT2LMHeadModel"), stores_transposed("GPTBigCodeForCausalLM")
    (True, False)
    """
    return architecture.startswith(("GPT2", "OpenAIGPT"))


def transposed_among(names: Iterable[str], architectures: Iterable[str]) -> frozenset[str] | None:
    """The weights that the architectures a vector was made from store transposed; None if no architecture is known.

    >>> sorted(transposed_among(["h.0.mlp.c_fc.weight", "wte.weight"], ["GPT2LMHeadModel"]))
    ['h.0.mlp.c_fc.weight']
    """
    known = tuple(architectures)
    if not known:
        return None
    return frozenset(filter(perhaps_conv1d, names)) if any(map(stores_transposed, known)) else frozenset()


def fused_rows(name: str, outputs: int, inputs: int, config: Mapping[str, Any]) -> dict[Kind, list[range]] | None:
    """Which outputs of a fused QKV matrix are Q, K and V; None if neither the name nor the config tells.

    Args:
        name (`str`):
            The matrix.
        outputs (`int`):
            How many outputs it has.
        inputs (`int`):
            How many inputs it has.
        config (`Mapping[str, Any]`):
            Of its model.

    Raises:
        `MismatchError`: If the config's numbers of heads do not divide the outputs.
    """
    if name.endswith("c_attn.weight"):
        if outputs != 3 * inputs:  # keys and values that heads share, as StarCoder's
            return None
        third = outputs // 3
        return {"Q": [range(third)], "K": [range(third, 2 * third)], "V": [range(2 * third, outputs)]}
    heads = config.get("num_attention_heads")
    if not heads:
        return None
    if name.endswith("query_key_value.weight"):  # GPT-NeoX: q, k and v of one head after those of another
        size = _share(name, outputs, 3 * heads)
        starts = range(0, outputs, 3 * size)
        kinds: tuple[Kind, ...] = ("Q", "K", "V")
        return {kind: [range(s + i * size, s + (i + 1) * size) for s in starts] for i, kind in enumerate(kinds)}
    pairs = config.get("num_key_value_heads") or heads
    size = _share(name, outputs, heads + 2 * pairs)
    first, second = heads * size, (heads + pairs) * size
    return {"Q": [range(first)], "K": [range(first, second)], "V": [range(second, outputs)]}


def _share(name: str, outputs: int, count: int) -> int:
    """How many outputs each of `count` equal parts has."""
    if outputs % count:
        raise MismatchError(
            f"{name} has {outputs} outputs, which cannot be shared by Q, K and V in {count} equal parts: the config is "
            "another model's."
        )
    return outputs // count
