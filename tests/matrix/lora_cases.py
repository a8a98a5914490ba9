"""Every field of `LoraConfig` at values other than its default, alone and in pairs.

A field without a case fails `test_every_field_of_lora_config_has_a_case`: so a later PEFT cannot add one unnoticed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import peft
from peft.tuners.lora.config import (
    ArrowConfig,
    BdLoraConfig,
    CordaConfig,
    EvaConfig,
    KasaConfig,
    LoraGAConfig,
    LoraRuntimeConfig,
    MontecloraConfig,
    VeloraConfig,
)

_TARGETS = {
    "phi": ["q_proj", "dense", "fc1"],
    "llama": ["q_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gemma3_text": ["q_proj", "down_proj"],
}


@dataclass(frozen=True)
class Case:
    """Fields of `LoraConfig` on a tiny model. phi's is untied, and has biases everywhere."""

    settings: dict[str, Any]
    model_type: str = "phi"

    def config(self) -> peft.LoraConfig:
        """The config as a user would write it."""
        return peft.LoraConfig(
            **{"r": 4, "lora_alpha": 6, "target_modules": _TARGETS[self.model_type], **self.settings}
        )


def _case(**settings: Any) -> Case:
    return Case(settings)


#: field -> label -> case; the first case of a field is the one that is paired with other fields
FIELDS: dict[str, dict[str, Case]] = {
    "task_type": {"causal": _case(task_type="CAUSAL_LM")},
    "peft_type": {"named": _case(peft_type="LORA")},
    "auto_mapping": {
        "classes": _case(auto_mapping={"base_model_class": "PhiForCausalLM", "parent_library": "transformers"})
    },
    "peft_version": {"old": _case(peft_version="0.18.0")},
    "base_model_name_or_path": {"elsewhere": _case(base_model_name_or_path="someone/phi")},
    "revision": {"branch": _case(revision="main")},
    "inference_mode": {"true": _case(inference_mode=True)},
    "r": {"1": _case(r=1), "more than the matrix has": _case(r=40)},
    "target_modules": {
        "all-linear": _case(target_modules="all-linear"),
        "regex": _case(target_modules=r".*\.(k_proj|fc2)"),
        "embeddings and head": _case(target_modules=["embed_tokens", "lm_head"]),
        "tied embeddings": Case({"target_modules": ["embed_tokens"]}, "gemma3_text"),
        "tied head": Case({"target_modules": ["lm_head"]}, "gemma3_text"),
    },
    "exclude_modules": {"one layer": _case(exclude_modules=["model.layers.0.self_attn.q_proj"])},
    "lora_alpha": {"3": _case(lora_alpha=3), "0": _case(lora_alpha=0), "negative": _case(lora_alpha=-3)},
    "lora_dropout": {"0.5": _case(lora_dropout=0.5)},
    "fan_in_fan_out": {
        "wrongly true": _case(fan_in_fan_out=True),
        "Conv1D": Case({"fan_in_fan_out": True}, "gpt2"),
        "Conv1D, wrongly false": Case({"fan_in_fan_out": False}, "gpt2"),
    },
    "bias": {"all": _case(bias="all"), "lora_only": _case(bias="lora_only")},
    "use_rslora": {"true": _case(use_rslora=True)},
    "modules_to_save": {
        "norm and head": _case(modules_to_save=["final_layernorm", "lm_head"]),
        "a target": _case(modules_to_save=["fc1"]),
        "a block": _case(modules_to_save=["self_attn"], target_modules=["fc1"]),
        "tied embeddings": Case({"modules_to_save": ["embed_tokens"]}, "gemma3_text"),
        "tied head": Case({"modules_to_save": ["lm_head"]}, "gemma3_text"),
        "both of a tied pair": Case({"modules_to_save": ["embed_tokens", "lm_head"]}, "gemma3_text"),
    },
    "init_lora_weights": {
        "gaussian": _case(init_lora_weights="gaussian"),
        **{kind: _case(init_lora_weights=kind) for kind in ("orthogonal", "mica", "pissa", "pissa_niter_2", "olora")},
        "none": _case(init_lora_weights=False),
        "loftq": _case(init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1}),
        "eva": _case(init_lora_weights="eva", eva_config=EvaConfig()),
        "corda": _case(init_lora_weights="corda", corda_config=CordaConfig()),
        "lora_ga": _case(init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig()),
    },
    "layers_to_transform": {"one": _case(layers_to_transform=1), "list": _case(layers_to_transform=[0])},
    "layers_pattern": {"layers": _case(layers_to_transform=[1], layers_pattern="layers")},
    "rank_pattern": {"name": _case(rank_pattern={"fc1": 2}), "regex": _case(rank_pattern={r"^model.*\.0\..*fc1": 2})},
    "alpha_pattern": {
        "name": _case(alpha_pattern={"q_proj": 9}),
        "two that match": _case(alpha_pattern={"fc1": 3, ".*": 11}),
    },
    "megatron_config": {"any": _case(megatron_config={"hidden_size": 16})},
    "megatron_core": {"any": _case(megatron_core="megatron.elsewhere")},
    "trainable_token_indices": {
        "list": _case(trainable_token_indices=[1, 5]),
        "by name": Case(
            {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [2]}}, "llama"
        ),  # of phi PEFT drops a bias
        "tied": Case({"trainable_token_indices": [1, 5]}, "gemma3_text"),
    },
    "loftq_config": {"without its init": _case(loftq_config={"loftq_bits": 4, "loftq_iter": 1})},
    "eva_config": {"without its init": _case(eva_config=EvaConfig(rho=1.5))},
    "corda_config": {"without its init": _case(corda_config=CordaConfig())},
    "lora_ga_config": {"without its init": _case(lora_ga_config=LoraGAConfig())},
    "use_dora": {"true": _case(use_dora=True), "Conv1D": Case({"use_dora": True}, "gpt2")},
    "velora_config": {"groups": _case(velora_config=VeloraConfig(num_groups=2))},
    "alora_invocation_tokens": {"tokens": _case(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")},
    "use_qalora": {"true": _case(use_qalora=True, qalora_group_size=4)},
    "qalora_group_size": {"without use_qalora": _case(qalora_group_size=4)},
    "monteclora_config": {"samples": _case(monteclora_config=MontecloraConfig(num_samples=2))},
    "layer_replication": {"doubled": Case({"layer_replication": [[0, 2], [0, 2]]}, "llama")},
    "runtime_config": {"offload": _case(runtime_config=LoraRuntimeConfig(ephemeral_gpu_offload=True))},
    "lora_bias": {"true": _case(lora_bias=True), "layers without biases": Case({"lora_bias": True}, "llama")},
    "target_parameters": {"a weight": _case(target_modules=[], target_parameters=["fc1.weight"])},
    "use_bdlora": {
        "blocks": _case(
            use_bdlora=BdLoraConfig(target_modules_bd_a=["q_proj", "dense"], target_modules_bd_b=["fc1"], nblocks=2)
        )
    },
    "arrow_config": {"top 1": _case(arrow_config=ArrowConfig(top_k=1))},
    "kasa_config": {"any": _case(kasa_config=KasaConfig())},
    "ensure_weight_tying": {
        "untied": _case(ensure_weight_tying=True, modules_to_save=["lm_head"]),
        "tied, saved": Case({"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]}, "gemma3_text"),
        "tied, LoRA": Case({"ensure_weight_tying": True, "target_modules": ["embed_tokens"]}, "gemma3_text"),
    },
}

#: fields that say nothing about weights, so that pairs with them would tell nothing
_UNPAIRED = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "megatron_core", "runtime_config", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "qalora_group_size", "layer_replication"),
}


def singles() -> dict[str, Case]:
    """Each case of each field."""
    return {f"{name}: {label}": case for name, cases in FIELDS.items() for label, case in cases.items()}


def pairs() -> dict[str, Case]:
    """The first cases of two fields together, where they do not set the same field to different values."""
    firsts = {name: next(iter(cases.values())).settings for name, cases in FIELDS.items() if name not in _UNPAIRED}
    found = {}
    for (a, first), (b, second) in itertools.combinations(firsts.items(), 2):
        if all(first[key] == second[key] for key in first.keys() & second.keys()):
            found[f"{a} × {b}"] = Case({**first, **second})
    return found
