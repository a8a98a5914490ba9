"""Models through whole benchmarks: every number worked out again, one text at a time in fp64; and planted truths."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_taskvec.errors import BadValueError, MismatchError, MissingFileError
from hf_taskvec.evaluation import run_benchmark

NAMES = ("muse/books", "tofu/forget10")


class Alone:
    """A model that is asked one text at a time, in fp64, by nothing but transformers."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = copy.deepcopy(model).double(), tokenizer

    def log_probs(self, before, after):
        ids = torch.tensor([[*before, *after]])
        with torch.no_grad():
            every = self.model(input_ids=ids).logits[0].log_softmax(-1)
        return [every[len(before) - 1 + i, token].item() for i, token in enumerate(after)]

    def tokens(self, prompt, answer):
        """The prompt's tokens, and those that the answer adds to them."""
        before = self.tokenizer(prompt)["input_ids"]
        whole = self.tokenizer(prompt + answer)["input_ids"]
        if whole[: len(before)] != before:
            whole = before + self.tokenizer(answer)["input_ids"]
        return before, whole[len(before) :]

    def probability(self, prompt, answer):
        before, after = self.tokens(prompt, answer)
        return np.exp(np.mean(self.log_probs(before, [*after, self.tokenizer.eos_token_id])))

    def min_k(self, before, after):
        found = np.sort(self.log_probs(before, after))
        return found[: max(1, int(len(found) * 0.4))].mean()

    def answer(self, prompt, tokens=8):
        ids = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        out = self.model.generate(input_ids=ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def rouge(output, answer):
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True).score(answer, output)["rougeL"]


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4)


def test_tofus_numbers_are_those_of_its_definitions(benchmarks, tiny, reports):
    benchmark, report = benchmarks["tofu/forget10"], reports["tofu/forget10"].known
    alone, values = Alone(tiny.known["tofu/forget10"], tiny.tokenizer), report.values
    nine = []
    for name in ("forget", "retain", "real_authors", "world_facts"):
        items = benchmark.part(name).items
        prompts = [f"Question: {item.prompt}\nAnswer: " for item in items]
        own = np.array([alone.probability(p, item.answer) for p, item in zip(prompts, items, strict=True)])
        correct = np.array([alone.probability(p, item.paraphrase) for p, item in zip(prompts, items, strict=True)])
        wrong = np.array(
            [[alone.probability(p, each) for each in item.wrong] for p, item in zip(prompts, items, strict=True)]
        )
        ratios = np.exp(np.log(wrong).mean(1)) / (correct + 1e-10)
        near(values[name]["probability"], own)
        near(values[name]["truth_ratio"], ratios)
        near(values[name]["truth_ratio_open_unlearning"], 1 / (1 + ratios))
        near(values[name]["normalised_probability"], own / (own + wrong.sum(1)))
        near(
            values[name]["min_k"],
            [alone.min_k(*alone.tokens(p, item.answer)) for p, item in zip(prompts, items, strict=True)],
        )
        recalls = [rouge(alone.answer(p), item.answer).recall for p, item in zip(prompts, items, strict=True)]
        assert values[name]["rouge_l_recall"] == recalls
        if name != "forget":
            facts = own if name == "retain" else own / (own + wrong.sum(1))
            nine += [facts.mean(), np.mean(recalls), np.maximum(0, 1 - ratios).mean()]
        else:
            near(report.metric("forget_truth_ratio"), np.minimum(ratios, 1 / ratios).mean())
            near(report.metric("forget_probability"), own.mean())
    utility = 0 if min(nine) == 0 else 9 / sum(1 / value for value in nine)
    assert utility > 0
    near(report.metric("model_utility"), utility)


def test_muses_numbers_are_those_of_its_definitions(benchmarks, tiny, reports):
    benchmark, report = benchmarks["muse/books"], reports["muse/books"].known
    alone, values = Alone(tiny.known["muse/books"], tiny.tokenizer), report.values
    for name in ("privleak_forget", "privleak_holdout"):
        ids = [tiny.tokenizer(item.answer)["input_ids"] for item in benchmark.part(name).items]
        near(values[name]["min_k"], [alone.min_k(each[:1], each[1:]) for each in ids])
    for name in ("knowmem_forget", "knowmem_retain"):
        part = benchmark.part(name)
        shots = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in part.examples)
        assert len(part.examples) == 2
        scores = []
        for item in part.items:
            output = alone.answer(f"{shots}Question: {item.prompt}\nAnswer: ")
            for stop in ("\n\n", "\nQuestion", "Question:"):
                output = output.split(stop)[0]
            scores.append(rouge(output, item.answer))
        assert values[name]["rouge_l"] == [score.fmeasure for score in scores]
        assert values[name]["rouge_l_recall"] == [score.recall for score in scores]
    part = benchmark.part("verbmem_forget")
    scores = [rouge(alone.answer(item.prompt), item.answer).fmeasure for item in part.items]
    assert values["verbmem_forget"]["rouge_l"] == scores
    assert report.metric("forget_verbmem") == pytest.approx(np.mean(scores))


@pytest.mark.parametrize("name", NAMES)
def test_the_retrained_model_beside_itself_is_perfect(reports, name):
    report = reports[name].retrained
    assert report.metric("privleak") == 0
    if name.startswith("tofu"):
        assert report.metric("forget_quality") == 1
    assert report.metrics == report.retrained.metrics and report.model == report.retrained.fingerprint


def test_a_model_that_memorised_the_forget_set_is_told_from_the_retrained_one(reports):
    stats = pytest.importorskip("scipy.stats")
    tofu = reports["tofu/forget10"]
    own, retrained = (each.values["forget"]["truth_ratio"] for each in (tofu.known, tofu.retrained))
    assert tofu.known.metric("forget_quality") == pytest.approx(stats.ks_2samp(own, retrained).pvalue, rel=1e-9)
    assert tofu.known.metric("forget_quality") < 0.05
    assert tofu.known.metric("forget_probability") > 0.5 > 0.1 > tofu.retrained.metric("forget_probability")
    assert tofu.known.metric("privleak") < -20
    muse = reports["muse/books"]
    assert muse.known.metric("privleak") < -20
    assert muse.known.metric("forget_verbmem") > 0.5 > muse.retrained.metric("forget_verbmem")


def test_a_live_retrained_model_and_its_saved_report_give_the_same(benchmarks, tiny, reports, tmp_path):
    name = "muse/books"
    reports[name].retrained.save(tmp_path / "retrained")
    for retrained in (tiny.retrained, tmp_path / "retrained", str(tmp_path / "retrained" / "benchmark.json")):
        found = run_benchmark(
            benchmarks[name], tiny.known[name], tiny.tokenizer, retrained=retrained, store=tmp_path / "store"
        )
        assert found == reports[name].known


@pytest.mark.parametrize("name", NAMES)
def test_without_the_retrained_model_nothing_is_asked(benchmarks, tiny, name, tmp_path):
    with pytest.raises(BadValueError, match=rf"{name} compares with a model.*give it as retrained=.*report"):
        run_benchmark(benchmarks[name], tiny.retrained, tiny.tokenizer, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(MissingFileError, match="no benchmark report at"):
        run_benchmark(benchmarks[name], tiny.retrained, tiny.tokenizer, retrained=tmp_path / "nowhere")
    with pytest.raises(BadValueError, match="a live model, a BenchmarkReport or where one was saved, not a dict"):
        run_benchmark(benchmarks[name], tiny.retrained, tiny.tokenizer, retrained={"forget_quality": 1.0})


def swapped(benchmark, first, second):
    """The benchmark with the data sets of two parts in each other's place."""
    a, b = benchmark.part(first), benchmark.part(second)
    exchange = {first: replace(a, items=b.items, source=b.source), second: replace(b, items=a.items, source=a.source)}
    return replace(benchmark, parts=tuple(exchange.get(part.name, part) for part in benchmark.parts))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("tofu/forget10", "forget", "retain"), ("muse/books", "privleak_forget", "privleak_holdout")],
)
def test_forget_and_kept_data_in_each_others_place_are_noticed(benchmarks, tiny, reports, name, first, second):
    wrong = swapped(benchmarks[name], first, second)
    with pytest.raises(MismatchError, match=rf"part '{first}' holds other rows .*each data set in its own place"):
        run_benchmark(wrong, tiny.known[name], tiny.tokenizer, retrained=reports[name].retrained)
    # With a live retrained model there is no record of the right data; the numbers tell.
    found = run_benchmark(wrong, tiny.known[name], tiny.tokenizer, retrained=tiny.retrained)
    right = reports[name].known
    assert found.metric("privleak") > right.metric("privleak") + 20
    if name == "muse/books":  # members and others change places, and the sign tells
        assert found.metric("privleak") > 0 > right.metric("privleak")
    else:
        assert found.metric("forget_probability") < 0.4 < 0.5 < right.metric("forget_probability")
        assert found.metric("retain_probability") == right.metric("forget_probability")


def test_other_questions_prompts_and_settings_share_no_retrained_report(benchmarks, tiny, reports):
    from hf_taskvec.evaluation.benchmarks.prompt_forms import PROMPT_FORMS

    benchmark, retrained = benchmarks["tofu/forget10"], reports["tofu/forget10"].retrained
    for changed, words in (
        (benchmarks["muse/books"], "report is of tofu/forget10, not of muse/books"),
        (replace(benchmark, prompt=PROMPT_FORMS["llama-2-chat"]), "'question'.*'llama-2-chat'.*one form for both"),
        (
            replace(
                benchmark,
                parts=tuple(replace(p, protocol=replace(p.protocol, version=2)) for p in benchmark.parts),
            ),
            "part 'forget' is asked as tofu-answers@.*run the benchmark on it again",
        ),
    ):
        with pytest.raises(MismatchError, match=words):
            run_benchmark(changed, tiny.retrained, tiny.tokenizer, retrained=retrained)


def test_a_report_of_an_edited_model_is_not_taken_for_the_retrained_models(benchmarks, tiny, reports):
    for name in NAMES:
        with pytest.raises(MismatchError, match=r"retrained= takes the report of the retrained model itself"):
            run_benchmark(benchmarks[name], tiny.retrained, tiny.tokenizer, retrained=reports[name].known)


def test_a_chat_is_asked_as_its_template_says(benchmarks, tiny):
    from hf_taskvec.evaluation.benchmarks.prompt_forms import PROMPT_FORMS

    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
    benchmark, model = replace(benchmarks["tofu/forget10"], prompt=PROMPT_FORMS["chat"]), tiny.retrained
    report, alone = run_benchmark(benchmark, model, tokenizer, retrained=model), Alone(model, tokenizer)
    items = benchmark.part("forget").items
    prompts = [f"[system]You are a helpful assistant.\n[user]{item.prompt}\n[assistant]" for item in items]
    pairs = list(zip(prompts, items, strict=True))
    near(report.values["forget"]["probability"], [alone.probability(prompt, item.answer) for prompt, item in pairs])
    assert [item.output for item in report.parts[0].items] == [alone.answer(prompt) for prompt in prompts]
    assert report.prompt.chat


def test_an_edit_of_the_live_model_is_what_is_measured(benchmarks, tiny, reports):
    from support.tiny_books import InPlaceEdit

    name = "muse/books"
    model = copy.deepcopy(tiny.retrained)
    edit = InPlaceEdit(model, tiny.known[name])
    edit.set_scale(1.0)
    edited = run_benchmark(benchmarks[name], model, tiny.tokenizer, retrained=reports[name].retrained)
    near(edited.metric("forget_verbmem"), reports[name].known.metric("forget_verbmem"))
    edit.set_scale(0.0)
    back = run_benchmark(benchmarks[name], model, tiny.tokenizer, retrained=reports[name].retrained)
    assert back.metrics == reports[name].retrained.metrics


def test_an_interrupted_run_goes_on_from_its_store(benchmarks, tiny, reports, tmp_path):
    name, forwards = "tofu/forget10", []
    model = copy.deepcopy(tiny.known[name])
    arguments = {"retrained": reports[name].retrained, "output": tmp_path}
    first = run_benchmark(benchmarks[name], model, tiny.tokenizer, **arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"benchmark.json", "benchmark.md", "store"}
    forward = type(model).forward
    try:
        type(model).forward = lambda *a, **k: forwards.append(1) or forward(*a, **k)
        again = run_benchmark(benchmarks[name], model, tiny.tokenizer, **arguments)
    finally:
        type(model).forward = forward
    assert again == first == reports[name].known and not forwards


def test_nothing_is_generated_where_a_likelihood_is_asked_for(benchmarks, tiny, reports):
    name = "tofu/forget10"
    model, prompts = copy.deepcopy(tiny.known[name]), []
    generate = model.generate
    model.generate = lambda **options: prompts.append(len(options["input_ids"])) or generate(**options)
    run_benchmark(benchmarks[name], model, tiny.tokenizer, retrained=reports[name].retrained)
    answered = [part for part in benchmarks[name].parts if part.kind == "truth"]
    assert sum(prompts) == sum(len(part.items) for part in answered) == 32


def test_batches_of_another_size_give_the_same_texts_and_numbers(benchmarks, tiny, reports):
    name = "tofu/forget10"
    found = run_benchmark(
        benchmarks[name], tiny.known[name], tiny.tokenizer, retrained=reports[name].retrained, batch_size=3
    )
    for part, other in zip(found.parts, reports[name].known.parts, strict=True):
        assert [item.output for item in part.items] == [item.output for item in other.items]
    for metric, value in found.metrics.items():
        assert value == pytest.approx(reports[name].known.metric(metric), rel=1e-4), metric


def test_what_a_model_cannot_read_is_told_before_any_work(benchmarks, tiny, hub):
    from support.tiny_books import tiny_llama

    short = tiny_llama(context=256)
    muse = benchmarks["muse/books"]
    for words in ("lamp " * 300, "lamp " * 5000):  # the second is cut to 2048 tokens, which is still too long
        long = replace(
            muse.part("privleak_forget"), items=(replace(muse.part("privleak_forget").items[0], answer=words),)
        )
        changed = replace(muse, parts=tuple(long if part.name == long.name else part for part in muse.parts))
        with pytest.raises(
            BadValueError, match=r"muse/books, item privleak_forget/0000 of muse-bench.*context has 256"
        ):
            run_benchmark(changed, short, tiny.tokenizer, retrained=short)
    short = tiny_llama(context=32)
    with pytest.raises(BadValueError, match=r"context\s+has 32"):
        run_benchmark(benchmarks["tofu/forget10"], short, tiny.tokenizer, retrained=short)
    endless = copy.deepcopy(tiny.tokenizer)
    endless.eos_token = None
    with pytest.raises(BadValueError, match=r"tofu/forget10 counts the token that ends an answer.*eos_token"):
        run_benchmark(benchmarks["tofu/forget10"], tiny.retrained, endless, retrained=tiny.retrained)


def test_missing_parts_and_two_with_the_same_rows_are_refused(benchmarks, tiny):
    benchmark = benchmarks["tofu/forget10"]
    with pytest.raises(BadValueError, match=r"tofu/forget10 has the parts forget, retain.*not forget, retain$"):
        run_benchmark(
            replace(benchmark, parts=benchmark.parts[:2]), tiny.retrained, tiny.tokenizer, retrained=tiny.retrained
        )
    forget = benchmark.part("forget")
    parts = tuple(replace(part, items=forget.items) if part.name == "retain" else part for part in benchmark.parts)
    with pytest.raises(BadValueError, match=r"'forget'.*and 'retain'.*hold the same rows"):
        run_benchmark(replace(benchmark, parts=parts), tiny.retrained, tiny.tokenizer, retrained=tiny.retrained)
