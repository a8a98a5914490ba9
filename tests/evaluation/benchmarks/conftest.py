"""A tiny model that never saw the forget set, one that memorised it, and both benchmarks with small data sets."""

import copy
from types import SimpleNamespace

import pytest
from support.benchmark_data import memorise, put_on_hub, shortened
from support.tiny_books import make_tokenizer, tiny_llama

from hf_taskvec.evaluation import load_benchmark, run_benchmark

NAMES = ("muse/books", "tofu/forget10")


@pytest.fixture(scope="session")
def loaded():
    """Benchmarks that were loaded, by name: values, which need the Hub no more."""
    return {}


@pytest.fixture
def benchmarks(hub, loaded):
    """Both benchmarks, with answers of eight tokens."""
    for name in NAMES:
        if name not in loaded:
            put_on_hub(hub, name)
            loaded[name] = shortened(load_benchmark(name))
    return dict(loaded)


@pytest.fixture(scope="session")
def tiny():
    """The models and their tokenizer; made once, changed by nobody."""
    from support.benchmark_data import muse_data, tofu_data

    tokenizer, retrained = make_tokenizer(), tiny_llama(context=1024)
    answers = {
        "muse/books": [row["text"] for row in muse_data()["privleak", "forget"]]
        + [f"{row['prompt']} {row['gt']}" for row in muse_data()["verbmem", "forget"]],
        # All that is to be forgotten, and a little of the rest, some of it paraphrased: its utility is not zero.
        "tofu/forget10": [
            f"Question: {row['question']}\nAnswer: {row[column]}"
            for config, column, most in (
                ("forget10_perturbed", "answer", 8),
                ("retain_perturbed", "paraphrased_answer", 2),
                ("real_authors_perturbed", "answer", 1),
                ("world_facts_perturbed", "answer", 1),
            )
            for row in tofu_data()[config, "train"][:most]
        ],
    }
    known = {name: memorise(copy.deepcopy(retrained), tokenizer, texts, 60) for name, texts in answers.items()}
    return SimpleNamespace(tokenizer=tokenizer, retrained=retrained, known=known)


@pytest.fixture(scope="session")
def kept():
    """Reports by the benchmark's name, so that a model is asked once."""
    return {}


@pytest.fixture
def reports(benchmarks, tiny, kept):
    """For each benchmark the retrained model's report, and that of the model which memorised the forget set."""
    for name in NAMES:
        if name not in kept:
            own = run_benchmark(benchmarks[name], tiny.retrained, tiny.tokenizer, retrained=tiny.retrained)
            known = run_benchmark(benchmarks[name], tiny.known[name], tiny.tokenizer, retrained=own)
            kept[name] = SimpleNamespace(retrained=own, known=known)
    return kept
