"""Batches, plans and the store: any batch size gives the same texts, and nothing is generated twice."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from support import launch
from support.tiny_books import tiny_gpt2, tiny_llama

from hf_taskvec.errors import BadValueError, CorruptFileError
from hf_taskvec.evaluation.asking.batch_plan import Row, plan_batches, tokenize_passages
from hf_taskvec.evaluation.asking.batched_asking import ask
from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages, record_key
from hf_taskvec.evaluation.asking.generation import Continuation
from hf_taskvec.evaluation.asking.key_value_cache import preallocated_cache
from hf_taskvec.evaluation.asking.scalable_edits import NoEdit
from hf_taskvec.evaluation.scoring.metrics import perplexity
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.models.fingerprints import full_fingerprint

SHORT = protocols.get(prompt_length=12, answer_length=6, samples=6)
SAMPLED = replace(SHORT, decoding=protocols.Decoding(temperature=0.8, top_p=0.9))


def do(model, tokenizer, book, protocol=SHORT, batch_size=4, store=None, edit=None, scales=(0.0,)):
    asked = ask(
        model,
        edit or NoEdit(),
        scales,
        passages=find_passages(book, protocol),
        protocol=protocol,
        tokenizer=tokenizer,
        store=FinishedPassages(None) if store is None else store,
        batch_size=batch_size,
    )
    return asked.passages, asked.work


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_the_texts_are_those_of_plain_generate_one_by_one(make, tokenizer, story):
    model = make()
    passages, work = do(model, tokenizer, story)
    for i, passage in enumerate(passages):
        ids = torch.tensor([passage.prompt_ids])
        plain = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(passage.answer_ids),
            do_sample=False,
            pad_token_id=0,
        )
        expected = tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
        assert work.rows[Row(0.0, i)].text == expected


def test_the_preallocated_cache_gives_the_tokens_and_logits_of_the_growing_one():
    for model in (tiny_llama(), tiny_gpt2()):
        ids = torch.randint(1, 400, (3, 11), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1, :4] = 0  # left-padded
        options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        usual = model.generate(ids, **options)
        for length in (31, 18):  # enough, and too little: it grows then
            cache = preallocated_cache(model, length)
            found = model.generate(ids, past_key_values=cache, **options)
            assert torch.equal(found.sequences, usual.sequences)
            for one, other in zip(found.logits, usual.logits, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            if length == 31:
                assert cache.layers[0].keys.untyped_storage().nbytes() == 3 * 4 * 31 * 8 * 4  # one piece of memory


def test_a_model_with_layers_of_another_kind_keeps_its_own_cache(tokenizer, story):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=400, num_key_value_heads=2, sliding_window=8, eos_token_id=0, **sizes)
    model = MistralForCausalLM(config).eval()
    assert preallocated_cache(model, 50) is None and preallocated_cache(tiny_llama(), 50) is not None
    passages, work = do(model, tokenizer, story)
    ids = torch.tensor([passages[0].prompt_ids])
    plain = model.generate(ids, max_new_tokens=passages[0].new_tokens, do_sample=False, pad_token_id=0)
    assert work.rows[Row(0.0, 0)].text == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_perplexity_is_that_of_the_models_own_loss(make, tokenizer, story):
    model = make()
    passages, work = do(model, tokenizer, story)
    for i, passage in enumerate(passages):
        ids = torch.tensor([passage.prompt_ids + passage.answer_ids])
        labels = ids.clone()
        labels[0, : len(passage.prompt_ids)] = -100
        with torch.no_grad():
            loss = model(input_ids=ids, labels=labels).loss.item()
        found = work.rows[Row(0.0, i)]
        assert perplexity(found.log_probs) == pytest.approx(math.exp(loss), rel=1e-5)
        assert len(found.log_probs) == len(passage.answer_ids)
        with torch.no_grad():
            first = model(input_ids=ids).logits[0, len(passage.prompt_ids) - 1 : -1].argmax(-1)
        assert list(found.hits) == [int(a) == b for a, b in zip(first, passage.answer_ids, strict=True)]


@pytest.mark.parametrize("protocol", [SHORT, SAMPLED], ids=["greedy", "sampled"])
def test_another_batch_size_gives_the_same_texts(tokenizer, story, protocol):
    model = tiny_llama()
    results = [do(model, tokenizer, story, protocol, size)[1].rows for size in (1, 5, 16)]
    texts = [{row: found.text for row, found in result.items()} for result in results]
    assert texts[0] == texts[1] == texts[2]


def test_sampling_follows_the_softmax_of_the_nucleus():
    from hf_taskvec.evaluation.asking.generation import _SampleByPassage

    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).repeat(4000, 1)
    keys = [f"{i:015x}" for i in range(4000)]
    chosen = _SampleByPassage(keys, 0, 1.0, 0.9)(torch.empty(0), logits).argmax(-1)
    shares = torch.bincount(chosen, minlength=4) / 4000
    assert shares[3] == 0  # 0.5 + 0.3 + 0.15 already reach 0.9
    assert torch.allclose(shares[:3], torch.tensor([0.5, 0.3, 0.15]) / 0.95, atol=0.03)


def test_the_models_own_generation_defaults_do_not_interfere_and_come_back(tokenizer, story):
    model = tiny_llama()
    expected = do(model, tokenizer, story)[1].rows
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    kept = model.generation_config
    model.train()
    assert do(model, tokenizer, story)[1].rows == expected
    assert model.generation_config is kept and kept.repetition_penalty == 3.0
    assert model.training


def test_memory_that_runs_out_halves_the_batches(tokenizer, story):
    model = tiny_llama()
    expected = do(model, tokenizer, story, batch_size=2)[1]

    def no_memory_beyond(rows):
        def hook(module, args, kwargs):
            if kwargs["input_ids"].shape[0] > rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

        return model.register_forward_pre_hook(hook, with_kwargs=True)

    handle = no_memory_beyond(2)
    work = do(model, tokenizer, story, batch_size=8)[1]
    handle.remove()
    assert work.plan.batch_size == 2 and work.rows == expected.rows and work.plan.hash == expected.plan.hash
    no_memory_beyond(0)
    with pytest.raises(BadValueError, match="single passage"):
        do(model, tokenizer, story, batch_size=4)


def test_a_plan_keeps_lambdas_apart_unless_they_may_mix_and_respects_the_context(tokenizer, story):
    passages = tokenize_passages(find_passages(story, SHORT), SHORT, tokenizer, tiny_llama().config)
    apart = plan_batches(passages, [0.0, -1.0], 5, mixed=False, context=None)
    assert all(len({row.scale for row in batch}) == 1 for batch in apart.batches)
    mixed = plan_batches(passages, [0.0, -1.0], 5, mixed=True, context=None)
    assert any(len({row.scale for row in batch}) == 2 for batch in mixed.batches)
    for plan in (apart, mixed):
        rows = [row for batch in plan.batches for row in batch]
        assert len(rows) == len(set(rows)) == 2 * len(passages)
    limit = max(len(t.prompt_ids) + t.new_tokens for t in passages)
    tight = plan_batches(passages, [0.0], 99, mixed=False, context=limit)
    for batch in tight.batches:
        held = [passages[row.passage] for row in batch]
        assert max(len(t.prompt_ids) for t in held) + max(t.new_tokens for t in held) <= limit


def test_a_store_gives_back_what_was_put_in_and_is_keyed_by_what_matters(tmp_path, tokenizer, story):
    passages = tokenize_passages(find_passages(story, SHORT), SHORT, tokenizer, tiny_llama().config)
    base = ("model", "edit", -0.5, passages[0], SHORT)
    key = record_key(*base)
    others = [
        record_key("other", *base[1:]),
        record_key("model", "other", *base[2:]),
        record_key("model", "edit", -0.4, *base[3:]),
        record_key(*base[:3], passages[1], SHORT),
        record_key(*base[:4], SAMPLED),
    ]
    assert len({key, *others}) == 6
    assert record_key("model", "edit", -0.0, *base[3:]) == record_key("model", "edit", 0.0, *base[3:])
    kept = Continuation("naïve “text”\n", (-0.1, -1e-17), (True, False))
    FinishedPassages(tmp_path).add({key: kept})
    assert FinishedPassages(tmp_path)[key] == kept and others[0] not in FinishedPassages(tmp_path)


def test_a_finished_passage_is_not_generated_again_and_a_changed_model_is(tmp_path, tokenizer, story):
    model = tiny_llama()
    first = do(model, tokenizer, story, store=FinishedPassages(tmp_path))[1]
    assert first.generated == len(first.rows)
    second = do(model, tokenizer, story, store=FinishedPassages(tmp_path), batch_size=3)[1]
    assert second.generated == 0 and second.rows == first.rows
    with torch.no_grad():
        model.lm_head.weight[5, 5] += 1e-3
    assert do(model, tokenizer, story, store=FinishedPassages(tmp_path))[1].generated == len(first.rows)


def _write(folder, number):
    store = FinishedPassages(folder)
    for i in range(40):  # every process writes the same ten batches of its neighbours, too
        store.add({f"{(i + number) % 50:064x}": Continuation(f"text {(i + number) % 50}", (-1.0,), (True,))})


def test_processes_may_write_at_once(tmp_path):
    writers = [launch.forks().Process(target=_write, args=(tmp_path, n)) for n in (0, 5, 10)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = FinishedPassages(tmp_path)
    assert len(found) == 50 and all(found[f"{i:064x}"].text == f"text {i}" for i in range(50))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("a text", "b text"),
        lambda text: "{}",
        lambda text: json.dumps({**json.loads(text), "version": 99}),
    ],
    ids=["truncated", "altered", "empty", "future"],
)
def test_a_corrupt_store_is_named_and_nothing_is_lost(tmp_path, damage):
    store = FinishedPassages(tmp_path)
    store.add({"a" * 64: Continuation("a text", (-1.0,), (True,))})
    store.add({"b" * 64: Continuation("another", (-1.0,), (True,))})
    victim = next(path for path in tmp_path.glob("*.json") if "a text" in path.read_text())
    victim.write_text(damage(victim.read_text()))
    with pytest.raises(CorruptFileError, match=victim.name):
        FinishedPassages(tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2
    victim.unlink()
    assert "b" * 64 in FinishedPassages(tmp_path)


def test_prompts_beyond_the_context_are_refused_with_the_numbers(tokenizer, story):
    with pytest.raises(BadValueError, match=r"story/seen/0000 needs \d+ tokens.*context has 20.*prompt_length"):
        tokenize_passages(find_passages(story, SHORT), SHORT, tokenizer, tiny_llama(context=20).config)
    total = replace(SHORT, decoding=protocols.Decoding(total_length=5))
    with pytest.raises(BadValueError, match="leaves none of the 5"):
        tokenize_passages(find_passages(story, SHORT), total, tokenizer, tiny_llama().config)


def test_the_model_reads_instruction_and_cue_around_the_prompt(tokenizer, story):
    protocol = replace(SHORT, instruction="Go on: ", cue=" And then:")
    plain, cued = (
        tokenize_passages(find_passages(story, each), each, tokenizer, tiny_llama().config)
        for each in (SHORT, protocol)
    )
    for before, after in zip(plain, cued, strict=True):
        asked = f"Go on: {before.text.prompt} And then:"
        assert list(after.prompt_ids) == tokenizer(asked)["input_ids"]
        assert tokenizer.decode(after.answer_ids).strip() == before.text.answer


def test_a_pad_token_that_only_the_tokenizer_has_changes_nothing(tokenizer, story):
    """Padded positions are masked, but an id beyond the model's vocabulary would be an IndexError."""
    expected = do(tiny_llama(), tokenizer, story)[1]
    padded = copy.deepcopy(tokenizer)
    padded.add_special_tokens({"pad_token": "<pad>"})
    assert padded.pad_token_id == 400 == tiny_llama().config.vocab_size
    assert do(tiny_llama(), padded, story)[1].rows == expected.rows


@pytest.mark.parametrize("where", ["forward", "generate"])
def test_nan_logits_are_an_error_not_a_score(tokenizer, story, where):
    model = tiny_llama()
    if where == "forward":
        with torch.no_grad():
            model.lm_head.weight[7] = float("nan")
    else:  # only with the cache: the teacher-forced pass looks healthy

        def hook(module, args, kwargs, output):
            if kwargs.get("use_cache"):
                output.logits[:, -1, 3] = float("nan")
            return output

        model.register_forward_hook(hook, with_kwargs=True)
    with pytest.raises(BadValueError, match="NaN or infinite at passage story/"):
        do(model, tokenizer, story)


def test_the_fingerprint_is_of_the_weights_not_of_the_folder(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    model.save_pretrained(tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert full_fingerprint(again) == full_fingerprint(model)
    assert full_fingerprint(again.to(torch.bfloat16)) != full_fingerprint(model)
    assert full_fingerprint(tiny_llama(seed=1)) != full_fingerprint(model)
