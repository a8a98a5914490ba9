"""Tiny random models of other classes than causal language models, and something to run each of them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from support.tiny_models import shake
from transformers import PreTrainedModel

_TOKENS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_ENCODER = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
_SEQ2SEQ = {
    **_TOKENS,
    "d_model": 16,
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 1),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 32),
}
_T5 = {**_TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_GPT2 = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0}
_VISION = {key: _ENCODER[key] for key in _ENCODER if key not in ("vocab_size", "max_position_embeddings")}
_VISION |= {"image_size": 28, "patch_size": 14}
_WHISPER = {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
_CLIP = {
    "text_config": {**_ENCODER, "projection_dim": 8},
    "vision_config": {**_VISION, "projection_dim": 8},
    "projection_dim": 8,
}
_LLAVA = {
    "text_config": {"model_type": "llama", **_ENCODER},
    "vision_config": {"model_type": "clip_vision_model", **_VISION},
    "image_token_index": 55,
}


@dataclass(frozen=True)
class TinyClass:
    """A class of transformers, its config, and what it is run on."""

    name: str
    config: str
    settings: dict[str, Any]
    reads: tuple[str, ...] = ("input_ids",)

    def make(self, seed: int = 0, **settings: Any) -> PreTrainedModel:
        """A model whose every parameter is random."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**self.settings, **settings})
        return shake(getattr(transformers, self.name)(config), 0.02, seed).eval()

    def inputs(self) -> dict[str, torch.Tensor]:
        """Two rows of each of the things that it reads."""
        generator = torch.Generator().manual_seed(7)
        shapes = {"pixel_values": (2, 3, 28, 28), "input_features": (2, 8, 32)}
        tokens = torch.tensor([[5, 7, 9, 11, 2], [6, 8, 10, 12, 2]])
        return {
            name: torch.randn(shapes[name], generator=generator) if name in shapes else tokens for name in self.reads
        }

    def outputs(self, model: Any) -> torch.Tensor:
        """The model's main answer, in fp64."""
        with torch.no_grad():
            found = model(**self.inputs())
        key = next(key for key in ("logits", "logits_per_image", "start_logits", "last_hidden_state") if key in found)
        return found[key].double()


_BOTH = ("input_ids", "decoder_input_ids")
CLASSES = {
    each.name: each
    for each in (
        TinyClass("T5ForConditionalGeneration", "T5Config", _T5, _BOTH),
        TinyClass("T5ForSequenceClassification", "T5Config", _T5),
        TinyClass("T5EncoderModel", "T5Config", _T5),
        TinyClass("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ, _BOTH),
        TinyClass("MarianMTModel", "MarianConfig", {**_SEQ2SEQ, "forced_eos_token_id": 2}, _BOTH),
        TinyClass("BertModel", "BertConfig", _ENCODER),
        TinyClass("BertForMaskedLM", "BertConfig", _ENCODER),
        TinyClass("BertForSequenceClassification", "BertConfig", _ENCODER),
        TinyClass("BertForQuestionAnswering", "BertConfig", _ENCODER),
        TinyClass("RobertaForTokenClassification", "RobertaConfig", _ENCODER),
        TinyClass("GPT2ForSequenceClassification", "GPT2Config", _GPT2),
        TinyClass("ViTForImageClassification", "ViTConfig", _VISION, ("pixel_values",)),
        TinyClass("CLIPModel", "CLIPConfig", _CLIP, ("input_ids", "pixel_values")),
        TinyClass(
            "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, ("input_features", "decoder_input_ids")
        ),
        TinyClass("LlavaForConditionalGeneration", "LlavaConfig", _LLAVA),
    )
}
