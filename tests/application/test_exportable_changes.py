"""From full fine-tunes to an adapter without a fight: what is in the way is told at once, with the way past it."""

import json
import re
import shlex

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from peft.utils.hotswap import hotswap_adapter
from support import tiny_models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline

from hf_taskvec import TaskVector
from hf_taskvec.errors import UnsupportedError


def tuned(base, folder, seed, words=r"(proj|fc\d)\.weight"):
    """A full fine-tune that changed what a regular expression finds, and left all else alone."""
    model = AutoModelForCausalLM.from_pretrained(base)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(words, name):
                weight.add_(0.1 * torch.randn(weight.shape, generator=draw))
    model.save_pretrained(folder)
    return folder


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([[1, 5, 2, 9]])).logits


@pytest.fixture(scope="module")
def words():
    """A tokenizer of no more words than the tiny models have."""
    listed = ["[pad]", "[start]", "[end]", "[unk]", "the", "wizard", "went", "to", "green", "city"]
    raw = Tokenizer(WordLevel({word: number for number, word in enumerate(listed)}, unk_token="[unk]"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[pad]", eos_token="[end]", unk_token="[unk]")


def test_a_sum_of_full_fine_tunes_becomes_an_adapter_in_one_line(models, tmp_path, words):
    """Norms and embeddings that did not change are no obstacle, and the base is known from where the vectors are of."""
    base = models.pair("phi").base
    words.save_pretrained(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "base")
    one, two = (
        TaskVector.from_finetuned(tmp_path / "base", tuned(base, tmp_path / str(seed), seed)) for seed in (1, 2)
    )
    vector = (two.named("two") - one.named("one")).compress(rank=6)
    folder = vector.to_adapter(tmp_path / "adapter")
    written = AutoModelForCausalLM.from_pretrained(vector.apply(tmp_path / "base", tmp_path / "out"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(loaded), logits(written), atol=1e-4)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((tmp_path / "base").resolve())
    assert config["target_modules"] == ["fc1", "fc2", "k_proj", "q_proj", "v_proj"]
    # The tokenizer is beside it, so a pipeline takes the adapter for a model.
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == words.get_vocab()
    asked = pipeline("text-generation", model=str(folder), tokenizer=str(folder), device="cpu")
    told = pipeline("text-generation", model=written, tokenizer=words, device="cpu")
    options = {"max_new_tokens": 4, "do_sample": False}
    assert asked("the wizard", **options) == told("the wizard", **options)
    # Another of its kind takes its place in a running model.
    other = (-1 * vector).to_adapter(tmp_path / "other")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder)
    hotswap_adapter(model, str(other), "default")
    removed = AutoModelForCausalLM.from_pretrained((-1 * vector).apply(tmp_path / "base", tmp_path / "minus"))
    assert torch.allclose(logits(model), logits(removed), atol=1e-4)


def refusal(vector, *arguments, **options):
    with pytest.raises(UnsupportedError) as caught:
        vector.to_adapter(*arguments, **options)
    return str(caught.value)


def test_all_that_is_in_the_way_is_told_with_one_call_that_solves_it(models, tmp_path):
    """Norms, dense matrices and a tied embedding; the call and the command are taken from the message as they are."""
    from hf_taskvec.cli import main

    base = models.pair("gpt2").base
    vector = TaskVector.from_finetuned(base, tuned(base, tmp_path / "tuned", 1, words="."))
    told = refusal(vector, tmp_path / "adapter")
    assert re.search(r"wte\.weight is also lm_head\.weight", told)
    assert re.search(r"h\.0\.attn\.c_attn\.weight, .* are not low-rank, and", told)
    assert re.search(r"ln_1\.bias.* and \d+ more are not low-rank and no matrices", told)
    call = re.search(r"solved by (vector\..*?\)), or", told).group(1)
    eval(call, {"vector": vector, "output": tmp_path / "adapter"})
    kept = TaskVector.from_adapter(tmp_path / "adapter", base=base)
    assert kept and all(len(kept.shape(name)) == 2 and "wte" not in name for name in kept)
    vector.save(tmp_path / "vector")
    command = re.search(r"`taskvec (adapter .*?)`", told).group(1)
    names = {"VECTOR": str(tmp_path / "vector"), "OUTPUT": str(tmp_path / "again")}
    with pytest.raises(SystemExit) as ended:
        main([*(names.get(word, word) for word in shlex.split(command)), "--base", str(base)])
    assert not ended.value.code
    again = TaskVector.from_adapter(tmp_path / "again", base=base)
    assert set(again) == set(kept)


def test_a_small_matrix_beside_low_rank_ones_is_exported_as_it_is(models, tmp_path):
    """Compressing leaves a matrix that has no higher rank than what was asked for; the adapter holds all of it."""
    base = models.pair("phi").base
    low = tiny_models.low_rank(AutoModelForCausalLM.from_pretrained(base), rank=20, exclude="(norm|bias|embed|lm_head)")
    name = "model.layers.0.mlp.fc1.weight"
    dense = TaskVector.from_finetuned(base, models.pair("phi").tuned).filter(include=name)
    vector = low.filter(exclude=name).compress(rank=20) + dense
    folder = vector.to_adapter(tmp_path / "adapter", str(base))
    again = TaskVector.from_adapter(folder)
    assert set(again) == set(vector)
    assert torch.allclose(again.dense(name), dense.dense(name), atol=1e-7)


def test_one_pattern_stands_for_all_layers_where_all_are_meant(models, tmp_path):
    """Positions of OPT are in the way by their layer's class, the embedding by its tie; the remedy has no other."""
    base = models.pair("opt").base
    vector = tiny_models.low_rank(AutoModelForCausalLM.from_pretrained(base), exclude="(norm|bias|lm_head)")
    told = refusal(vector, tmp_path / "adapter", str(base))
    call = re.search(r"solved by (vector\..*?\)), or", told).group(1)
    eval(call, {"vector": vector, "output": tmp_path / "adapter"})
    left_out = set(vector) - set(TaskVector.from_adapter(tmp_path / "adapter", base=base))
    assert left_out == {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"}


def test_a_vector_without_its_base_at_hand_is_told_to_name_it_with_all_the_rest(models, tmp_path):
    """A saved vector knows no folder of its base, but which of its weights were tied."""
    base = models.pair("gpt2").base
    TaskVector.from_finetuned(base, tuned(base, tmp_path / "tuned", 1, words=".")).save(tmp_path / "vector")
    vector = TaskVector.load(tmp_path / "vector")
    told = refusal(vector, tmp_path / "adapter")
    call = re.search(r"solved by (vector\..*?\)), or", told).group(1)
    assert "base=BASE" in call and "exclude=['transformer.wte.weight']" in call
    eval(call, {"vector": vector, "output": tmp_path / "adapter", "BASE": base})
    assert "wte" not in " ".join(TaskVector.from_adapter(tmp_path / "adapter", base=base))


def test_a_vector_that_changes_nothing_is_no_adapter(models, tmp_path):
    pair = models.pair("phi")
    with pytest.raises(UnsupportedError, match="changes nothing"):
        (pair.vector() - pair.vector()).to_adapter(tmp_path / "adapter")


def test_sources_that_know_the_base_in_several_ways_name_one(models, hub, tmp_path):
    """An adapter knows its base's id, a fine-tune also the commit; a copy in a folder is told by its weights."""
    pair = models.pair("phi")
    commit = hub.add_repo("me/known-base", pair.base)
    full = TaskVector.from_finetuned("me/known-base", pair.tuned).filter(include="*_proj.weight").compress(rank=2)
    adapter = TaskVector.from_adapter(full.to_adapter(tmp_path / "adapter", "me/known-base"), base=pair.base)
    copied = TaskVector.from_finetuned(pair.base, pair.tuned).filter(include="*_proj.weight").compress(rank=2)
    for number, other in enumerate((adapter, copied)):
        folder = (full.named("one") - 0.5 * other.named("other")).to_adapter(tmp_path / str(number))
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == ("me/known-base", commit)
