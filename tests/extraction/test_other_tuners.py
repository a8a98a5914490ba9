"""Adapters of PEFT's other tuners, against PEFT's own merge in fp64."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.tiny_models import TinyModels, make
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.algebra.deltas import LowRank
from hf_taskvec.errors import CorruptFileError, MismatchError, MissingFileError, UnsupportedError
from hf_taskvec.extraction.adapter_files import OTHER_TUNERS
from hf_taskvec.models.checkpoint import open_checkpoint

warnings.filterwarnings("ignore", module="peft")
pytestmark = pytest.mark.filterwarnings("ignore")

# The config's class without `Config`, and what it needs on layers of 16 and 32.
TUNERS: dict[str, dict[str, Any]] = {
    "AdaLora": {"init_r": 4, "target_r": 2, "total_step": 10, "lora_alpha": 12},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "Delora": {"r": 4},
    "FourierFT": {"n_frequency": 12},
    "Gralora": {"r": 4, "gralora_k": 2},
    "Hira": {"r": 4},
    "HRA": {"r": 4},
    "IA3": {"feedforward_modules": []},
    "LoHa": {"r": 3, "alpha": 5},
    "LoKr": {"r": 3, "alpha": 5},
    "Miss": {"r": 4},
    "OFT": {"r": 4, "oft_block_size": 0},
    "RandLora": {"r": 4},
    "Road": {"group_size": 4},
    "Shira": {"r": 2},
    "VBLoRA": {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2},
    "Vera": {"r": 3},
    "WaveFT": {"n_frequency": 12},
}
TARGETS = {"llama": ["q_proj", "down_proj"], "phi": ["q_proj", "fc2"]}


def trained(base: Path, folder: Path, tuner: str, targets: list[str], **options: Any) -> PeftModel:
    """An adapter all of whose numbers have changed."""
    torch.manual_seed(0)
    if tuner == "IA3":
        options = {"feedforward_modules": targets[1:], **options}  # whose inputs are scaled, not the outputs
    config = getattr(peft, f"{tuner}Config")(target_modules=targets, **{**TUNERS[tuner], **options})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def merged_change(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """What PEFT's merge in fp64 does to each parameter that it changes."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    layout = open_checkpoint(base).layout
    before = {layout.canonical(name): each.detach().clone() for name, each in model.named_parameters()}
    merged = PeftModel.from_pretrained(model, folder).double().merge_and_unload()
    after = {layout.canonical(name): each.detach() for name, each in merged.named_parameters()}
    return {name: after[name] - before[name] for name in before if not torch.equal(after[name], before[name])}


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize("tuner", TUNERS)
def test_the_change_is_that_of_pefts_merge(tuner: str, architecture: str, models: TinyModels, tmp_path: Path) -> None:
    base = models.pair(architecture).base
    live = trained(base, tmp_path / "adapter", tuner, TARGETS[architecture])
    expected = merged_change(base, tmp_path / "adapter")
    vector = TaskVector.from_adapter(tmp_path / "adapter", base=base)
    assert set(vector) == set(expected) and expected
    for name, change in expected.items():
        found = vector.dense(name, "float64")
        assert (found - change).norm() <= 1e-6 * change.norm(), name
    from_live = TaskVector.from_adapter(live, base=base)
    assert all(torch.equal(from_live.dense(name), vector.dense(name)) for name in vector)
    (origin,) = vector.provenance.origins
    assert origin.how.startswith(f"{tuner.upper()} adapter")


def test_every_tuner_that_is_known_is_tested() -> None:
    assert {name.upper() for name in TUNERS} == OTHER_TUNERS


@pytest.mark.parametrize(
    ("tuner", "targets"), [("Vera", ["c_attn"]), ("IA3", ["c_attn", "c_fc"]), ("AdaLora", ["c_attn"])]
)
def test_weights_that_are_stored_transposed(tuner: str, targets: list[str], models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("gpt2").base
    trained(base, tmp_path / "adapter", tuner, targets, fan_in_fan_out=True)
    vector = TaskVector.from_adapter(tmp_path / "adapter", base=base)
    for name, change in merged_change(base, tmp_path / "adapter").items():
        assert (vector.dense(name, "float64") - change).norm() <= 1e-6 * change.norm(), name


@pytest.mark.parametrize("tuner", ["AdaLora", "Vera"])
def test_what_is_a_product_of_two_factors_stays_one(tuner: str, models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("llama").base
    trained(base, tmp_path / "adapter", tuner, TARGETS["llama"])
    vector = TaskVector.from_adapter(tmp_path / "adapter", base=base)
    assert all(isinstance(term.delta, LowRank) for change in vector.values() for term in change.terms)
    (-0.5 * vector).to_adapter(tmp_path / "out", base=base)
    again = TaskVector.from_adapter(tmp_path / "out", base=base)
    assert all(torch.allclose(again.dense(name), -0.5 * vector.dense(name), atol=1e-6) for name in vector)


def test_a_vector_of_any_tuner_is_one_like_any_other(models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("llama").base
    trained(base, tmp_path / "one", "LoHa", TARGETS["llama"])
    trained(base, tmp_path / "two", "OFT", TARGETS["llama"])
    one, two = (TaskVector.from_adapter(tmp_path / name, base=base) for name in ("one", "two"))
    edit = one - 0.5 * two
    edit.apply(base, tmp_path / "model")
    before, after = (load_file(each / "model.safetensors") for each in (base, tmp_path / "model"))
    for name in edit:
        expected = before[name].double() + one.dense(name, "float64") - 0.5 * two.dense(name, "float64")
        assert torch.equal(after[name], expected.float())
    edit.save(tmp_path / "vector")
    loaded = TaskVector.load(tmp_path / "vector")
    assert all(torch.equal(loaded.dense(name), edit.dense(name)) for name in edit)


def test_nothing_is_merged_before_use(models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = models.pair("llama").base
    trained(base, tmp_path / "adapter", "LoKr", TARGETS["llama"])
    from peft.tuners.lokr.layer import LoKrLayer

    merged = []
    merge = LoKrLayer.merge
    monkeypatch.setattr(LoKrLayer, "merge", lambda self, **given: (merged.append(self), merge(self, **given))[1])
    vector = TaskVector.from_adapter(tmp_path / "adapter", base=base)
    assert len(vector) == 4 and not merged
    vector.dense(next(iter(vector)))
    assert len(merged) == 1


def test_what_was_trained_whole_beside_the_tuner_is_taken(models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("llama", tie_word_embeddings=False).base
    trained(base, tmp_path / "adapter", "OFT", TARGETS["llama"], modules_to_save=["lm_head"])
    vector, expected = (
        TaskVector.from_adapter(tmp_path / "adapter", base=base),
        merged_change(base, tmp_path / "adapter"),
    )
    assert set(vector) == set(expected) and "lm_head.weight" in vector
    for name, change in expected.items():
        assert (vector.dense(name, "float64") - change).norm() <= 1e-6 * change.norm(), name


def test_what_cannot_be_a_vector_is_refused(models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("llama").base
    trained(base, tmp_path / "adapter", "LoHa", TARGETS["llama"])
    config, weights = tmp_path / "adapter" / "adapter_config.json", tmp_path / "adapter" / "adapter_model.safetensors"
    whole, tensors = json.loads(config.read_text()), load_file(weights)
    for change, kind, message in (
        ({"peft_type": "PREFIX_TUNING"}, UnsupportedError, "PREFIX_TUNING adapter, which is not known here"),
        ({"base_model_name_or_path": None}, MissingFileError, "takes the base model to compute"),
        ({"r": "three"}, CorruptFileError, "cannot be loaded by PEFT as a LOHA adapter"),
        ({"r": 10**9}, CorruptFileError, "r=1000000000 makes no sense"),
        ({"r": 5}, CorruptFileError, "LOHA"),
        ({"target_modules": ["k_proj"]}, CorruptFileError, "lacks .*k_proj"),
    ):
        config.write_text(json.dumps({**whole, **change}))
        with pytest.raises(kind, match=message):
            TaskVector.from_adapter(tmp_path / "adapter")
    config.write_text(json.dumps(whole))
    save_file(dict(list(tensors.items())[1:]), weights)
    with pytest.raises(CorruptFileError, match="lacks"):
        TaskVector.from_adapter(tmp_path / "adapter")
    make("phi").save_pretrained(tmp_path / "other")
    save_file(tensors, weights)
    with pytest.raises(MismatchError, match=r"down_proj.*PhiForCausalLM has no such layer"):
        TaskVector.from_adapter(tmp_path / "adapter", base=tmp_path / "other")
