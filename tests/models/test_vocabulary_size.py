"""A vocabulary that grows: the config says so where transformers looks for it, or nothing is written."""

import copy
from pathlib import Path

import pytest
import torch
from support import tiny_models
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hf_taskvec import TaskVector
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.models.vocabulary_size import grown_config

_TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "vocab_size": 20,
    "pad_token_id": 0,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_VISION = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}
NESTED = {
    "fuyu": {"text_config": {"model_type": "persimmon", **_TEXT}, "patch_size": 4},
    "qwen3_5": {"text_config": {**_TEXT, **_LINEAR}, "vision_config": _VISION},
}


def make(model_type: str) -> PreTrainedModel:
    if model_type not in NESTED:
        return tiny_models.make(model_type)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**copy.deepcopy(NESTED[model_type])))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", *NESTED])
def test_an_extended_checkpoint_loads_as_the_fine_tune(model_type: str, tmp_path: Path) -> None:
    base = make(model_type)
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(27, mean_resizing=False)
    tiny_models.shake(base).save_pretrained(tmp_path / "tuned")
    vector = TaskVector.from_finetuned(tmp_path / "base", tmp_path / "tuned", vocabulary="extend")
    out = vector.apply(tmp_path / "base", tmp_path / "out")
    expected, found = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "tuned", out))
    assert found.get_input_embeddings().weight.shape[0] == 27
    assert found.config.get_text_config().vocab_size == 27
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_head_that_does_not_grow_with_the_embedding_is_refused(tmp_path: Path) -> None:
    base = tiny_models.make("llama")
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(27, mean_resizing=False)
    tiny_models.shake(base).save_pretrained(tmp_path / "tuned")
    vector = TaskVector.from_finetuned(tmp_path / "base", tmp_path / "tuned", vocabulary="extend")
    with pytest.raises(UnsupportedError, match=r"from 20 to 27 rows.*Llama.* cannot.*lm_head\.weight.*truncate"):
        vector.filter(exclude="lm_head*").apply(tmp_path / "base", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_of_an_unknown_architecture_the_named_size_grows() -> None:
    config = {"model_type": "of tomorrow", "vocab_size": 20, "text_config": {"vocab_size": 20, "max_size": 20}}
    grown = grown_config(config, 20, 27, {})
    assert grown == {"model_type": "of tomorrow", "vocab_size": 27, "text_config": {"vocab_size": 27, "max_size": 20}}
    assert config["vocab_size"] == 20
    with pytest.raises(UnsupportedError, match="the config of the base cannot say so"):
        grown_config({"model_type": "of tomorrow"}, 20, 27, {})
