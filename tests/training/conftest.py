"""A base to fine-tune, and the blocks of tokens to do it on."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from support.launched_training import make_blocks
from support.tiny_models import TinyModels


@pytest.fixture(scope="session")
def base(models: TinyModels) -> Path:
    return models.pair("phi").base


@pytest.fixture
def blocks() -> datasets.Dataset:
    return make_blocks()
