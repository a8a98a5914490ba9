"""Which matrices of a model are known by their names, and how a fused one is divided."""

import pytest

from hf_taskvec.algebra.matrix_kinds import MatrixPlace, fused_rows, place_of
from hf_taskvec.errors import MismatchError


def test_what_is_no_matrix_of_a_layer_has_no_place() -> None:
    for name in ("lm_head.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.gate.weight"):
        assert place_of(name) is None


def test_cross_attention_has_no_place() -> None:
    """Its names are like those of attention, and its sizes are others."""
    assert place_of("transformer.h.0.attn.c_attn.weight") == MatrixPlace(0, "QKV")
    assert place_of("transformer.h.0.crossattention.c_attn.weight") is None


def test_a_fused_matrix_is_divided_as_the_config_says() -> None:
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    assert fused_rows(name, 48, 16, {"num_attention_heads": 2}) == {
        "Q": [range(8), range(24, 32)],
        "K": [range(8, 16), range(32, 40)],
        "V": [range(16, 24), range(40, 48)],
    }
    assert fused_rows(name, 48, 16, {}) is None
    with pytest.raises(MismatchError, match="320 outputs, which cannot be shared by Q, K and V in 9 equal parts"):
        fused_rows(name, 320, 90, {"num_attention_heads": 3})
