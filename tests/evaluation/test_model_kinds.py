"""PEFT, bfloat16, offloaded and quantised models go through the sweep like any other."""

import copy

import pytest
import torch
from support.tiny_books import make_books, tiny_gpt2, tiny_llama

from hf_taskvec.evaluation import protocols, sweep
from hf_taskvec.models.fingerprints import full_fingerprint

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=5)
FAST = {"resamples": 50, "permutations": 50}


def texts(model, tokenizer, edit=None, scales=(0,)):
    found = sweep(model, edit, scales, make_books(), SHORT, tokenizer=tokenizer, **FAST)
    return [[at.output for at in passage.at] for passage in found.passages], found


def lora(model, seed=0):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


def test_a_peft_model_gives_the_texts_of_its_merged_twin(tokenizer):
    adapted = lora(tiny_llama())
    merged = copy.deepcopy(adapted).merge_and_unload()
    assert texts(adapted, tokenizer)[0] == texts(merged, tokenizer)[0] != texts(tiny_llama(), tokenizer)[0]


def test_the_strength_of_an_adapter_is_part_of_the_fingerprint():
    adapted = lora(tiny_llama())
    before = full_fingerprint(adapted)
    AdapterScale(adapted).set_scale(2)
    assert full_fingerprint(adapted) != before
    with adapted.disable_adapter():
        assert full_fingerprint(adapted) != before


class AdapterScale:
    """λ as the strength of a LoRA adapter: an edit that writes no weight."""

    fingerprint = "lora"

    def __init__(self, model):
        from peft.tuners.lora import LoraLayer

        self.layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
        self.full = [layer.scaling["default"] for layer in self.layers]

    def set_scale(self, scale):
        for layer, full in zip(self.layers, self.full, strict=True):
            layer.scaling["default"] = scale * full


def test_an_adapter_can_be_the_edit(tokenizer):
    adapted = lora(tiny_llama())
    outputs, report = texts(adapted, tokenizer, AdapterScale(adapted), (0, -1))
    plain, _ = texts(tiny_llama(), tokenizer)
    assert [row[0] for row in outputs] == [row[0] for row in plain]
    assert any(row[0] != row[1] for row in outputs)
    assert report.score("lamps", -1.0, "perplexity").difference.value != 0


def test_a_bfloat16_model_works(tokenizer):
    outputs, report = texts(tiny_llama().to(torch.bfloat16), tokenizer)
    assert all(isinstance(row[0], str) for row in outputs)
    assert 1 < report.score("lamps", 0.0, "perplexity").value.value < 1e4


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_a_dispatched_model_gives_the_texts_and_the_fingerprint_of_the_plain_one(make, tokenizer, tmp_path):
    from accelerate import cpu_offload, disk_offload

    expected, plain = texts(make(), tokenizer)
    offloaded = cpu_offload(make(), execution_device="cpu")
    assert texts(offloaded, tokenizer)[0] == expected
    on_disk = disk_offload(make(), tmp_path, execution_device="cpu")
    outputs, report = texts(on_disk, tokenizer)
    assert outputs == expected and report.model == plain.model


def test_a_device_map_works(tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny_llama().save_pretrained(tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.float32)
    assert texts(placed, tokenizer)[0] == texts(tiny_llama(), tokenizer)[0]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model_works(tokenizer, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # On processors with AVX-512 for bf16, 4 bits need rows of whole blocks: 64 numbers.
    tiny_llama(width=64).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map={"": "cpu"})
    outputs, report = texts(model, tokenizer)
    assert outputs and 1 < report.score("lamps", 0.0, "perplexity").value.value < 1e4
