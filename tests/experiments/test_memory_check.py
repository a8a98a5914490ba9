"""Whether the experiment fits into memory is told before its first stage."""

from __future__ import annotations

import pytest
from support.unlearn_experiment import BOOKS, config

from hf_taskvec import TaskVectorError


def test_the_sweep_holds_two_models_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training is sharded or LoRA, what is evaluated may still be too large."""
    from transformers import PhiConfig

    from hf_taskvec.experiments.unlearning import memory_check

    model = PhiConfig()  # 1.4 billion parameters
    given = ["--joint-model", "a", "--task-vector", "b", "--edit", "paper"]
    sweep_only = config("--config", "phi-1_5-full", *BOOKS, *given, "--reference-model", "c")
    monkeypatch.setattr(memory_check, "free_memory", lambda device: 8 * 2**30)
    with pytest.raises(
        TaskVectorError, match=r"sweep holds two models.* 10\.\d GiB, and 8.0 GiB are free.*--no-retrain"
    ):
        memory_check.check_experiment_memory(sweep_only, model)
    memory_check.check_experiment_memory(config("--config", "phi-1_5-full", *BOOKS, *given, "--no-retrain"), model)


def test_a_repair_is_a_training_that_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PhiConfig

    from hf_taskvec.experiments.unlearning import memory_check

    trained: list[int] = []
    monkeypatch.setattr(memory_check, "check_training_memory", lambda _, asked, *rest: trained.append(asked.epochs))
    monkeypatch.setattr(memory_check, "free_memory", lambda device: 2**40)
    given = ["--joint-model", "a", "--task-vector", "b", "--no-retrain", "--repair-epochs", "7"]
    for kind, expected in (("repair", [7]), ("negate", [])):
        trained.clear()
        made = config("--config", "phi-1_5-full", *BOOKS, *given, "--edit", kind)
        memory_check.check_experiment_memory(made, PhiConfig())
        assert trained == expected
