"""The layers that are quantised are those that transformers replaces itself, in every architecture."""

import copy

import pytest
from support import tiny_models

from hf_taskvec.models.live_model import live_checkpoint
from hf_taskvec.models.quantised_layers import layers_to_quantise, weights_to_quantise, why_not_quantised


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_layers_are_those_that_transformers_replaces(architecture: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    model = tiny_models.make(architecture)
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    replaced = replace_with_bnb_linear(copy.deepcopy(model), kept, BitsAndBytesConfig(load_in_4bit=True))
    expected = [name for name, each in replaced.named_modules() if isinstance(each, bitsandbytes.nn.Linear4bit)]
    assert list(layers_to_quantise(model)) == expected
    stored = live_checkpoint(model)
    weights = weights_to_quantise(stored)
    assert len(weights) == len(expected)
    assert all(len(stored.tensors[name].shape) == 2 for name in weights)
    reasons = {why_not_quantised(stored, name) for name in stored.tensors if name not in weights}
    assert {"embedding", "bias, norm or the like"} <= reasons
