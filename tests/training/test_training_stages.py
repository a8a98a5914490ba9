"""Stages of an experiment are done once, and known by what made them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_taskvec.training import TrainingSettings
from hf_taskvec.training.training_stages import TrainingStages


@pytest.fixture
def bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `accelerate config` says it."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def quick(models: Any) -> tuple[Path, Any, TrainingSettings]:
    from support.launched_training import make_blocks

    return models.pair("phi").base, make_blocks(4), TrainingSettings(epochs=2, batch_size=4)


@pytest.fixture
def trained(quick: tuple[Path, Any, TrainingSettings], tmp_path: Path) -> Path:
    return TrainingStages(tmp_path / "stages").train("one", *quick)


def test_a_stage_of_another_precision_is_another(
    trained: Path, bf16: None, quick: tuple[Path, Any, TrainingSettings]
) -> None:
    again = TrainingStages(trained.parent).train("one", *quick)
    assert again != trained
    assert [json.loads((each / "training.json").read_text())["precision"] for each in (trained, again)] == [
        "fp32",
        "bf16",
    ]


def test_a_stage_keeps_vectors_and_checkpoints_on_request(
    trained: Path, quick: tuple[Path, Any, TrainingSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_taskvec.training import finetuning

    saved = []
    keep = finetuning.save_state
    monkeypatch.setattr(finetuning, "save_state", lambda *a, **k: (saved.append(len(a[2])), keep(*a, **k)))
    base, blocks, settings = quick
    each = dataclasses.replace(settings, batch_size=2)
    with_vectors = TrainingStages(trained.parent, checkpoint_every=1).train("one", base, blocks, each, vectors=True)
    assert saved == [1, 2, 3]
    assert sorted(path.name for path in (with_vectors / "vectors").iterdir()) == ["epoch-1", "epoch-2"]
    again = TrainingStages(trained.parent).train(
        "one", *quick, vectors=True
    )  # the same training, but it has its vectors too
    assert again != trained and (again / "vectors/epoch-2/taskvec.json").exists()
    assert (again / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
