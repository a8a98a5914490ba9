"""Classes beside the causal language models: those that other auto classes of transformers give for some model types.

The types are those that people meet most; the classes of one type differ in their heads, so a few stand for many.
"""

from __future__ import annotations

from transformers.models.auto import modeling_auto

#: what transformers calls the tables of its auto classes
TABLES = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "MULTIPLE_CHOICE",
    "MASKED_LM",
    "TEXT_ENCODING",
    "IMAGE_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "IMAGE_TEXT_TO_TEXT",
)
_TYPES = (
    *("albert", "bart", "beit", "bert", "blip", "clip", "convnext", "deberta-v2", "deit", "distilbert", "electra"),
    *("gemma3", "gpt2", "hubert", "llama", "llava", "mbart", "mistral", "modernbert", "mt5", "paligemma", "pegasus"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3", "resnet", "roberta", "siglip", "smolvlm", "swin", "t5", "umt5", "vit"),
    *("wav2vec2", "whisper", "xlm-roberta", "xlnet"),
)


def _classes() -> dict[str, tuple[str, str]]:
    """Class -> the table that has it first, and its model type; none that a causal language model is."""
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    found: dict[str, tuple[str, str]] = {}
    for table in TABLES:
        names = vars(modeling_auto)[f"MODEL_FOR_{table}_MAPPING_NAMES"]
        for model_type in _TYPES:
            named = names.get(model_type, ())
            for name in (named,) if isinstance(named, str) else named:
                if name not in causal:
                    found.setdefault(name, (table, model_type))
    return found


#: class -> table of an auto class, model type
CLASSES = _classes()
