"""Tiny models in folders, stored in fewer bits: by others' means or by a format's definition, not by the library's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, PreTrainedModel

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The model that all formats but MXFP4 are made of."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**_SIZES))
    return tiny_models.shake(model, 0.02, 0).to(dtype).eval()


def gpt_oss(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The model of MXFP4."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "head_dim": 32, "num_local_experts": 3, "num_experts_per_tok": 2}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes))
    return tiny_models.shake(model, 0.02, 0).to(dtype).eval()


def linear_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a Llama that are quantised: of its linear layers but for the head."""
    return {
        f"{name}.weight": module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


Pack = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]


def save(folder: Path, model: PreTrainedModel, settings: Mapping[str, Any], pack: Pack) -> Path:
    """A model whose linear weights are stored as `pack` says, in two files."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    plain, chosen = load_file(folder / "model.safetensors"), linear_weights(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        tensors |= pack(name, tensor) if name in chosen else {name: tensor}
    write(folder, tensors, settings)
    return folder


def write(folder: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
    """The tensors of a folder in two files, scales in the second; and what its config says of them."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    is_second = {name: "scale" in name for name in tensors}
    files = {False: "model-00001-of-00002.safetensors", True: "model-00002-of-00002.safetensors"}
    for second, file in files.items():
        these = {name: tensor.contiguous() for name, tensor in tensors.items() if is_second[name] == second}
        save_file(these, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: files[second] for name, second in is_second.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def loaded(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """What transformers makes of a folder, dequantised."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    return dict(model.state_dict())


# FP8, by transformers' own quantiser.


def fp8(
    folder: Path, model: PreTrainedModel, block: tuple[int, int] | None = (32, 32), scale_fmt: str | None = None
) -> Path:
    """FP8 as transformers stores it; without `block` one scale for a matrix."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def pack(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        made = quantiser.convert({name: tensor})
        return {key: each.reshape(()) if block is None and "scale" in key else each for key, each in made.items()}

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}
    return save(folder, model, settings | ({"scale_fmt": scale_fmt} if scale_fmt else {}), pack)


def mxfp4(folder: Path, model: PreTrainedModel) -> Path:
    """gpt-oss with random codes and exponents in its experts."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj") and tensor.ndim == 3:
            experts, inputs, outputs = tensor.shape
            size = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 122, size, generator=generator, dtype=torch.uint8)
        else:
            tensors[name] = tensor
    write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    return folder


# compressed-tensors, by its own package.


def compressed(
    folder: Path, model: PreTrainedModel, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None
) -> Path:
    """A model as compressed-tensors stores it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if activations is None else QuantizationArgs(**activations, dynamic=True),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        arguments = module.quantization_scheme.weights
        low, high = _extremes(module.weight.data, arguments)
        scale, zero = calculate_qparams(low, high, arguments)
        module.weight_scale.data = scale.to(module.weight_scale.dtype).reshape(module.weight_scale.shape)
        if hasattr(module, "weight_zero_point"):
            found = module.weight_zero_point
            found.data = zero.to(found.dtype).reshape(found.shape)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def _extremes(weight: torch.Tensor, arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if arguments.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if arguments.strategy == "group":
        groups = weight.unflatten(1, (-1, arguments.group_size))
        return groups.amin(2), groups.amax(2)
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)


COMPRESSED: dict[str, dict[str, Any]] = {
    "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32], "symmetric": True},
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int4-group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "int4-zeros": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "int8-packed": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int3-group": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
}


def activations_of(kind: str) -> dict[str, Any] | None:
    """How activations are quantised in that kind of compressed-tensors."""
    of_type = {"fp8": "float", "int8-channel": "int"}
    found = next((each for start, each in of_type.items() if kind.startswith(start)), None)
    return None if found is None else {"num_bits": 8, "type": found, "strategy": "token", "symmetric": True}


def compressed_experts(folder: Path, kind: str) -> Path:
    """A Mixtral with random codes and scales in each expert and projection, in a kind of compressed-tensors."""
    made = compressed(folder / "dense", llama(), COMPRESSED[kind], activations_of(kind))
    settings = json.loads((made / "config.json").read_text())["quantization_config"]
    torch.manual_seed(0)
    config = MixtralConfig(**_SIZES, num_local_experts=3, num_experts_per_tok=2)
    tiny_models.shake(AutoModelForCausalLM.from_config(config), 0.02, 0).bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored(folder).items():
        if not re.search(r"_proj\.|\.w[123]\.", name):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        if kind.startswith("fp8"):
            scales = (rows, 1) if kind == "fp8-channel" else (1,)
            tensors[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        else:
            scales = (rows, columns // 32)
            tensors[f"{name}_packed"] = _words(torch.randint(0, 16, (rows, columns)).tolist(), 4)
            tensors[f"{name}_shape"] = torch.tensor([rows, columns])
        tensors[f"{name}_scale"] = torch.rand(scales).mul(0.01).add(1e-3).bfloat16()
    write(folder, tensors, {**settings, "ignore": ["lm_head", "re:.*gate$"]})
    return folder


# GPTQ and AWQ, by their definitions: a row of fields is one long number, whose lowest bits are the first field.


def _words(fields: list[list[int]], bits: int) -> torch.Tensor:
    numbers = [sum(field << (bits * place) for place, field in enumerate(row)) for row in fields]
    count = -(-len(fields[0]) * bits // 32)
    rows = [[(number >> (32 * word)) & 0xFFFFFFFF for word in range(count)] for number in numbers]
    return torch.tensor([[word - (1 << 32) if word >> 31 else word for word in row] for row in rows], dtype=torch.int32)


def gptq(
    folder: Path, model: PreTrainedModel, bits: int = 4, act_order: bool = False, version: int = 1
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model with random codes in GPTQ's format; and what its weights are."""
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, torch.Tensor] = {}

    def pack(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        outputs, inputs = tensor.shape
        groups = torch.arange(inputs, dtype=torch.int32) // 32
        if act_order:
            groups = groups[torch.randperm(inputs, generator=generator)]
        codes = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
        zeros = torch.randint(1, 1 << bits, (inputs // 32, outputs), generator=generator)
        scales = torch.rand(inputs // 32, outputs, generator=generator).mul(0.01).half()
        steps = (codes - zeros[groups.long()]).float()
        expected[name] = (steps * scales[groups.long()].float()).half().t().contiguous()
        before = name.removesuffix("weight")
        return {
            f"{before}qweight": _words(codes.t().tolist(), bits).t(),
            f"{before}qzeros": _words((zeros - int(version == 1)).tolist(), bits),
            f"{before}scales": scales,
            f"{before}g_idx": groups,
        }

    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": act_order, "sym": False}
    settings |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return save(folder, model, settings, pack), expected


def awq(folder: Path, model: PreTrainedModel) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model with random codes in AWQ's format; and what its weights are."""
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, torch.Tensor] = {}

    def words(fields: torch.Tensor) -> torch.Tensor:
        order = [8 * (place // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[place % 8] for place in range(fields.shape[1])]
        return _words(fields[:, order].tolist(), 4)

    def pack(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        outputs, inputs = tensor.shape
        codes = torch.randint(0, 16, (inputs, outputs), generator=generator)
        zeros = torch.randint(0, 16, (inputs // 32, outputs), generator=generator)
        scales = torch.rand(inputs // 32, outputs, generator=generator).mul(0.01).half()
        steps = (codes - zeros.repeat_interleave(32, 0)).float()
        expected[name] = (steps * scales.repeat_interleave(32, 0).float()).half().t().contiguous()
        before = name.removesuffix("weight")
        return {f"{before}qweight": words(codes), f"{before}qzeros": words(zeros), f"{before}scales": scales}

    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    return save(folder, model, settings, pack), expected


# GGUF, by the gguf package.

_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf(path: Path, kind: str) -> Path:
    """A Llama whose layers have random blocks of a type, or (`Q8_0`, `BF16`) its weights in it."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize

    torch.manual_seed(0)
    sizes = {**_SIZES, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    for add, number in (
        (writer.add_context_length, 32),
        (writer.add_embedding_length, 256),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 256),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_rope_dimension_count, 64),
        (writer.add_vocab_size, 40),
    ):
        add(number)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{number}" for number in range(40)])
    writer.add_token_scores([0.0] * 40)
    writer.add_token_types([1] * 40)
    of_kind, random = GGMLQuantizationType[kind], np.random.default_rng(0)
    elements, size = GGML_QUANT_SIZES[of_kind]
    for name, tensor in model.state_dict().items():
        numbers = name.split(".")
        short = next(new for old, new in _GGUF_NAMES.items() if f"{old}." in name)
        found = f"blk.{numbers[2]}.{short}.weight" if "layers" in name else f"{short}.weight"
        if tensor.ndim < 2 or "layers" not in name:
            writer.add_tensor(found, tensor.numpy())
        elif kind in ("Q8_0", "BF16"):
            writer.add_tensor(found, quantize(tensor.numpy(), of_kind), raw_dtype=of_kind)
        else:
            blocks = random.integers(0, 256, (len(tensor), 256 // elements * size), dtype=np.uint8)
            scales = np.frombuffer(np.float16(0.01).tobytes() * 2, dtype=np.uint8)
            each = blocks.reshape(-1, size)
            if kind == "Q6_K":
                each[:, -2:] = scales[:2]
            else:
                each[:, :4] = scales
            writer.add_tensor(found, blocks, raw_dtype=of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
