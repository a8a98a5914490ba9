"""LoRA on parameters that hold several experts, against PEFT's own merge in fp64."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.tiny_adapters import adapter
from support.tiny_models import TinyModels
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import CorruptFileError, MissingFileError, TaskVectorError

WEIGHTS = "model.safetensors"
_BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
#: Mixtral's experts are stored one by one; gpt-oss's in one tensor, its outputs last; Llama 4's in one as well
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"target_parameters": _BOTH}),
    "one of two": ("qwen3_moe", {"target_parameters": _BOTH[1:], "target_modules": ["q_proj"]}),
    "all linear layers": ("qwen3_moe", {"target_modules": "all-linear"}),
    "patterns": (
        "mixtral",
        {
            "target_parameters": _BOTH,
            "rank_pattern": {"down_proj": 3},
            "alpha_pattern": {r"layers\.1\..*gate_up_proj": 5},
        },
    ),
    "rank-stabilised": ("mixtral", {"target_parameters": _BOTH, "use_rslora": True}),
    "gpt-oss": ("gpt_oss", {"target_parameters": _BOTH}),
    "a layer's weight": (
        "phi",
        {"target_parameters": ["fc1.weight"], "alpha_pattern": {"fc1": 99, r"layers\.1\.mlp\.fc1\.weight": 3}},
    ),
    "saved whole": ("mixtral", {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}),
}


def _made(case: str, models: TinyModels, folder: Path) -> Any:
    kind, settings = CASES[case]
    return adapter(models.pair(kind).base, folder, **{"target_modules": [], **settings})


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_peft_merges(case: str, models: TinyModels, tmp_path: Path) -> None:
    made = _made(case, models, tmp_path / "adapter")
    vector = made.vector()
    assert any(re.search(r"expert|fc1|moe", name) for name in vector)
    for name in set(vector) & set(TaskVector.from_adapter(made.live)):
        assert torch.equal(vector.dense(name), TaskVector.from_adapter(made.live).dense(name))
    wide = AutoModelForCausalLM.from_pretrained(made.base, dtype=torch.float64)
    merged = PeftModel.from_pretrained(wide, made.folder).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    base, expected = load_file(made.base / WEIGHTS), load_file(tmp_path / "merged" / WEIGHTS)
    changed = {name for name in base if not torch.equal(base[name].double(), expected[name])}
    assert set(vector) == changed
    for scale in (1.0, -0.6):
        found = load_file(vector.apply(made.base, tmp_path / f"at {scale}", scale=scale) / WEIGHTS)
        for name, tensor in base.items():
            exact = tensor.double() + scale * (expected[name] - tensor.double())
            torch.testing.assert_close(found[name].double(), exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss"])
def test_it_is_saved_edited_and_calculated_with(case: str, models: TinyModels, tmp_path: Path) -> None:
    made = _made(case, models, tmp_path / "adapter")
    vector = made.vector()
    vector.save(tmp_path / "vector")
    again = TaskVector.load(tmp_path / "vector")
    assert all(torch.equal(again.dense(name), vector.dense(name)) for name in vector)
    assert (vector - vector).norm() == 0.0 and vector.cosine(again) == pytest.approx(1.0)
    dense = torch.cat([vector.dense(name, "float64").flatten() for name in vector])
    assert vector.norm() == pytest.approx(dense.norm().item(), rel=1e-6)
    assert "rank 4" in repr(vector)
    model = AutoModelForCausalLM.from_pretrained(made.base)
    with vector.applied_to(model, -0.6):
        edited = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = AutoModelForCausalLM.from_pretrained(vector.apply(made.base, tmp_path / "out", scale=-0.6))
    assert all(torch.equal(tensor, edited[name]) for name, tensor in loaded.state_dict().items())


def test_an_adapter_that_does_not_fit_is_refused(models: TinyModels, tmp_path: Path) -> None:
    made = _made("mixtral", models, tmp_path / "adapter")
    more = models.pair("mixtral", intermediate_size=48).base
    with pytest.raises(CorruptFileError, match=r"factors of .*experts\.\w+ have .*not those of a parameter of shape"):
        made.vector(base=more)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / WEIGHTS).write_bytes((made.base / WEIGHTS).read_bytes())
    with pytest.raises(MissingFileError, match=r"target_parameters names takes the base's config"):
        made.vector(base=tmp_path / "bare")
    config = made.folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"mlp.experts.down_proj"', '"mlp.experts.other"'))
    with pytest.raises(
        TaskVectorError, match=r"experts\S* changes a parameter that target_parameters .* does not name"
    ):
        made.vector()
