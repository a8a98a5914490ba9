"""Which matrices of a model are known by their names, and how a fused one is divided."""

import pytest
from support.tiny_classes import CLASSES

from hf_taskvec.algebra.matrix_kinds import MatrixPlace, fused_rows, place_of
from hf_taskvec.algebra.parameter_names import layer_of
from hf_taskvec.errors import MismatchError
from hf_taskvec.models.layout import layout_of_model


def test_what_is_no_matrix_of_a_layer_has_no_place() -> None:
    for name in ("lm_head.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.gate.weight"):
        assert place_of(name) is None


def test_cross_attention_has_no_place() -> None:
    """Its names are like those of attention, and its sizes are others."""
    assert place_of("transformer.h.0.attn.c_attn.weight") == MatrixPlace(0, "QKV")
    assert place_of("transformer.h.0.crossattention.c_attn.weight") is None


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "ViTForImageClassification", "T5EncoderModel"])
def test_every_matrix_of_an_encoder_s_layers_has_its_place(name: str) -> None:
    shapes = layout_of_model(CLASSES[name].make()).shapes
    inside = [each for each, shape in shapes.items() if layer_of(each) is not None and len(shape) == 2]
    places = [place_of(each) for each in inside if "relative_attention_bias" not in each]
    assert sorted((place.layer, place.kind) for place in places if place) == [
        (layer, kind) for layer in (0, 1) for kind in ("K", "MLP-1", "MLP-2", "O", "Q", "V")
    ]
    assert None not in places


def test_the_decoder_s_attention_to_the_encoder_and_stages_of_blocks_have_no_place() -> None:
    assert place_of("decoder.block.3.layer.0.SelfAttention.o.weight") == MatrixPlace(3, "O")
    assert place_of("decoder.block.3.layer.2.DenseReluDense.wi_1.weight") == MatrixPlace(3, "MLP-1")
    assert place_of("decoder.block.3.layer.1.EncDecAttention.o.weight") is None
    assert place_of("swin.encoder.layers.0.blocks.1.attention.self.query.weight") is None
    assert place_of("bert.encoder.layer.0.crossattention.self.query.weight") is None


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
