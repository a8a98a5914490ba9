"""Scores of classifiers by λ: task negation and addition on tiny tasks that a tiny model really learns."""

import copy
from typing import Any

import pytest
import torch
from support.tiny_classes import CLASSES

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.evaluation import score_scales

TINY = CLASSES["BertForSequenceClassification"]
Task = tuple[torch.Tensor, torch.Tensor]


def _task(marker: int, seed: int) -> Task:
    """Sentences of random words, and whether a word of a kind is among them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(20, 50, (64, 6), generator=generator)
    labels = torch.arange(64) % 2
    places = torch.randint(0, 6, (64,), generator=generator)
    tokens[labels == 1, places[labels == 1]] = marker
    return tokens, labels


A, B = _task(10, 1), _task(11, 2)


def _accuracy(model: Any, task: Task) -> float:
    with torch.no_grad():
        return (model(input_ids=task[0]).logits.argmax(-1) == task[1]).double().mean().item()


def _trained(model: Any, tasks: list[Task], steps: int = 60) -> Any:
    tuned = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(tuned.parameters(), 5e-3)
    for _ in range(steps):
        loss = sum(tuned(input_ids=tokens, labels=labels).loss for tokens, labels in tasks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return tuned.eval()


@pytest.fixture(scope="module")
def base() -> Any:
    return TINY.make()


@pytest.mark.parametrize("merge", [True, False])
def test_scores_are_those_of_the_edited_model_at_each_scale(merge: bool, base: Any) -> None:
    vector = TaskVector.from_tensors({"classifier.weight": (torch.ones(2, 1), torch.randn(1, 16))})
    before = copy.deepcopy(base.state_dict())

    def total(model: Any) -> float:
        return TINY.outputs(model).sum().item()

    found = score_scales(base, vector, [0, 0.5, -1], total, merge=merge)
    for scale, value in found.of().items():
        with vector.applied_to(base, scale):
            assert value == pytest.approx(total(base), rel=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


def test_negation_forgets_a_task_and_keeps_another(base: Any) -> None:
    knows = _trained(base, [A, B])
    vector = TaskVector.from_finetuned(base, _trained(base, [A]))
    metric = lambda model: {"task": _accuracy(model, A), "kept": _accuracy(model, B)}  # noqa: E731
    found = score_scales(knows, vector, [0.0, -0.25, -0.5, -0.75, -1.0], metric)
    task, kept = found.of("task"), found.of("kept")
    assert task[0.0] > 0.95 and kept[0.0] > 0.95
    scale = found.best("task", lowest=True, where=lambda each: kept[each] >= 0.5)
    assert scale < 0 and task[scale] < 0.75
    assert metric(knows) == {"task": task[0.0], "kept": kept[0.0]}


def test_addition_gives_the_task_and_an_edit_may_be_given(base: Any) -> None:
    vector = TaskVector.from_finetuned(base, _trained(base, [A]))
    with vector.edit(base, 0.0) as edit:
        found = score_scales(base, edit, [0.0, 1.0], lambda model: _accuracy(model, A))
        assert edit.scale == 0.0
    assert found.of()[0.0] < 0.7 and found.of()[1.0] > 0.95 and found.best() == 1.0


def test_what_makes_no_sense_is_refused(base: Any) -> None:
    vector = TaskVector.from_tensors({"classifier.bias": torch.ones(2)})
    for scales in ([], [1, 1.0]):
        with pytest.raises(BadValueError, match="each of them once"):
            score_scales(base, vector, scales, lambda model: 1.0)
    names = iter(["a", "b"])
    with pytest.raises(BadValueError, match=r"gave \['b'\] at λ=1.0 and \['a'\] at λ=0.0"):
        score_scales(base, vector, [0, 1], lambda model: {next(names): 1.0})
    found = score_scales(base, vector, [0, 1], lambda model: {"accuracy": 1.0})
    assert found.best("accuracy") == 0.0
    with pytest.raises(MissingNameError, match=r"no metric 'acuracy'.*accuracy"):
        found.of("acuracy")
    with pytest.raises(BadValueError, match="lets no λ through"):
        found.best("accuracy", where=lambda scale: False)
    with pytest.raises(BadValueError, match="an edit has a `fingerprint`"):
        score_scales(base, object(), [0], lambda model: 1.0)
