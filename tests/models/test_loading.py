"""Models that are loaded to be evaluated."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_models
from support.hub_server import HubServer
from support.tiny_books import make_tokenizer
from support.tiny_models import TinyModels

from hf_taskvec.errors import MissingFileError
from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer


def test_folders_and_revisions_on_the_hub_are_loaded_in_fp32_on_a_cpu(models: TinyModels, hub: HubServer) -> None:
    pair = models.pair("llama", torch.bfloat16)
    hub.add_repo("me/model", pair.base)
    hub.add_repo("me/model", pair.tuned, revision="v2")
    for where, folder in ((pair.base, pair.base), ("me/model", pair.base), ("me/model@v2", pair.tuned)):
        model = load_for_evaluation(where, device="cpu")
        assert not model.training and model.dtype == torch.float32
        for name, weight in load_file(folder / "model.safetensors").items():
            assert torch.equal(model.state_dict()[name], weight.float())
    assert load_for_evaluation(pair.base, dtype=torch.float16, device="cpu").dtype == torch.float16


@pytest.mark.parametrize("where", ["me/nothing", "./nothing", Path("nothing")])
def test_what_is_not_there_is_called_so(where: str | Path, hub: HubServer) -> None:
    with pytest.raises(MissingFileError, match="nothing"):
        load_for_evaluation(where)


@pytest.mark.parametrize("architecture", ["llama", "phi", "gpt2", "gemma3_text", "gpt_neox"])
def test_a_folder_without_a_tokenizer_is_called_so(models: TinyModels, architecture: str) -> None:
    """transformers fails in many ways, or makes a tokenizer that knows no word."""
    with pytest.raises(MissingFileError, match=r"base has no tokenizer .*save_pretrained"):
        load_tokenizer(models.pair(architecture).base)


def test_a_tokenizer_is_loaded_or_said_to_be_damaged(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_models.make("llama").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(MissingFileError, match=r"has no tokenizer that can be read \(JSONDecodeError"):
        load_tokenizer(tmp_path)
