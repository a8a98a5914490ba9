"""Adapters of classifiers, encoders, sequence-to-sequence models and models of pictures and sounds, beside PEFT."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.tiny_classes import CLASSES
from support.tiny_models import tuned_copy

from hf_taskvec import TaskVector
from hf_taskvec.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")

TASKS = {
    "T5ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "BartForConditionalGeneration": "SEQ_2_SEQ_LM",
    "BertModel": "FEATURE_EXTRACTION",
    "BertForSequenceClassification": "SEQ_CLS",
    "BertForQuestionAnswering": "QUESTION_ANS",
    "RobertaForTokenClassification": "TOKEN_CLS",
    "GPT2ForSequenceClassification": "SEQ_CLS",
    "ViTForImageClassification": None,
    "CLIPModel": None,
    "WhisperForConditionalGeneration": None,
    "LlavaForConditionalGeneration": "CAUSAL_LM",
}


@pytest.mark.parametrize("name", TASKS)
def test_an_adapter_of_any_task_is_peft_s_own_merge(name: str, tmp_path: Path) -> None:
    """PEFT saves the head of a classifier whole; of pictures it is asked for."""
    tiny = CLASSES[name]
    base = tiny.make()
    base.save_pretrained(tmp_path / "base")
    saved = ["classifier"] if name.startswith("ViT") else None
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules="all-linear",
        exclude_modules=["qa_outputs", "classifier", "score"],  # saved whole, by PEFT itself or below
        modules_to_save=saved,
        task_type=TASKS[name],
    )
    torch.manual_seed(3)
    wrapped = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    vectors = [TaskVector.from_adapter(tmp_path / "adapter", base=tmp_path / "base"), TaskVector.from_adapter(wrapped)]
    wrapped.double().merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for number, vector in enumerate(vectors):
        found = load_file(vector.apply(tmp_path / "base", tmp_path / f"out {number}") / "model.safetensors")
        assert found.keys() == merged.keys()
        for key, tensor in merged.items():
            torch.testing.assert_close(found[key].double(), tensor, rtol=1e-6, atol=1e-6, msg=key)
    heads = [key for key in vectors[0] if key.startswith(("classifier", "score", "qa_outputs"))]
    assert bool(heads) == (TASKS[name] in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS") or saved is not None)


@pytest.mark.parametrize("name", CLASSES)
def test_an_exported_adapter_is_the_vector_in_peft(name: str, tmp_path: Path) -> None:
    tiny = CLASSES[name]
    base = tiny.make()
    base.save_pretrained(tmp_path / "base")
    vector = TaskVector.from_finetuned(base, tuned_copy(base, 0.1)).compress(rank=2)
    vector = vector.filter(include=[each for each in vector if vector[each].is_low_rank])
    while True:
        try:
            adapter = vector.to_adapter(tmp_path / "adapter", base=tmp_path / "base")
            break
        except UnsupportedError as error:  # tied embeddings, and layers that PEFT cannot run
            refused = [each for each in vector if each in str(error)]
            assert refused and all("embed" in each or "shared" in each for each in refused), error
            vector = vector.filter(exclude=refused)
    assert len(vector) > 5
    model = PeftModel.from_pretrained(getattr(transformers, name).from_pretrained(tmp_path / "base"), adapter).eval()
    with vector.applied_to(base):
        expected = tiny.outputs(base)
    torch.testing.assert_close(tiny.outputs(model), expected, rtol=1e-3, atol=1e-4)
    if name.endswith("Classification"):  # the adapter names the class that PEFT is to load
        alone = AutoPeftModel.from_pretrained(adapter).eval()
        torch.testing.assert_close(tiny.outputs(alone), expected, rtol=1e-3, atol=1e-4)
