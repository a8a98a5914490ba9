"""DeepSpeed ZeRO checkpoints: refused unless their pickles are trusted; then what DeepSpeed itself makes of them."""

import sys
from pathlib import Path

import pytest
import torch
from support import tiny_models
from support.tiny_models import TinyModels
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_taskvec import TaskVector
from hf_taskvec.errors import CorruptFileError, MismatchError, UnsupportedError
from hf_taskvec.extraction.from_deepspeed import convert_deepspeed


def write_zero(folder: Path, model: PreTrainedModel, processes: int = 2) -> Path:
    """What ZeRO-3 saves of a model, as far as its converter reads it: each process has a run of each weight."""
    part, weights = folder / "global_step5", dict(model.named_parameters())
    part.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    model.config.save_pretrained(folder)
    for rank in range(processes):
        runs = []
        for weight in weights.values():
            size = -(-weight.numel() // processes)
            whole = torch.nn.functional.pad(weight.detach().float().view(-1), (0, size * processes - weight.numel()))
            runs.append(whole[rank * size : (rank + 1) * size])
        state = {"zero_stage": 3, "partition_count": processes, "fp32_flat_groups": [torch.cat(runs)]}
        told = {
            "buffer_names": [],
            "param_shapes": [{name: each.shape for name, each in weights.items()}],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "module": {},
            "ds_version": "0.19.8",
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, part / f"{name}_optim_states.pt")
        torch.save(told, part / f"{name}_model_states.pt")
    return folder


def test_pickles_are_run_only_if_that_is_said(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("llama")
    folder = write_zero(tmp_path / "zero", AutoModelForCausalLM.from_pretrained(pair.tuned))
    with pytest.raises(UnsupportedError, match=r"pickles that can run code.*convert_deepspeed\(.*trust_pickles=True"):
        TaskVector.from_finetuned(pair.base, folder)
    with pytest.raises(UnsupportedError, match="pass trust_pickles=True"):
        convert_deepspeed(folder, tmp_path / "out")
    with pytest.raises(MismatchError, match="is no checkpoint of DeepSpeed"):
        convert_deepspeed(pair.tuned, tmp_path / "out", trust_pickles=True)
    assert not (tmp_path / "out").exists()


def test_without_deepspeed_it_is_said(models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.utils.zero_to_fp32", None)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    folder = write_zero(tmp_path / "zero", tiny_models.make("llama"))
    with pytest.raises(UnsupportedError, match="DeepSpeed is not installed"):
        convert_deepspeed(folder, tmp_path / "out", trust_pickles=True)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_converted_checkpoint_is_the_model_that_was_trained(
    models: TinyModels, tmp_path: Path, processes: int
) -> None:
    pytest.importorskip("deepspeed")
    pair = models.pair("llama")
    tuned = AutoModelForCausalLM.from_pretrained(pair.tuned)
    folder = convert_deepspeed(write_zero(tmp_path / "zero", tuned, processes), tmp_path / "out", trust_pickles=True)
    vector, expected = TaskVector.from_finetuned(pair.base, folder), pair.vector()
    assert set(vector) == set(expected)
    assert all(torch.equal(vector.dense(name), expected.dense(name)) for name in expected)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_what_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    folder = write_zero(tmp_path / "zero", tiny_models.make("llama"))
    next(folder.rglob("*optim_states.pt")).write_bytes(b"damaged")
    with pytest.raises(CorruptFileError, match="DeepSpeed could not convert zero"):
        convert_deepspeed(folder, tmp_path / "out", trust_pickles=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zero"]
