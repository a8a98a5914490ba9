"""What quantisation leaves of an edit, counted in the codes that bitsandbytes gives to what apply writes."""

import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_models
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector
from hf_taskvec.analysis import survival as survival_module
from hf_taskvec.analysis import survival_by_scale
from hf_taskvec.errors import BadValueError, MismatchError, UnsupportedError

SIZES = {"hidden_size": 24, "intermediate_size": 40, "head_dim": 12}  # blocks of 64 run from row to row


def linear_weights(model: torch.nn.Module) -> dict[str, bool]:
    """The weights that transformers itself replaces by layers of bitsandbytes, and whether they are transposed."""
    import bitsandbytes
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer

    transposed = {name: isinstance(module, Conv1D) for name, module in model.named_modules()}
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    replaced = replace_with_bnb_linear(model, kept, BitsAndBytesConfig(load_in_4bit=True))
    layers = [name for name, module in replaced.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    return {f"{name}.weight": transposed[name] for name in layers}


def codes(matrix: torch.Tensor, scheme: str) -> torch.Tensor:
    from bitsandbytes import functional

    if scheme == "int8":
        return functional.int8_vectorwise_quant(matrix.half())[0].flatten()
    packed = functional.quantize_4bit(matrix.contiguous(), quant_type="nf4")[0].flatten()
    return torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: matrix.numel()]


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", ["phi", "gpt2", "llama", "gpt_neox"])
def test_counts_are_those_of_bitsandbytes_over_what_apply_writes(
    models: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    dtype: torch.dtype,
    scheme: str,
) -> None:
    pytest.importorskip("bitsandbytes")
    pair = models.pair(architecture, dtype, **(SIZES if architecture in ("phi", "llama") else {}))
    vector, scales = pair.vector(), [-0.02, -0.3, 0.0]
    # Tiles of a few rows, and one λ after another: nothing may be lost where they meet.
    monkeypatch.setattr("hf_taskvec.algebra.tiles.TILE", 100)
    monkeypatch.setattr(survival_module, "TILE", 100)
    monkeypatch.setattr(survival_module, "_HELD", 200)
    found = survival_by_scale(vector, pair.base, scales, scheme)
    counted = linear_weights(tiny_models.AutoModelForCausalLM.from_pretrained(pair.base, dtype=dtype))
    before = load_file(pair.base / "model.safetensors")
    for result, scale in zip(found, scales, strict=True):
        assert (result.scheme, result.scale) == (scheme, scale)
        after = load_file(vector.apply(pair.base, tmp_path / f"out{scale}", scale=scale) / "model.safetensors")
        assert set(result.by_weight) == set(counted)
        assert set(result.by_weight) | set(result.not_counted) == set(tiny_models.tensors(pair.base))
        sums = {"weights": 0, "edited": 0, "recoded": 0, "undone": 0}
        for name, transposed in counted.items():
            old, new = (each[name].T if transposed else each[name] for each in (before, after))
            edited, recoded = (old != new).flatten(), codes(old, scheme) != codes(new, scheme)
            expected = {
                "weights": old.numel(),
                "edited": edited.sum().item(),
                "recoded": recoded.sum().item(),
                "undone": (edited & ~recoded).sum().item(),
            }
            ours = result.by_weight[name]
            assert {key: getattr(ours, key) for key in expected} == expected, name
            sums = {key: sums[key] + expected[key] for key in sums}
        assert {key: getattr(result.total, key) for key in sums} == sums
        for key in sums:
            assert sum(getattr(each, key) for each in result.by_layer.values()) == sums[key]
        assert list(result.by_layer) == [0, 1]
        assert (result.share == 0) == (scale == 0) and result.share == sums["recoded"] / sums["weights"]
        assert result.undone_share == (sums["undone"] / sums["edited"] if scale else None)
    assert found[0].share < found[1].share and found[0].total.edited > 0


def test_head_embeddings_norms_and_fused_experts_are_listed_with_the_reason(models: TinyModels) -> None:
    pair = models.pair("phi")
    left = pair.vector().survival(pair.base).not_counted
    assert left["model.embed_tokens.weight"] == "embedding" and left["lm_head.weight"] == "output head"
    assert left["lm_head.bias"] == "output head"
    assert left["model.layers.0.self_attn.q_proj.bias"] == left["model.final_layernorm.weight"]
    assert left["model.final_layernorm.weight"] == "bias, norm or the like"
    pair = models.pair("mixtral")
    found = pair.vector().survival(pair.base)
    assert set(found.not_counted.values()) >= {"not stored as the model holds it", "embedding", "output head"}
    assert {name.split(".")[3] for name in found.by_weight} == {"self_attn"}


def test_the_median_is_of_the_change_in_bins() -> None:
    """int8 has bins of one width in a row: the ratio is known beforehand."""
    base = tiny_models.make("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = base.get_parameter(name).data
    weight.copy_(torch.randint(-100, 101, weight.shape) / 64)
    weight[:, 0] = 127 / 64  # so that a step is 1/64
    change = torch.tensor([0.25, 1.0, -3.0, 0.0]).repeat(weight.numel() // 4).view(weight.shape) / 64
    change[:, 0] = 0
    expected = statistics.median_low((change.abs() * 64)[change != 0].flatten().tolist())
    found = TaskVector.from_tensors({name: change}).survival(base, "int8")
    assert found.by_weight[name].bin_ratio == pytest.approx(expected, rel=0.017) == found.total.bin_ratio
    assert found.by_layer[1].bin_ratio is None and found.by_layer[1].edited == 0
    # A quarter of a step is undone, whole steps are not.
    assert found.by_weight[name].undone == (change.abs() * 64 == 0.25).sum()
    assert found.by_weight[name].recoded == (change.abs() * 64 >= 1).sum()


@pytest.mark.parametrize("scheme", ["nf4", "int8", "fp8", "int4"])
def test_a_live_model_its_folder_and_a_hub_id_give_the_same(hub, models: TinyModels, scheme: str) -> None:
    pair = models.pair("llama", torch.bfloat16)
    vector = pair.vector()
    folder = vector.survival(pair.base, scheme, scale=-0.5)
    live = tiny_models.AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    assert vector.survival(live, scheme, scale=-0.5) == folder
    assert all(torch.equal(tensor, before[name]) for name, tensor in live.state_dict().items())
    hub.add_repo("me/base", pair.base)
    assert vector.survival("me/base", scheme, scale=-0.5) == folder
    assert survival_by_scale(vector, pair.base, [-0.5, 0.1], scheme)[0] == folder
    assert 0 < folder.undone_share < 1


def test_finer_schemes_undo_less_of_a_small_edit(models: TinyModels) -> None:
    pair = models.pair("llama")
    undone = {scheme: pair.vector().survival(pair.base, scheme, scale=0.05).undone_share for scheme in ("nf4", "int8")}
    assert undone["int8"] < undone["nf4"]


def test_it_says_the_shares_in_words_and_as_a_dictionary(models: TinyModels) -> None:
    pair = models.pair("llama")
    found = pair.vector().survival(pair.base, scale=-1)
    text = str(found)
    assert text.startswith(f"nf4 at λ = -1: {found.share:.2%} of {found.total.weights:,} weights get another code")
    assert f"{found.undone_share:.2%} of the" in text and f"{found.total.bin_ratio:.3g} of a bin" in text
    assert "changes none of" in str(pair.vector().survival(pair.base, scale=0))
    written = found.to_dict()
    assert written["total"]["share"] == found.share and set(written["by_layer"]) == {"0", "1"}
    assert written["by_weight"].keys() == found.by_weight.keys() and written["not_counted"] == found.not_counted


def test_what_cannot_be_told_is_refused(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("llama")
    vector = pair.vector()
    with pytest.raises(BadValueError, match="Did you mean 'int8'"):
        vector.survival(pair.base, "int88")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="no λ"):
        survival_by_scale(vector, pair.base, [])
    with pytest.raises(BadValueError, match="nan"):
        vector.survival(pair.base, scale=float("nan"))
    with pytest.raises(BadValueError, match="is not a task vector"):
        survival_by_scale("vector", pair.base, [1])  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="made for"):
        vector.survival(models.pair("phi").base)
    plain = torch.nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match=r"no config .* Give a model with its config.json"):
        TaskVector.from_tensors({"weight": torch.ones(4, 4)}).survival(plain)
    double = tiny_models.make("llama", torch.float64)
    with pytest.raises(UnsupportedError, match=r"is stored as torch\.float64"):
        vector.survival(double)


def test_a_low_rank_edit_is_rounded_as_apply_rounds_it(models: TinyModels, tmp_path: Path) -> None:
    """In more than one tile: the bits of a product hang on the number of rows."""
    pytest.importorskip("bitsandbytes")
    pair = models.pair("llama", torch.bfloat16, hidden_size=1024, intermediate_size=1100, num_hidden_layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    vector = TaskVector.from_tensors({name: (torch.randn(1100, 4) * 0.02, torch.randn(4, 1024) * 0.02)})
    found = vector.survival(pair.base, scale=-0.7).by_weight[name]
    out = vector.apply(pair.base, tmp_path / "out", scale=-0.7)
    old, new = (load_file(folder / "model.safetensors")[name] for folder in (pair.base, out))
    recoded = codes(old, "nf4") != codes(new, "nf4")
    assert (found.edited, found.recoded) == ((old != new).sum(), recoded.sum()) and found.recoded > 0
