"""Real books and small real models; the tests that need the shared data skip without it."""

from pathlib import Path

import pytest
from support.tiny_books import STORY, make_tokenizer


@pytest.fixture(scope="session")
def books(shared: Path) -> Path:
    return shared / "books"


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def story():
    import datasets

    from hf_taskvec.evaluation import load_book

    data = datasets.Dataset.from_dict({"text": [STORY]})
    return load_book(data, "story", role="forget", block_words=400)
