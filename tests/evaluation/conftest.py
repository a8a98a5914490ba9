"""Real books and small real models; the tests that need the shared data skip without it."""

import copy
from pathlib import Path

import pytest
from support.tiny_books import STORY, make_books, make_tokenizer, tiny_llama, train


@pytest.fixture(scope="session")
def books(shared: Path) -> Path:
    return shared / "books"


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def trained():
    tokenizer, books, base = make_tokenizer(), make_books(), tiny_llama()
    joint = train(copy.deepcopy(base), tokenizer, books, 150)
    single = train(copy.deepcopy(base), tokenizer, books[:1], 100)
    return tokenizer, books, base, joint, single


@pytest.fixture(scope="module")
def made(trained):
    """The tokenizer, two books, a base, it fine-tuned on both books, and fine-tuned on the one to forget."""
    return copy.deepcopy(trained)


@pytest.fixture
def story():
    import datasets

    from hf_taskvec.evaluation import load_book

    data = datasets.Dataset.from_dict({"text": [STORY]})
    return load_book(data, "story", role="forget", block_words=400)
