"""Quantised copies: the weights and logits that transformers with bitsandbytes gives, and nothing of the original."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from support.tiny_books import make_books, make_tokenizer, tiny_llama
from support.tiny_models import make, tuned_copy

from hf_taskvec import TaskVector
from hf_taskvec.algebra.quantisation import SCHEMES, quantised_values
from hf_taskvec.auditing.attacks import quantising
from hf_taskvec.auditing.attacks.quantising import quantised, runnable_schemes
from hf_taskvec.errors import BadValueError, UnsupportedError
from hf_taskvec.evaluation import protocols
from hf_taskvec.evaluation.asking.batched_asking import ask
from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages
from hf_taskvec.evaluation.asking.scalable_edits import NoEdit
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.models.fingerprints import full_fingerprint

# On processors with AVX-512, 4 bits of bitsandbytes need rows of whole blocks, 64 numbers; also those of the heads.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
ARCHITECTURES = {"phi": WIDE, "llama": WIDE, "gpt2": {"n_embd": 64}}
TOKENS = torch.tensor([[1, 5, 7, 3], [4, 4, 9, 11]])


def tiny(architecture: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return make(architecture, dtype, **ARCHITECTURES[architecture])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the linear layers in the blocks, outputs being rows; the head is in no block."""
    names = [
        name for name, each in model.named_parameters() if each.ndim == 2 and (".layers." in name or ".h." in name)
    ]
    transposed = type(model).__name__.startswith("GPT2")
    return {n: model.get_parameter(n).detach().T if transposed else model.get_parameter(n).detach() for n in names}


def rounded_by_hand(model: torch.nn.Module, scheme: str) -> torch.nn.Module:
    """A copy with the weights that bitsandbytes itself gives back."""
    from bitsandbytes import functional

    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in matrices(other).values():
            if scheme == "nf4":
                codes, state = functional.quantize_4bit(weight.contiguous(), quant_type="nf4")
                weight.copy_(functional.dequantize_4bit(codes, state))
            else:
                codes, scales, _ = functional.int8_vectorwise_quant(weight.contiguous().half())
                weight.copy_(functional.int8_vectorwise_dequant(codes, scales))
    return other


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers_own_quantised_loading(
    tmp_path: Path, architecture: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = tiny(architecture)
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=scheme == "nf4",
        load_in_8bit=scheme == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    for layer in theirs.modules():  # a kernel of its own, in bf16, where the processor has AVX-512 for that
        vars(layer).pop("support_avx512bf16_for_cpu", None)
    monkeypatch.setattr("bitsandbytes.nn.Linear4bit.support_avx512bf16_for_cpu", False, raising=False)
    ours = quantised(model, scheme)
    assert torch.equal(logits(ours), logits(theirs))
    state, expected = ours.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    kept = ours.config.quantization_config.to_dict()
    assert {key: kept[key] for key in ("load_in_4bit", "load_in_8bit", "llm_int8_threshold")} == {
        key: config.to_dict()[key] for key in ("load_in_4bit", "load_in_8bit", "llm_int8_threshold")
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_layers_of_nf4_give_what_their_dequantised_weights_give(architecture: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny(architecture)
    by_hand = rounded_by_hand(model, "nf4")
    exact = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(logits(quantised(model, "nf4", dequantise=True)), logits(by_hand), **exact)
    torch.testing.assert_close(logits(quantised(model, "nf4")), logits(by_hand), **exact)
    assert not torch.allclose(logits(model), logits(by_hand), **exact)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_int8_also_rounds_what_comes_into_a_layer(architecture: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny(architecture)
    by_hand = logits(rounded_by_hand(model, "int8"))
    torch.testing.assert_close(logits(quantised(model, "int8", dequantise=True)), by_hand, rtol=1e-5, atol=1e-6)
    found = logits(quantised(model, "int8"))
    assert 1e-5 < (found - by_hand).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dequantised_weights_are_those_of_the_codes_and_all_else_is_as_before(
    architecture: str, scheme: str, dtype: torch.dtype
) -> None:
    model = tiny(architecture, dtype)
    found = quantised(model, scheme, dequantise=True)
    expected = dict(model.state_dict())
    for name, matrix in matrices(model).items():
        values = quantised_values(matrix.contiguous(), scheme)
        assert not torch.equal(values, matrix)
        expected[name] = values.T if architecture == "gpt2" else values
    state = found.state_dict()
    assert state.keys() == expected.keys()
    for name, each in state.items():
        assert each.dtype == expected[name].dtype and torch.equal(each, expected[name]), name
    assert type(found) is type(model) and found.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_given_model_stays_as_it_is_and_shares_nothing_with_the_copy(scheme: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny("phi")
    before, what = {name: each.clone() for name, each in model.state_dict().items()}, full_fingerprint(model)
    found = quantised(model, scheme)
    said, known = logits(found), full_fingerprint(found)
    assert full_fingerprint(model) == what != known
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    assert torch.equal(logits(found), said) and full_fingerprint(found) == known
    assert found.training is False and found.train().training is True and model.training is False


def test_the_same_weights_give_the_same_model_and_undone_edits_none_other() -> None:
    """An edit of which no code and no scale survives is not there any more; one that does survive is."""
    pytest.importorskip("bitsandbytes")
    model = tiny("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = model.get_parameter(name).detach()
    nearest = quantised_values(weight, "nf4")  # from a bin's own number to its edge there is some way to go
    model.get_parameter(name).data.copy_(nearest)
    inner = nearest.abs() < nearest.view(-1, 64).abs().amax(dim=1, keepdim=True).expand(-1, 64).reshape(nearest.shape)
    small = TaskVector.from_tensors({name: 1e-4 * inner})
    large = TaskVector.from_tensors({name: 0.3 * weight.flip(0)})
    base, found = quantised(model, "nf4"), []
    for vector in (small, large):
        survival = vector.survival(model)
        with vector.applied_to(model):
            edited = quantised(model, "nf4")
        assert (survival.share == 0) == (full_fingerprint(edited) == full_fingerprint(base))
        found.append(survival.undone_share)
    assert found[0] == 1 and found[1] < 1
    assert full_fingerprint(quantised(model, "nf4")) == full_fingerprint(base)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_model_is_asked_like_any_other(caplog: pytest.LogCaptureFixture, scheme: str) -> None:
    pytest.importorskip("bitsandbytes")
    protocol = protocols.get(prompt_length=14, answer_length=8, samples=5)
    passages = [each for book in make_books() for each in find_passages(book, protocol)]
    model = quantised(tiny_llama(width=64), scheme)
    store = FinishedPassages(None)

    def asked(attacked: torch.nn.Module) -> tuple[list[str], int]:
        found = ask(
            attacked, NoEdit(), [0.0], passages=passages, protocol=protocol, tokenizer=make_tokenizer(), store=store
        )
        assert all(each.log_probs for each in found.work.rows.values())
        return [each.text for each in found.work.rows.values()], found.work.generated

    with caplog.at_level(logging.WARNING):
        texts, generated = asked(model)
    assert generated == len(passages) == len(texts) and any(texts)
    assert not [record for record in caplog.records if record.name.startswith("bitsandbytes")]
    assert asked(model) == (texts, 0)  # found again by the fingerprint, which the first run did not change
    assert asked(quantised(tiny_llama(width=64), scheme))[1] == 0


def test_without_bitsandbytes_the_reason_is_told_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "find_spec", lambda name: None)
    reason = "bitsandbytes is not installed: pip install bitsandbytes"
    assert runnable_schemes() == {"nf4": reason, "int8": reason, "fp8": None, "int4": None}
    model = tiny("llama")
    for scheme in ("nf4", "int8"):
        with pytest.raises(UnsupportedError, match=f"{scheme} cannot be tried here: {reason}"):
            quantised(model, scheme)
        assert logits(quantised(model, scheme, dequantise=True)).isfinite().all()
    assert not torch.equal(logits(quantised(model, "int4")), logits(model))


def test_every_scheme_runs_where_bitsandbytes_is_installed() -> None:
    pytest.importorskip("bitsandbytes")
    assert runnable_schemes() == dict.fromkeys(SCHEMES)


def test_what_cannot_be_quantised_is_refused_with_what_to_do() -> None:
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model

    model = tiny("llama")
    with pytest.raises(BadValueError, match="Did you mean 'int8'"):
        quantised(model, "int88")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="a live model, not a str"):
        quantised("me/model", "nf4")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="Is it quantised already"):
        quantised(quantised(model, "int8"), "nf4")
    with pytest.raises(UnsupportedError, match=r"q_proj is in torch\.float64"):
        quantised(tiny("llama", torch.float64), "fp8")
    vector = TaskVector.from_finetuned(model, tuned_copy(model)).filter(include="*q_proj.weight").compress(rank=2)
    with vector.applied_to(model, merge=False), pytest.raises(UnsupportedError, match="has hooks at"):
        quantised(model, "nf4")
    with pytest.raises(UnsupportedError, match=r"model\.merge_and_unload"):
        quantised(get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"])), "nf4")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    for scheme in SCHEMES:
        with pytest.raises(BadValueError, match=r"layers\.1\.mlp\.up_proj\.weight: the weights contain NaN"):
            quantised(model, scheme)
