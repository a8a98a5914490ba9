"""A model and two fine-tunes of it."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import make, tuned_copy


@pytest.fixture(scope="module")
def trio() -> tuple[torch.nn.Module, ...]:
    """A base, and two models that differ from it in other ways."""
    base = make("phi")
    return base, tuned_copy(base, 0.1, seed=1), tuned_copy(base, 0.1, seed=2)
