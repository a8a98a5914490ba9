"""Cross-task linearity against a plain computation on separate models."""

import copy

import pytest
import torch
from support.tiny_models import ARCHITECTURES, EXPERTS, make, tuned_copy
from support.token_rows import edited, rows

from hf_taskvec import TaskVector
from hf_taskvec.analysis import cross_task_linearity, linearity
from hf_taskvec.errors import BadValueError, MissingNameError


def hidden(model: torch.nn.Module, data: list[list[int]], feature: str) -> torch.Tensor:
    """Features (layers, rows, size), row by row."""
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    found: list[list[torch.Tensor]] = [[] for _ in blocks]
    handles = [
        block.register_forward_hook(lambda m, a, out, to=to: to.append((out[0] if isinstance(out, tuple) else out)[0]))
        for block, to in zip(blocks, found, strict=True)
    ]
    with torch.no_grad():
        for row in data:
            model(torch.tensor([row]))
    for handle in handles:
        handle.remove()
    return torch.stack(
        [torch.stack([(h[-1] if feature == "last" else h.mean(0)).double() for h in to]) for to in found]
    )


@pytest.mark.parametrize("feature", ["mean", "last"])
def test_linearity_is_the_papers_measure(trio, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, one, other = trio
    a, b = TaskVector.from_finetuned(base, one, name="a"), TaskVector.from_finetuned(base, other, name="b")
    monkeypatch.setattr(linearity, "_HELD_BYTES", 4 * 16 * 2 * 3)  # three rows at a time
    data = rows(0)
    found = cross_task_linearity(base, a, b, data, alphas=(0.25,), scale=0.4, feature=feature, batch_size=2)
    sides = {
        "interpolation α=0.25": (edited(base, (0.25, one), (0.75, other)), (0.25, one), (0.75, other)),
        "addition": (
            edited(base, (0.4, one), (0.4, other)),
            (0.5, edited(base, (0.8, one))),
            (0.5, edited(base, (0.8, other))),
        ),
        "negation of a": (base, (0.5, edited(base, (0.4, one))), (0.5, edited(base, (-0.4, one)))),
        "negation of b": (base, (0.5, edited(base, (0.4, other))), (0.5, edited(base, (-0.4, other)))),
    }
    assert list(found.measures) == list(sides)
    for kind, (left, (weight, first), (rest, second)) in sides.items():
        f, g, h = (hidden(model, data, feature) for model in (left, first, second))
        right = weight * g + rest * h
        cosine = (f * right).sum(-1) / (f.norm(dim=-1) * right.norm(dim=-1))
        torch.testing.assert_close(found[kind].cosine, cosine, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            found[kind].coefficient, f.norm(dim=-1) * cosine / right.norm(dim=-1), atol=1e-4, rtol=0
        )
        torch.testing.assert_close(found[kind].baseline, torch.cosine_similarity(g, h, dim=-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_small_changes_are_linear_in_every_architecture(architecture: str) -> None:
    base = make(architecture, **({"num_experts_per_tok": 2} if architecture in EXPERTS else {}))
    tuned = {f"v{seed}": tuned_copy(base, 0.001, seed=seed) for seed in (1, 2)}
    vectors = [TaskVector.from_finetuned(base, each, name=name) for name, each in tuned.items()]
    before = copy.deepcopy(base.state_dict())
    found = cross_task_linearity(base, *vectors, rows(0), alphas=(0.5,))["interpolation α=0.5"]
    assert found.cosine.shape == (2, 7)
    assert bool((found.cosine > 0.99).all())  # small changes are linear
    assert bool((found.cosine >= found.baseline - 1e-6).all())
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in before.items())


def test_equal_models_are_perfectly_linear(trio) -> None:
    base, one, _ = trio
    vector = TaskVector.from_finetuned(base, one)
    found = cross_task_linearity(base, vector, vector, rows(0), alphas=(0.3,))
    mixed = found["interpolation α=0.3"]
    torch.testing.assert_close(mixed.cosine, torch.ones_like(mixed.cosine), atol=1e-6, rtol=0)
    torch.testing.assert_close(mixed.coefficient, torch.ones_like(mixed.cosine), atol=1e-5, rtol=0)
    assert "negation of the first" in found.measures
    assert len(found.table()) == 4 * 2 and found.table()[0]["layer"] == 0


def test_the_measure_is_symmetric(trio) -> None:
    base, one, other = trio
    a, b = TaskVector.from_finetuned(base, one), TaskVector.from_finetuned(base, other)
    here = cross_task_linearity(base, a, b, rows(0), alphas=(0.25,))
    there = cross_task_linearity(base, b, a, rows(0), alphas=(0.75,))
    torch.testing.assert_close(
        here["interpolation α=0.25"].cosine, there["interpolation α=0.75"].cosine, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(here["addition"].coefficient, there["addition"].coefficient, atol=1e-6, rtol=0)


def test_the_model_is_restored_when_something_breaks(trio, monkeypatch: pytest.MonkeyPatch) -> None:
    base = copy.deepcopy(trio[0]).train()
    vector = TaskVector.from_finetuned(*trio[:2])
    before = copy.deepcopy(base.state_dict())

    def broken(*args: object) -> None:
        assert not torch.equal(
            base.state_dict()["model.layers.0.mlp.fc1.weight"], before["model.layers.0.mlp.fc1.weight"]
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(linearity, "layer_features", broken)
    with pytest.raises(KeyboardInterrupt):
        cross_task_linearity(base, vector, 2 * vector, rows(0))
    assert base.training and all(torch.equal(value, base.state_dict()[name]) for name, value in before.items())


def test_an_edit_that_overflows_is_refused(trio) -> None:
    """Rather than measured as nan; and the model is as before."""
    base, one, other = trio
    before = copy.deepcopy(base.state_dict())
    a, b = (1e30 * TaskVector.from_finetuned(base, model, name=name) for model, name in ((one, "a"), (other, "b")))
    with pytest.raises(BadValueError, match=r"θ_0 \+ .*a.*: features are NaN, infinite or zero"):
        cross_task_linearity(base, a, b, rows(0))
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in before.items())


def test_arguments_out_of_range_are_refused(trio) -> None:
    base, one, _ = trio
    vector = TaskVector.from_finetuned(base, one)
    with pytest.raises(BadValueError, match="the data is empty"):
        cross_task_linearity(base, vector, vector, [])
    with pytest.raises(BadValueError, match="between 0 and 1"):
        cross_task_linearity(base, vector, vector, rows(0), alphas=(1.0,))
    with pytest.raises(BadValueError, match="feature='first'"):
        cross_task_linearity(base, vector, vector, rows(0), feature="first")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="scale=0"):
        cross_task_linearity(base, vector, vector, rows(0), scale=0)
    with pytest.raises(BadValueError, match="needs a live model, not str"):
        cross_task_linearity("me/model", vector, vector, rows(0))  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="'me/vector' is not a task vector"):
        cross_task_linearity(base, vector, "me/vector", rows(0))  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match=r"alphas=0.5 must be a list"):
        cross_task_linearity(base, vector, vector, rows(0), alphas=0.5)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="scale='x'"):
        cross_task_linearity(base, vector, vector, rows(0), scale="x")  # type: ignore[arg-type]
    with pytest.raises(MissingNameError, match="Did you mean 'addition'"):
        cross_task_linearity(base, vector, 2 * vector, rows(0))["additon"]
