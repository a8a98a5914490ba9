"""A tiny random model of every type in transformers' causal mapping, made from its own config class.

The config's fields are made small by their names, in nested configs too; `EXCEPTIONS` has what a name alone does not
tell. Other fields keep their defaults, so that the model has the parts that the type's real models have.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from matrix.other_classes import CLASSES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 96
#: a model with more parameters is not tiny, and is not built
MOST_ELEMENTS = 30_000_000

_SIZES: dict[str, Any] = {
    # width
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim"], 16),
    **dict.fromkeys(["word_embed_proj_dim", "hidden_size_global", "input_size", "out_hidden_size"], 16),
    **dict.fromkeys(["input_embedding_size", "output_embedding_size", "backbone_hidden_size", "lru_width"], 16),
    **dict.fromkeys(["attention_hidden_size", "pronunciation_embed_dim", "shape_embed_dim"], 16),
    **dict.fromkeys(["vision_output_dim", "projector_input_dim", "projector_output_dim", "output_channels"], 16),
    **dict.fromkeys(["output_proj_dims", "mm_embed_dim", "audio_embed_dim", "entity_emb_size", "d_latents"], 16),
    # depth
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_encoder_layers", "num_decoder_layers", "num_blocks", "depth", "num_global_layers"], 2),
    **dict.fromkeys(["conf_num_hidden_layers", "num_layers_per_stack", "layers", "num_self_attends_per_block"], 2),
    # heads
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads"], 2),
    **dict.fromkeys(["num_decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "kv_n_heads"], 2),
    **dict.fromkeys(["linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "index_n_heads"], 2),
    **dict.fromkeys(["swa_num_attention_heads", "swa_num_key_value_heads", "conf_num_attention_heads"], 2),
    **dict.fromkeys(["num_query_groups", "num_self_attention_heads", "num_cross_attention_heads"], 2),
    **dict.fromkeys(["head_dim", "v_head_dim", "kv_channels", "attention_head_dim", "attention_head_size"], 8),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "linear_head_dim", "d_kv"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "swa_head_dim", "dim_head", "d_head"], 8),
    **dict.fromkeys(["mamba_head_dim", "mamba_d_head", "mamba_headdim", "rotary_dim", "global_head_dim"], 8),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "n_mamba_heads"], 4),
    **dict.fromkeys(["qk_head_dim"], 16),
    # feed-forward parts
    **dict.fromkeys(["intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"], 32),
    **dict.fromkeys(["dff", "dim_ff", "d_ff", "d_inner", "feed_forward_size", "intermediate_size_mlp", "mlp_dim"], 32),
    **dict.fromkeys(["dense_intermediate_size", "mamba_d_ssm", "prompt_mid_dim"], 32),
    **dict.fromkeys(["shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"], 8),
    **dict.fromkeys(["moe_intermediate_size", "moe_shared_expert_intermediate_size"], 8),
    # experts
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group", "zero_expert_num"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"], 1),
    "router_hidden_size": 8,
    # ranks and states
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank", "hc_lowrank"], 4),
    **dict.fromkeys(["gated_norm_rank", "time_step_rank", "mamba_dt_rank", "d_rel"], 4),
    **dict.fromkeys(["state_size", "mamba_d_state", "ssm_state_size", "chunk_size", "mamba_chunk_size"], 8),
    **dict.fromkeys(["n_groups", "mamba_n_groups", "mamba_ngroups", "o_groups"], 1),
    **dict.fromkeys(["hidden_size_per_layer_input", "ple_embed_dim"], 8),
    "num_kv_shared_layers": 0,
    # positions
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"], 64),
    **dict.fromkeys(["max_target_positions", "max_source_positions", "model_max_length"], 64),
    **dict.fromkeys(["sliding_window", "sliding_window_size", "attention_window_size", "local_attention"], 16),
    **dict.fromkeys(["attention_chunk_size", "keep_window_size", "rel_extent"], 16),
    "index_topk": 4,
    "block_size": 16,
    "prompt_length": 4,
    # tokens
    **dict.fromkeys(["vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(["pronunciation_vocab_size", "shape_vocab_size", "codebook_size", "audio_vocab_size"], 32),
    **dict.fromkeys(["encoder_hash_byte_group_vocab", "ngram_vocab_size_base", "entity_vocab_size"], 32),
    # pictures and sounds
    **dict.fromkeys(["image_size", "crop_size"], 28),
    "patch_size": 14,
    **dict.fromkeys(["base_channels", "num_filters", "codebook_dim"], 8),
    **dict.fromkeys(["ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"], 16),
    **dict.fromkeys(["num_position_embeddings", "position_embedding_size", "mm_posemb_size"], 16),
    "vector_quantization_hidden_dimension": 8,
    "num_codebooks": 2,
}

#: widths of stages, of which every number hangs on the others
_QUARTERED = ("hidden_sizes", "embed_dim", "embed_dims", "encoder_hidden_sizes", "neck_hidden_sizes")
_DEPTHS = ("depths", "depth", "encoder_depths")

_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_ROPE, "mrope_section": [1, 1, 2]}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ple_embed_dim": 16,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 2,
    "heads_per_ngram": 2,
}

#: what a field's name alone does not tell: type -> field (with dots into nested configs) -> value
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **{
        name: {"text_config.rope_parameters": _SECTIONS}
        for name in ("glm46v", "glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl")
    },
    "bamba": {"attn_layer_indices": [1]},
    "chinese_clip": {"text_config.pad_token_id": None},  # as youtu's
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "convnext": {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "distilbert": {"dim": 16, "hidden_dim": 32},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25},
    "funnel": {"pad_token_id": None},  # as youtu's
    "gemma4": {"text_config.global_head_dim": 8},
    "gemma4_assistant": {
        "text_config.global_head_dim": 8,
        "text_config.hidden_size_per_layer_input": 0,
        "text_config.vocab_size_per_layer_input": 0,
    },
    "gemma4_text": {"global_head_dim": 8},
    "gemma4_unified": {"text_config.global_head_dim": 8},
    "gemma4_unified_assistant": {"text_config.global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hubert": {"conv_dim": (8,) * 7, "num_conv_pos_embedding_groups": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2": {"text_config.pad_token_id": None},  # as youtu's
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4},
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "qwen2_vl": {
        "text_config.rope_parameters": _SECTIONS,
        "vision_config.embed_dim": 16,
        "vision_config.mlp_ratio": 2,
    },
    "qwen4_exp": {f"text_config.{name}": value for name, value in _QWEN4.items()},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (4, 12)},
    "resnet": {"hidden_sizes": [8, 8], "depths": [1, 1]},
    "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "patch_size": 7},
    "wav2vec2": {"conv_dim": (8,) * 7, "num_conv_pos_embedding_groups": 2},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 32,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "youtu": {"pad_token_id": None},  # transformers clears the row of that token whenever it loads the model
    "zaya": {"num_experts_per_tok": 1},
}

#: buffers that transformers sets to their first values whenever it loads the model, whatever the files hold
RESET_BY_LOADING = {"zaya": "balancing_biases"}


def tiny_config(model_type: str, shallow: bool = False) -> PreTrainedConfig:
    """The type's config, made small; `shallow` makes only what can be of any number small: layers, tokens."""
    config = CONFIG_MAPPING[model_type]
    settings = _small(config, shallow)
    for path, value in EXCEPTIONS.get(model_type, {}).items():
        *parents, name = path.split(".")
        inner = settings
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return config(**settings)


def _small(config: type[PreTrainedConfig], shallow: bool = False) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    tokens = VOCABULARY
    whole = _defaults(config)
    for field in dataclasses.fields(config):
        name, default = field.name, whole.get(field.name, field.default)
        is_size = name in _SIZES and not (isinstance(default, bool | str) or default == 0)
        if name in config.sub_configs:
            if (nested := _nested(config, name)) is not None:
                settings[name] = {
                    **({"model_type": nested.model_type} if nested.model_type else {}),
                    **_small(nested, shallow),
                }
            elif isinstance(default, PreTrainedConfig):  # a backbone, with the widths that the whole expects
                settings[name] = {**default.to_dict(), **_shorter(vars(default))}
        elif isinstance(default, list | tuple):
            settings |= _shorter({name: default}) if shallow else _smaller_stages(name, default)
        elif is_size and (not shallow or (_SIZES[name] in (2, VOCABULARY) and "head" not in name)):
            settings[name] = _SIZES[name]
        elif name in _QUARTERED and isinstance(default, int) and not shallow:
            settings[name] = max(8, default // 4)
        elif name in _TOKENS:
            settings[name] = _TOKENS[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(field.default, int):
            tokens -= 1
            settings[name] = tokens
    return {**settings, **_layer_kinds(config)}


def _shorter(fields: Mapping[str, Any]) -> dict[str, Any]:
    """One layer in each stage, for types that list how many each stage has."""
    return {n: [1] * len(each) for n, each in fields.items() if n in _DEPTHS and isinstance(each, list | tuple)}


def _smaller_stages(name: str, default: Sequence[Any]) -> dict[str, Any]:
    """What a type lists for its stages: a quarter of their widths, one layer in each; pictures of its own form."""
    if name in _QUARTERED:
        return {name: [each // 4 for each in default]}
    if name in ("image_size", "patch_size") and len(default) == 2:
        return {name: [_SIZES[name]] * 2}
    return _shorter({name: default})


def _nested(config: type[PreTrainedConfig], name: str) -> type[PreTrainedConfig] | None:
    """The class of a config inside another; None if there is none of its own, or it may be of any type."""
    nested = config.sub_configs.get(name)
    if nested is None or issubclass(nested, PreTrainedConfig):
        return nested
    model_type = config.sub_configs_defaults[name].model_type  # `AutoConfig`
    return None if model_type is None else CONFIG_MAPPING[model_type]


def _defaults(config: type[PreTrainedConfig]) -> dict[str, Any]:
    """What the fields are if nothing is said; nothing for a type whose defaults do not fit together."""
    try:
        return vars(config())
    except (StrictDataclassError, ValueError):
        return {}


def _layer_kinds(config: type[PreTrainedConfig]) -> dict[str, Any]:
    """One layer of each kind, for types that list the kinds of their layers; two layers at least."""
    whole = _defaults(config)
    names = [field.name for field in dataclasses.fields(config)]
    lists = {name: whole[name] for name in names if isinstance(whole.get(name), list) and whole[name]}
    kinds = {
        n: each for n, each in lists.items() if isinstance(each[0], str) and len(each) == whole.get("num_hidden_layers")
    }
    layers = list(dict.fromkeys(zip(*kinds.values(), strict=True)))
    if not layers:
        return {}
    if len(layers) == 1:
        layers *= 2
    return {"num_hidden_layers": len(layers), **dict(zip(kinds, map(list, zip(*layers, strict=True)), strict=True))}


def build(row: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model as transformers starts it, before anything is trained: of a causal type, or of another class."""
    torch.manual_seed(seed)
    transformers.logging.set_verbosity_error()
    if row not in CLASSES:
        return AutoModelForCausalLM.from_config(tiny_config(row)).eval()
    _, model_type = CLASSES[row]
    try:
        return _of_class(row, tiny_config(model_type))
    except Exception as first:  # some numbers of the type hang on others
        try:
            return _of_class(row, tiny_config(model_type, shallow=True))
        except Exception:
            raise first from None


def _of_class(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    made = getattr(transformers, name)
    if not isinstance(config, made.config_class):  # a part of the type's model
        parts = [getattr(config, each) for each in config.sub_configs]
        config = next((each for each in parts if isinstance(each, made.config_class)), config)
    with torch.device("meta"):
        size = sum(each.numel() for each in made._from_config(copy.deepcopy(config)).parameters())
    if size > MOST_ELEMENTS:
        raise ValueError(f"no tiny one was found: {size} parameters")
    return made._from_config(config).eval()


def inputs(model: PreTrainedModel) -> dict[str, Any]:
    """What a forward pass of the model takes: a row of tokens, or what stands for one."""
    given: dict[str, Any] = {"use_cache": False}
    if "assistant" in model.config.model_type:  # reads another model's states
        generator = torch.Generator().manual_seed(3)
        states = torch.randn(2, 1, 2, 8, 8, generator=generator)
        given["shared_kv_states"] = dict.fromkeys(("full_attention", "sliding_attention"), tuple(states))
        width = 2 * model.config.backbone_hidden_size
        return {**given, "inputs_embeds": torch.randn(1, 8, width, generator=generator)}
    return {**given, "input_ids": torch.tensor([[5, 7, 9, 11, 13, 4, 6, 8]])}
