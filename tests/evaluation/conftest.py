"""Real books and small real models; the tests that need the shared data skip without it."""

import os
from pathlib import Path

import pytest
from evaluation.tiny import STORY, make_tokenizer


def _shared() -> Path | None:
    beside = Path(__file__).resolve().parents[3] / "shared"
    for root in (os.environ.get("HF_TASKVEC_SHARED"), beside):
        if root and (Path(root) / "data").is_dir():
            return Path(root) / "data"
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = _shared()
    if folder is None:
        pytest.skip("the shared data is not here (set HF_TASKVEC_SHARED)")
    return folder


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
