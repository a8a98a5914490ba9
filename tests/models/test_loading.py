"""Models that are loaded to be evaluated."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.hub_server import HubServer
from support.tiny_models import TinyModels

from hf_taskvec.errors import MissingFileError
from hf_taskvec.models.loading import load_for_evaluation


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
