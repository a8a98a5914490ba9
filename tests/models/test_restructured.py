"""Tensors that transformers joins or splits when it loads them: experts above all, stored one by one or fused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import EXPERTS, Pair, assert_gives_tuned, make, nearest, tuned_copy
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import MismatchError
from hf_taskvec.models.checkpoint import open_checkpoint

WEIGHTS = "model.safetensors"
#: HRM's files have one tensor for what the live model holds as four; Kimi-Linear's have three for one convolution
KINDS = {**{name: {} for name in EXPERTS}, "hrm_text": {"num_layers_per_stack": 1}}


class _Forms:
    """A base and its fine-tune, each as transformers stores it and in the form of the live model."""

    def __init__(self, kind: str, folder: Path) -> None:
        base = make(kind, **KINDS[kind])
        for name, model in (("base", base), ("tuned", tuned_copy(base))):
            model.save_pretrained(folder / name)
            loaded = AutoModelForCausalLM.from_pretrained(folder / name)
            loaded.save_pretrained(folder / f"live {name}", save_original_format=False)
        self.folder, self.pair = folder, Pair(folder / "base", folder / "tuned")

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_both_forms_meet(kind: str, tmp_path: Path) -> None:
    forms = _Forms(kind, tmp_path)
    stored, live = (load_file(forms[name] / WEIGHTS) for name in ("base", "live base"))
    assert stored.keys() != live.keys()  # or nothing is tested
    for base, tuned in (("base", "live tuned"), ("live base", "tuned"), ("live base", "live tuned")):
        vector = TaskVector.from_finetuned(forms[base], forms[tuned])
        assert set(vector) == set(forms.pair.vector())
        assert_gives_tuned(vector, forms.pair)


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_in_the_live_form_is_written_as_transformers_stores_it(kind: str, tmp_path: Path) -> None:
    forms = _Forms(kind, tmp_path)
    vector = forms.pair.vector()
    output = vector.apply(forms["live base"], tmp_path / "output")
    found, expected = load_file(output / WEIGHTS), load_file(forms["tuned"] / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    one, other = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (output, forms["tuned"]))
    assert all(torch.equal(one[name], other[name]) for name in other)
    some = load_file(vector.apply(forms["live base"], tmp_path / "some", scale=-0.6, dtype="bfloat16") / WEIGHTS)
    base = load_file(forms["base"] / WEIGHTS)
    for name, tensor in base.items():
        exact = tensor.double() - 0.6 * (expected[name].double() - tensor.double())
        assert torch.equal(some[name], nearest(exact, torch.bfloat16)), name


def _changed(folder: Path, output: Path, **tensors: torch.Tensor) -> Path:
    output.mkdir()
    (output / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**load_file(folder / WEIGHTS), **tensors}, output / WEIGHTS)
    return output


def test_fused_experts_of_another_shape_or_beside_single_ones_are_refused(tmp_path: Path) -> None:
    forms = _Forms("mixtral", tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    fused = load_file(forms["live base"] / WEIGHTS)[name]
    turned = _changed(forms["live base"], tmp_path / "turned", **{name: fused.mT.contiguous()})
    with pytest.raises(MismatchError, match=r"experts\.down_proj has shape \[2, 32, 16\], .* has \[2, 16, 32\]"):
        open_checkpoint(turned)
    twice = _changed(forms["base"], tmp_path / "twice", **{name: fused})
    with pytest.raises(MismatchError, match=r"experts\.0\.w2\.weight.* twice, once as transformers stores it"):
        open_checkpoint(twice)
