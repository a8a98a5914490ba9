"""LoRA adapters of every variant: against PEFT's merge, against dense fp64, and where PEFT itself is wrong."""

import copy
import json
import math
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    get_peft_model,
)
from peft.tuners.lora.config import CordaConfig
from safetensors.torch import load_file, save_file
from support.hub_server import HubServer
from support.tiny_adapters import Adapter, adapter
from support.tiny_models import TinyModels, make, tensors
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra.deltas import LowRank
from hf_taskvec.models.checkpoint import open_checkpoint

warnings.filterwarnings("ignore", module="peft")
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = "adapter_model.safetensors"
Q = "model.layers.0.self_attn.q_proj"


def weights(model: torch.nn.Module, base: Path) -> dict[str, torch.Tensor]:
    """Every parameter in fp64 under its canonical name, a tied head under both names."""
    layout = open_checkpoint(base).layout
    named = model.named_parameters(remove_duplicate=False)
    return {layout.canonical(name): each.detach().double() for name, each in named}


def load_double(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)


def merged_change(made: Adapter, *folders: Path) -> dict[str, torch.Tensor]:
    """What PEFT's merge in fp64 does to each parameter; those that it does not touch are left out."""
    before = weights(load_double(made.base), made.base)
    model = load_double(made.base)
    merged = PeftModel.from_pretrained(model, folders[0] if folders else made.folder).merge_and_unload()
    after = weights(merged, made.base)
    return {name: after[name] - before[name] for name in before if not torch.equal(after[name], before[name])}


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


def error(vector: TaskVector, truth: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of a parameter; all that changes must be there, and nothing else."""
    assert set(vector) == set(truth)
    return max(relative(vector.dense(name, "float64"), truth[name]) for name in truth)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("phi", {"target_modules": ["q_proj", "fc1"], "lora_alpha": 16}),
    "all linear": ("llama", {"target_modules": "all-linear"}),
    "rsLoRA": ("phi", {"target_modules": ["q_proj", "fc1"], "lora_alpha": 16, "use_rslora": True}),
    "patterns": (
        "phi",
        {"target_modules": ["q_proj", "fc1"], "alpha_pattern": {"fc1": 3}, "rank_pattern": {"^model.*q_proj": 2}},
    ),
    "rsLoRA with patterns": (
        "phi",
        {
            "target_modules": ["q_proj", "fc1"],
            "use_rslora": True,
            "alpha_pattern": {"0.mlp.fc1": 3},
            "rank_pattern": {"fc1": 2},
        },
    ),
    "some layers": ("phi", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "modules_to_save": ("phi", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "final_layernorm"]}),
    "modules_to_save and bias=all": (
        "phi",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "bias": "all"},
    ),
    "a start of another adapter": ("phi", {"target_modules": ["q_proj"], "corda_config": CordaConfig()}),
    "VeLoRA": ("phi", {"target_modules": ["q_proj"], "velora_config": {"num_groups": 2}}),
    "trained tokens of a renamed head": (
        "gpt_neox",
        {"target_modules": ["query_key_value"], "trainable_token_indices": {"lm_head": [7, 3]}},
    ),
    "bias=all": ("phi", {"target_modules": ["q_proj"], "bias": "all"}),
    "bias=lora_only": ("phi", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "lora_bias": ("phi", {"target_modules": ["q_proj"], "lora_bias": True, "use_rslora": True}),
    "DoRA": ("phi", {"target_modules": ["q_proj", "fc2"], "use_dora": True}),
    "DoRA on an embedding": ("phi", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "DoRA on Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "embedding and head": ("phi", {"target_modules": ["embed_tokens", "lm_head"]}),
    "trained tokens": ("phi", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
    "trained tokens by name": (
        "phi",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 3]}},
    ),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": False}),
    "fused projections": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "renamed head": ("gpt_neox", {"target_modules": ["query_key_value", "lm_head"]}),
    "experts' attention": ("mixtral", {"target_modules": ["q_proj"]}),
    "everything": (
        "phi",
        {
            "target_modules": ["q_proj", "fc1"],
            "use_dora": True,
            "use_rslora": True,
            "bias": "lora_only",
            "modules_to_save": ["final_layernorm"],
            "rank_pattern": {"fc1": 3},
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_agrees_with_the_merge(variant: str, models: TinyModels, tmp_path: Path) -> None:
    architecture, config = VARIANTS[variant]
    made = adapter(models.pair(architecture).base, tmp_path / "adapter", **config)
    truth = merged_change(made)
    stored = made.vector()
    stored.save(tmp_path / "saved")
    vectors = {
        "folder": stored,
        "folder and its base": made.vector(base=made.base),
        "folder and a live base": made.vector(base=AutoModelForCausalLM.from_pretrained(made.base)),
        "live": TaskVector.from_adapter(made.live),
        "live and the base": TaskVector.from_adapter(made.live, base=made.base),
        "saved": TaskVector.load(tmp_path / "saved"),
    }
    for kind, vector in vectors.items():
        assert error(vector, truth) < 2e-7, kind
        negated = {name: -change for name, change in truth.items()}
        assert error(-vector, negated) < 2e-7, kind
        assert len(vector - vector) == 0


@pytest.mark.parametrize("variant", ["plain", "rsLoRA", "patterns", "Conv1D", "all linear"])
def test_factors_stay_factors(variant: str, models: TinyModels, tmp_path: Path) -> None:
    architecture, config = VARIANTS[variant]
    made = adapter(models.pair(architecture).base, tmp_path / "adapter", **config)
    vector = made.vector()
    assert vector.is_low_rank
    assert all(vector.rank(name) <= 4 for name in vector)
    assert vector.nbytes == sum(tensor.nbytes for tensor in load_file(made.folder / WEIGHTS).values())
    assert (vector + 2 * vector) == 3 * vector


def test_the_scaling_is_what_the_config_says(models: TinyModels, tmp_path: Path) -> None:
    """Worked out by hand from the stored factors, without PEFT."""
    base = models.pair("phi").base
    for number, (config, scaling) in enumerate(
        [
            ({"lora_alpha": 16}, 16 / 4),
            ({"lora_alpha": 16, "use_rslora": True}, 16 / math.sqrt(4)),
            ({"lora_alpha": 16, "alpha_pattern": {"q_proj": 3}}, 3 / 4),
            ({"lora_alpha": 16, "rank_pattern": {"q_proj": 2}}, 16 / 2),
            ({"lora_alpha": 16, "rank_pattern": {"q_proj": 2}, "use_rslora": True}, 16 / math.sqrt(2)),
        ]
    ):
        made = adapter(base, tmp_path / str(number), target_modules=["q_proj"], **config)
        state = load_file(made.folder / WEIGHTS)
        key = f"base_model.model.{Q}.lora_{{}}.weight"
        truth = scaling * state[key.format("B")].double() @ state[key.format("A")].double()
        vector = made.vector()
        assert relative(vector.dense(f"{Q}.weight", "float64"), truth) < 1e-15
        delta = vector[f"{Q}.weight"].terms[0].delta
        assert isinstance(delta, LowRank) and delta.scaling == scaling


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_applied_adapter_is_fp64_rounded_once(dtype: torch.dtype, models: TinyModels, tmp_path: Path) -> None:
    from support.tiny_models import added

    base = models.pair("phi", dtype, hidden_size=128, intermediate_size=512).base  # enough elements to count the rare
    made = adapter(base, tmp_path / "adapter", target_modules=["q_proj", "fc1", "fc2"])
    vector, wrong, count = made.vector(), 0, 0
    for name, source in tensors(made.base).items():
        exact = source.read().double() + (merged_change_of(made, name) if name in vector else 0.0)
        from hf_taskvec.algebra.rounding import round_once

        expected, result = round_once(exact, dtype), added(vector, name, source)
        wrong += (expected != result).sum().item()
        count += result.numel()
    assert wrong < count / 10_000


def merged_change_of(made: Adapter, name: str) -> torch.Tensor:
    state = load_file(made.folder / WEIGHTS)
    key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
    return 2.0 * state[key.format("B")].double() @ state[key.format("A")].double()  # alpha 8 over rank 4


# Against PEFT's own combination of adapters.


@dataclass(frozen=True)
class Two:
    """Two adapters on one base, and what their combination is in truth."""

    one: Adapter
    other: Adapter
    weights: tuple[float, float]
    truth: dict[str, torch.Tensor]

    def ours(self) -> float:
        vector = self.weights[0] * self.one.vector(name="one") + self.weights[1] * self.other.vector(name="other")
        return error(vector, self.truth)

    def peft(self, combination: str, count: int = 2) -> float:
        """The error of PEFT's `add_weighted_adapter`, over all parameters."""
        before = weights(load_double(self.one.base), self.one.base)
        model = PeftModel.from_pretrained(load_double(self.one.base), self.one.folder, adapter_name="one")
        model.load_adapter(self.other.folder, adapter_name="other")
        names = ["one", "other"][:count]
        model.add_weighted_adapter(names, list(self.weights[:count]), "both", combination_type=combination)
        model.set_adapter("both")
        after = weights(model.merge_and_unload(), self.one.base)
        lost = sum((after[n] - before[n] - self.truth.get(n, 0.0)).square().sum() for n in before)
        return math.sqrt(lost / sum(change.square().sum() for change in self.truth.values()))


def two(models: TinyModels, folder: Path, weights: tuple[float, float] = (-1.0, 0.5), **config: Any) -> Two:
    base = models.pair("phi").base
    options = {"target_modules": ["q_proj", "fc1"], **config}
    one = adapter(base, folder / "one", 0, **options)
    options.pop("modules_to_save", None)  # if both have one, PEFT refuses
    other = adapter(base, folder / "other", 1, **options)
    changes = merged_change(one), merged_change(other)
    names = changes[0].keys() | changes[1].keys()
    zero = torch.zeros((), dtype=torch.float64)
    truth = {n: weights[0] * changes[0].get(n, zero) + weights[1] * changes[1].get(n, zero) for n in names}
    return Two(one, other, weights, truth)


@pytest.mark.parametrize("weights", [(-1.0, 0.5), (1.0, -0.5), (0.3, 0.7)])
def test_a_sum_of_plain_adapters_is_cat(models: TinyModels, tmp_path: Path, weights: tuple[float, float]) -> None:
    case = two(models, tmp_path, weights)
    ours, theirs = case.ours(), case.peft("cat")
    print(f"cat: ours {ours:.1e}, PEFT {theirs:.1e}")
    assert ours < 1e-6 and theirs < 1e-6


@pytest.mark.parametrize(
    ("combination", "config"),
    [
        ("linear", {}),
        ("cat", {"use_rslora": True}),
        ("cat", {"lora_bias": True}),
        ("cat", {"use_dora": True}),
        ("cat", {"modules_to_save": ["final_layernorm", "lm_head"]}),
    ],
    ids=["linear", "rsLoRA", "lora_bias", "DoRA", "modules_to_save"],
)
def test_adapters_that_peft_adds_wrongly_are_added_exactly(
    models: TinyModels, tmp_path: Path, combination: str, config: dict[str, Any]
) -> None:
    case = two(models, tmp_path, **config)
    ours, theirs = case.ours(), case.peft(combination)
    print(f"{combination} {config}: relative error of ours {ours:.1e}, of PEFT's {theirs:.2f}")
    assert ours < 1e-6 < 1e-2 < theirs, f"ours {ours}, PEFT {theirs}"


def test_dora_is_negated_exactly(models: TinyModels, tmp_path: Path) -> None:
    """PEFT negates the factors, and so gives another direction the old magnitude; the change must change its sign."""
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"], use_dora=True)
    truth = {name: -change for name, change in merged_change(made).items()}
    ours = error(-made.vector(), truth)
    model = PeftModel.from_pretrained(load_double(made.base), made.folder)
    model.add_weighted_adapter(["default"], [-1.0], "negated", combination_type="linear")
    model.set_adapter("negated")
    after, before = weights(model.merge_and_unload(), made.base), weights(load_double(made.base), made.base)
    theirs = relative(after[f"{Q}.weight"] - before[f"{Q}.weight"], truth[f"{Q}.weight"])
    print(f"DoRA at -1: relative error of ours {ours:.1e}, of PEFT's {theirs:.2f}")
    assert ours < 1e-6 < 1e-2 < theirs, f"ours {ours}, PEFT {theirs}"


def test_adapters_and_fine_tunes_add_exactly(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    made = adapter(pair.base, tmp_path / "adapter", target_modules=["q_proj"], use_dora=True)
    mixed = -0.6 * pair.vector(name="full") + 0.2 * made.vector(name="lora")
    assert mixed.expression == "-0.6*full + 0.2*lora"
    truth, name = merged_change(made), f"{Q}.weight"
    full = tensors(pair.tuned)[name].read().double() - tensors(pair.base)[name].read().double()
    torch.testing.assert_close(mixed.dense(name, "float64"), -0.6 * full + 0.2 * truth[name], rtol=0, atol=1e-7)


# Where adapters come from.


def test_adapters_are_read_from_the_hub_at_a_revision(models: TinyModels, hub: HubServer, tmp_path: Path) -> None:
    base = models.pair("phi").base
    made = adapter(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["lm_head"])
    edit_config(made.folder, base_model_name_or_path="me/base")
    first = hub.add_repo("me/adapter", made.folder)
    hub.add_repo("me/adapter", {"README.md": b"gone"})
    commit = hub.add_repo("me/base", base)
    vector = TaskVector.from_adapter("me/adapter", revision=first)
    assert error(vector, merged_change(made)) < 2e-7
    (origin,) = vector.provenance.origins
    assert (origin.tuned.name, origin.tuned.revision) == ("me/adapter", first)
    assert (origin.base.name, origin.base.revision) == ("me/base", commit)
    with pytest.raises(TaskVectorError, match=r"me/adapter has no adapter_config\.json"):
        TaskVector.from_adapter("me/adapter")


def test_a_plain_adapter_needs_no_base_weights(models: TinyModels, hub: HubServer, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    edit_config(made.folder, base_model_name_or_path="me/base")
    hub.add_repo("me/base", made.base)
    vector = made.vector()
    assert hub.count("model.safetensors") == 0
    assert vector.provenance.origins[0].base.name == "me/base"
    hub.clear()
    assert error(made.vector(), merged_change(made)) < 2e-7  # not even its config


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_bin_adapters_and_a_null_task_type_are_read(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"], bias="all")
    truth = merged_change(made)
    torch.save(load_file(made.folder / WEIGHTS), made.folder / "adapter_model.bin")
    (made.folder / WEIGHTS).unlink()
    assert json.loads((made.folder / "adapter_config.json").read_text())["task_type"] is None
    assert error(made.vector(), truth) < 2e-7
    edit_config(made.folder, task_type="CAUSAL_LM")
    assert error(made.vector(), truth) < 2e-7


@pytest.mark.parametrize("flag", [True, False])
def test_a_wrong_fan_in_fan_out_does_no_harm(models: TinyModels, tmp_path: Path, flag: bool) -> None:
    made = adapter(models.pair("gpt2").base, tmp_path / "adapter", target_modules=["c_attn", "c_proj"])
    truth = merged_change(made)
    edit_config(made.folder, fan_in_fan_out=flag)
    assert error(made.vector(), truth) < 2e-7
    linear = adapter(models.pair("phi").base, tmp_path / "linear", target_modules=["fc1"])
    truth = merged_change(linear)
    edit_config(linear.folder, fan_in_fan_out=flag)
    assert error(linear.vector(), truth) < 2e-7


def test_live_adapters_are_chosen_by_name_and_copied(models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("phi").base
    made = adapter(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["final_layernorm"])
    truth = merged_change(made)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), made.folder, adapter_name="first")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["fc1"]))
    vector = TaskVector.from_adapter(model, adapter_name="first")
    second = TaskVector.from_adapter(model, adapter_name="second")
    assert set(second) == {f"model.layers.{n}.mlp.fc1.weight" for n in range(2)}
    assert TaskVector.from_adapter(model).expression == "first"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert error(vector, truth) < 2e-7
    with pytest.raises(TaskVectorError, match=r"no adapter 'frist'.*first, second.*Did you mean 'first'"):
        TaskVector.from_adapter(model, adapter_name="frist")


def test_two_moments_of_one_live_adapter_stay_apart(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", save=False, target_modules=["q_proj"])
    early = TaskVector.from_adapter(made.live)
    with torch.no_grad():
        for parameter in made.live.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert (TaskVector.from_adapter(made.live) - early).expression == "default - default_2"


def test_adapters_in_folders_of_one_name_stay_apart(models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("phi").base
    runs = [adapter(base, tmp_path / run / "final", seed, target_modules=["q_proj"]) for seed, run in enumerate("ab")]
    assert (runs[0].vector() - runs[1].vector()).expression == "final - final_2"


def test_a_merged_live_adapter_is_refused(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    made.live.merge_adapter()
    with pytest.raises(TaskVectorError, match=r"merged into the live model.*unmerge_adapter"):
        TaskVector.from_adapter(made.live)


def test_a_wrapped_model_is_no_fine_tune(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(TaskVectorError, match=r"wrapped by PEFT.*from_adapter.*merge_and_unload"):
        TaskVector.from_finetuned(made.base, made.live)
    merged = copy.deepcopy(made.live).merge_and_unload()
    ours, theirs = TaskVector.from_adapter(made.live), TaskVector.from_finetuned(made.base, merged)
    assert ours.cosine(theirs) == pytest.approx(1.0, abs=1e-6)


# Refusals, by name.


def test_a_method_that_is_no_change_of_weights_is_refused(models: TinyModels, tmp_path: Path) -> None:
    config = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(models.pair("phi").base), config)
    model.save_pretrained(tmp_path / "prefix")
    for given in (tmp_path / "prefix", model):
        with pytest.raises(
            TaskVectorError, match=r"is a PREFIX_TUNING adapter.*Known are LORA, ADALORA.*from_finetuned"
        ):
            TaskVector.from_adapter(given)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_starts_that_change_the_base_are_refused(models: TinyModels, tmp_path: Path, start: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.pair("phi").base)
    live = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=start))
    live.save_pretrained(tmp_path / "adapter")
    for given in (tmp_path / "adapter", live):
        with pytest.raises(
            TaskVectorError, match=rf"init_lora_weights='{start}', which changes the base.*path_initial"
        ):
            TaskVector.from_adapter(given)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_from_the_base_is_converted_or_subtracted(models: TinyModels, tmp_path: Path, start: str) -> None:
    """By PEFT's own conversion, or less the adapter before training: what PEFT merges, less the base."""
    base = models.pair("phi").base
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = {name: weight.double() for name, weight in model.state_dict().items()}
    live = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=start))
    live.save_pretrained(tmp_path / "unconverted-start")
    live.peft_config["default"].init_lora_weights = True  # as PEFT's documentation has it
    live.save_pretrained(tmp_path / "start")
    live.peft_config["default"].init_lora_weights = start
    with torch.no_grad():
        for name, weight in live.named_parameters():
            if "lora_" in name:
                weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    live.save_pretrained(tmp_path / "trained")
    live.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    merged = live.double().merge_and_unload().state_dict()
    converted = TaskVector.from_adapter(tmp_path / "converted")
    for vector in (
        converted,
        TaskVector.from_adapter(tmp_path / "trained", initial=tmp_path / "start", name="v"),
        TaskVector.from_adapter(tmp_path / "trained", initial=tmp_path / "unconverted-start"),
    ):
        assert vector.is_low_rank and len(vector) == 2
        for name in vector:
            assert torch.allclose(vector.dense(name, torch.float64), merged[name] - before[name], atol=1e-6)
            assert vector.dense(name).norm() > 0.01
    vector.save(tmp_path / "saved")
    again = TaskVector.load(tmp_path / "saved")
    assert all(torch.equal(again.dense(name), vector.dense(name)) for name in vector)
    with pytest.raises(TaskVectorError, match=r"initial=\.\.\.\), or --initial.*path_initial_model_for_weight"):
        TaskVector.from_adapter(tmp_path / "trained")
    other = adapter(base, tmp_path / "other", target_modules=["k_proj"])
    with pytest.raises(TaskVectorError, match="other is not the start of trained"):
        TaskVector.from_adapter(tmp_path / "trained", initial=other.folder)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"layer_replication": [[0, 1], [0, 1]]}, "other layers than the base has"),
        ({"alora_invocation_tokens": [1, 2]}, "after its invocation alone"),
        ({"arrow_config": {"top_k": 1}}, "Make a vector of each of those"),
        ({"megatron_config": {"a": 1}}, "Megatron's layers"),
        ({"use_qalora": True}, "GPTQ-quantised base"),
        ({"use_bdlora": {"nblocks": 2}}, "Merge it into its base"),
        ({"kasa_config": {"beta": 0.1}}, "Merge it into its base"),
        ({"monteclora_config": {"num_samples": 2}}, "Merge it into its base"),
        ({"use_of_a_later_peft": True}, "Merge it into its base"),
        ({"another_later_option": {"depth": 2}}, "Merge it into its base"),
    ],
    ids=str,
)
def test_options_that_are_not_understood_are_refused(
    models: TinyModels, tmp_path: Path, option: dict[str, Any], reason: str
) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    edit_config(made.folder, **option)
    with pytest.raises(TaskVectorError, match=rf"adapter uses LoRA with {next(iter(option))}=.*{reason}"):
        made.vector()
    edit_config(made.folder, **dict.fromkeys(option))
    assert len(made.vector()) == 2  # set to nothing, it does not matter


def test_target_modules_that_do_not_exist_are_refused(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj", "dense"])
    message = r"adapter changes .*self_attn\.dense\.weight.*LlamaForCausalLM does not have.*Did you mean.*another model"
    with pytest.raises(TaskVectorError, match=message):
        made.vector(base=models.pair("llama").base)


def test_an_adapter_of_another_size_is_refused(models: TinyModels, tmp_path: Path) -> None:
    make("phi", hidden_size=32).save_pretrained(tmp_path / "large")
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(TaskVectorError, match=rf"{Q}\.weight: .*\[16, 32\].*\[16, 16\].*another base"):
        made.vector(base=tmp_path / "large")
    saved = adapter(made.base, tmp_path / "saved", target_modules=["q_proj"], modules_to_save=["final_layernorm"])
    with pytest.raises(TaskVectorError, match=r"final_layernorm\.\w+: .*\[32\].*\[16\].*another base"):
        saved.vector(base=tmp_path / "large")
    dora = adapter(made.base, tmp_path / "dora", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(TaskVectorError, match=rf"{Q}\.weight: .*\[16, 32\].*\[16, 16\].*another base"):
        dora.vector(base=tmp_path / "large")


def test_another_vocabulary_is_refused(models: TinyModels, tmp_path: Path) -> None:
    make("phi", vocab_size=24).save_pretrained(tmp_path / "more-words")
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["embed_tokens"])
    with pytest.raises(TaskVectorError, match=r"embed_tokens\.weight.*\[24, 16\].*\[20, 16\].*vocabulary sizes differ"):
        made.vector(base=tmp_path / "more-words")
    saved = adapter(made.base, tmp_path / "saved", target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(TaskVectorError, match=r"lm_head\.\w+.*\[24.*\[20.*vocabulary was resized"):
        saved.vector(base=tmp_path / "more-words")


def test_a_base_that_is_needed_and_cannot_be_reached_is_asked_for(
    models: TinyModels, hub: HubServer, tmp_path: Path
) -> None:
    made = adapter(
        models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    edit_config(made.folder, base_model_name_or_path="me/gone")
    with pytest.raises(TaskVectorError, match=r"modules_to_save\) needs the base model's lm_head\.\w+.*Pass base="):
        made.vector()
    edit_config(made.folder, base_model_name_or_path=None)
    with pytest.raises(TaskVectorError, match=r"names no base\. Pass base="):
        made.vector()
    with pytest.raises(TaskVectorError, match="'me/gone' is neither a folder here nor a repository"):
        made.vector(base="me/gone")
    assert error(made.vector(base=made.base), merged_change(made)) < 2e-7


def test_a_base_in_a_folder_is_recorded(models: TinyModels, hub: HubServer, tmp_path: Path) -> None:
    base = models.pair("phi").base
    made = adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    for vector in (made.vector(), made.vector(base=base), made.vector(base=make("phi"))):
        assert vector.provenance.origins[0].base.fingerprint == open_checkpoint(base).sampled_fingerprint
    made.vector().apply(base, tmp_path / "out", strict_base=True)
    with pytest.raises(TaskVectorError, match="not the base that this vector was made from"):
        made.vector().apply(models.pair("phi").tuned, tmp_path / "other", strict_base=True)
    # A plain LoRA needs no weights: none are downloaded for the record, and a config is enough.
    hub.add_repo("me/base", base)
    assert made.vector(base="me/base").provenance.origins[0].base.fingerprint is None
    assert not hub.count("model.safetensors")
    (tmp_path / "bare").mkdir()
    shutil.copy(base / "config.json", tmp_path / "bare")
    assert made.vector(base=tmp_path / "bare").provenance.origins[0].base.fingerprint is None


def test_a_transposed_layer_is_not_guessed(models: TinyModels, hub: HubServer, tmp_path: Path) -> None:
    made = adapter(models.pair("gpt2").base, tmp_path / "adapter", target_modules=["attn.c_proj", "lm_head"])
    config = json.loads((made.folder / "adapter_config.json").read_text())
    assert not config["fan_in_fan_out"]  # PEFT cleared it for the head
    edit_config(made.folder, base_model_name_or_path="me/gone")
    with pytest.raises(TaskVectorError, match=r"attn\.c_proj\.weight is stored transposed.*Pass base="):
        made.vector()
    name = "transformer.h.0.attn.c_proj.weight"
    assert made.vector(base=made.base).shape(name) == (16, 16)
    alone = adapter(made.base, tmp_path / "alone", target_modules=["attn.c_proj"])
    edit_config(alone.folder, base_model_name_or_path="me/gone")
    assert torch.equal(alone.vector().dense(name), alone.vector(base=made.base).dense(name))


def test_damaged_adapters_are_refused(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    state = load_file(made.folder / WEIGHTS)
    key = f"base_model.model.{Q}.lora_A.weight"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({k: v for k, v in state.items() if k != key}, rf"{Q} has only one of its two LoRA factors"),
        ({**state, key: torch.ones(3, 16)}, rf"factors of {Q} have shapes \[3, 16\] and \[16, 4\].*multiplied"),
        ({**state, key: torch.ones(4)}, rf"factors of {Q} have shapes"),
        ({**state, key: torch.ones(0, 16), key.replace("lora_A", "lora_B"): torch.ones(16, 0)}, "have shapes"),
        ({**state, key.replace("lora_A.", ""): torch.ones(16, 16)}, rf"both LoRA and whole values of {Q}\.weight"),
        ({**state, key: torch.ones(4, 16, dtype=torch.int8)}, r"lora_A\.weight is stored as .*floating-point"),
        ({**state, f"base_model.model.{Q}.lora_C.weight": torch.ones(1)}, rf"{Q} has lora_C, which no LoRA known"),
        ({}, "holds no LoRA weights"),
    ]
    for edited, message in cases:
        save_file(edited, made.folder / WEIGHTS)
        with pytest.raises(TaskVectorError, match=message):
            made.vector()
    (made.folder / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(TaskVectorError, match=r"adapter_model\.safetensors is damaged"):
        made.vector()
    (made.folder / WEIGHTS).unlink()
    with pytest.raises(TaskVectorError, match=r"has none of adapter_model\.safetensors"):
        made.vector()


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": "many"},
        {"lora_alpha": None},
        {"alpha_pattern": 3},
        {"alpha_pattern": {"q_proj": "x"}},
        {"trainable_token_indices": "x"},
        {"peft_type": None},
        {"base_model_name_or_path": 7},
        {"init_lora_weights": 3},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": 10**400},
        {"lora_alpha": True},
        {"lora_alpha": [8]},
        {"alpha_pattern": {"q_proj": float("inf")}},
        {"alpha_pattern": {"(q_proj": 3}},
        {"alpha_pattern": {"q_proj": None}},
        {"rank_pattern": {"q_proj": "x"}},
        {"rank_pattern": [4]},
        {"rank_pattern": {"q_proj": 3}},
        {"r": 3},
        {"r": None},
        {"r": 0},
        {"use_rslora": "no"},
        {"bias": "some"},
        {"bias": None},
        {"peft_type": ["LORA"]},
        {"revision": 5},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused(models: TinyModels, tmp_path: Path, change: dict[str, Any]) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    edit_config(made.folder, **change)
    with pytest.raises(TaskVectorError, match=r"^adapter.*(adapter_config\.json|is a .* adapter)"):
        made.vector()


def test_token_indices_outside_the_vocabulary_are_refused(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(
        models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"], trainable_token_indices=[1, 5]
    )
    for indices, message in (
        ([1], "the 2 tokens that the adapter stores"),
        ([1, 20], "below 20"),
        ([1, -1], "below 20"),
        ([1, 1], "each once"),
        ([1, "x"], "tokens"),
        ({"lm_head": [1, 5]}, "tokens"),
    ):
        edit_config(made.folder, trainable_token_indices=indices)
        with pytest.raises(
            TaskVectorError, match=rf"adapter: .*trainable_token_indices do not fit model\.embed_tokens: .*{message}"
        ):
            made.vector()


def test_the_base_is_given_by_name(models: TinyModels, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="positional"):  # from_finetuned(base, tuned) has it the other way round
        TaskVector.from_adapter(tmp_path / "adapter", models.pair("phi").base)  # type: ignore[misc]


def test_what_is_no_adapter_is_refused(models: TinyModels, tmp_path: Path) -> None:
    with pytest.raises(TaskVectorError, match="expected a folder, a Hub id or a PeftModel, not int"):
        TaskVector.from_adapter(3)  # type: ignore[arg-type]
    with pytest.raises(TaskVectorError, match=r"has no adapter_config\.json.*from_finetuned"):
        TaskVector.from_adapter(models.pair("phi").base)
    model = AutoModelForCausalLM.from_pretrained(models.pair("phi").base)
    with pytest.raises(TaskVectorError, match="not PhiForCausalLM"):
        TaskVector.from_adapter(model)


def test_nan_in_a_factor_is_refused_by_name(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    state = load_file(made.folder / WEIGHTS)
    state[f"base_model.model.{Q}.lora_A.weight"].fill_(math.nan)
    save_file(state, made.folder / WEIGHTS)
    with pytest.raises(TaskVectorError, match=rf"{Q}\.weight.*NaN"):
        made.vector().norm()


def test_a_folder_is_not_followed_out_of_its_name(models: TinyModels, tmp_path: Path) -> None:
    made = adapter(models.pair("phi").base, tmp_path / "adapter", target_modules=["q_proj"])
    moved = shutil.copytree(made.folder, tmp_path / "deep" / "adapter")
    assert str(tmp_path) not in repr(TaskVector.from_adapter(moved))
