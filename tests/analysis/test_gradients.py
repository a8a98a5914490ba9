"""Gradient vectors against a plain gradient step, distributed or not; alignment against dense fp64."""

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support import launch
from support.tiny_models import DENSE, make, tuned_copy
from support.token_rows import rows

from hf_taskvec import TaskVector
from hf_taskvec.analysis import gradient_alignment
from hf_taskvec.errors import BadValueError, UnsupportedError

WHOLLY_DOUBLE = ["phi", "gpt2", "gpt_neox", "opt"]


def plain_step(model: torch.nn.Module, data: list[list[int]], learning_rate: float) -> torch.nn.Module:
    """One step of SGD on the mean loss over all tokens, row by row."""
    model = copy.deepcopy(model)
    losses = []
    for row in data:
        logits = model(torch.tensor([row])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))
    (sum(losses) / sum(len(row) - 1 for row in data)).backward()
    torch.optim.SGD(model.parameters(), learning_rate).step()
    return model


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize("batch_size", [3, 8])
def test_it_is_one_epoch_of_gradient_descent(architecture: str, batch_size: int) -> None:
    model = make(architecture).double()
    before = copy.deepcopy(model.state_dict())
    expected = TaskVector.from_finetuned(model, plain_step(model, rows(0), 0.5))
    found = TaskVector.from_gradient(model, rows(0), 0.5, batch_size=batch_size)
    # Some architectures compute norms, attention or positions in fp32, whatever the weights are in.
    close = {"atol": 1e-12, "rtol": 1e-9} if architecture in WHOLLY_DOUBLE else {"atol": 1e-6, "rtol": 1e-4}
    for name in expected:
        torch.testing.assert_close(found.dense(name, torch.float64), expected.dense(name, torch.float64), **close)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "lr=0.5" in found.provenance.origins[0].how


def test_task_arithmetic_is_multi_task_learning() -> None:
    """θ_0 + α Σ τ_t equals one step of size αη on the sum of the losses."""
    model, alpha, rate = make("llama").double(), 0.4, 0.3
    tasks = [rows(0), rows(1)]
    both = alpha * sum(TaskVector.from_gradient(model, data, rate) for data in tasks)
    joint = sum(TaskVector.from_gradient(model, data, alpha * rate) for data in tasks)
    for name in joint:
        torch.testing.assert_close(
            both.dense(name, torch.float64), joint.dense(name, torch.float64), atol=1e-15, rtol=1e-12
        )


def test_it_is_linear_in_the_learning_rate_and_ignores_frozen_weights() -> None:
    model = make("phi")
    one = TaskVector.from_gradient(model, rows(0), 1.0)
    model.lm_head.requires_grad_(False)
    other = TaskVector.from_gradient(model, rows(0), 2.0)
    assert "lm_head.weight" in one and "lm_head.weight" not in other
    name = "model.layers.0.mlp.fc1.weight"
    torch.testing.assert_close(other.dense(name), 2 * one.dense(name), atol=1e-7, rtol=1e-5)
    assert other.cosine(one, name) == pytest.approx(1)


def test_sixteen_bits_are_accumulated_in_thirty_two() -> None:
    vector = TaskVector.from_gradient(make("phi", torch.bfloat16), rows(0), 1.0)
    assert {source.dtype for source in vector.sources} == {torch.float32}


SCRIPT = """
import sys, torch
from support.token_rows import rows
from support.tiny_models import make
from hf_taskvec import TaskVector
vector = TaskVector.from_gradient(make("phi"), rows(0), 1.0, batch_size=2)
from accelerate import PartialState
state = PartialState()
print(f"processes {state.num_processes}")
if state.is_main_process:
    vector.save(sys.argv[1])
state.wait_for_everyone()
"""


def test_two_processes_share_the_rows(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    printed = launch.succeed(script, tmp_path / "vector", processes=2)
    assert printed.count("processes 2") == 2
    found, expected = TaskVector.load(tmp_path / "vector"), TaskVector.from_gradient(make("phi"), rows(0), 1.0)
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(found.dense(name), expected.dense(name), atol=1e-6, rtol=1e-5)


def test_what_has_no_gradient_is_refused() -> None:
    model = make("phi")
    with pytest.raises(BadValueError, match="learning_rate=0"):
        TaskVector.from_gradient(model, rows(0), 0)
    with pytest.raises(BadValueError, match="the data is empty"):
        TaskVector.from_gradient(model, [], 0.1)
    with pytest.raises(BadValueError, match="no next token"):
        TaskVector.from_gradient(model, [[3], [4]], 0.1)
    with pytest.raises(BadValueError, match="requires a gradient"):
        TaskVector.from_gradient(make("phi").requires_grad_(False), rows(0), 0.1)
    with pytest.raises(BadValueError, match="needs a live model, not str"):
        TaskVector.from_gradient("me/model", rows(0), 0.1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="fused experts"):
        TaskVector.from_gradient(make("mixtral", num_experts_per_tok=2), rows(0), 0.1)


# Alignment.


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def run() -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """Four epochs of real gradient descent."""
    base = make("phi").double()
    path = [base]
    for _ in range(4):
        path.append(plain_step(path[-1], rows(0), 0.2))
    return base, path[1:]


def test_alignment_is_that_of_the_dense_updates(run, tmp_path: Path) -> None:
    base, epochs = run
    gradient = TaskVector.from_gradient(base, rows(0), 0.7)
    found = gradient_alignment([TaskVector.from_finetuned(base, model) for model in epochs], gradient)
    weights = [flat(model) for model in (base, *epochs)]
    updates = [later - earlier for earlier, later in pairwise(weights)]
    norms = torch.stack([update.norm() for update in updates])
    assert found.shares == pytest.approx((norms / norms.sum()).tolist(), rel=1e-9)
    assert sum(found.shares) == pytest.approx(1)

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return (a @ b / (a.norm() * b.norm())).item()

    down = flat(plain_step(base, rows(0), 1.0)) - weights[0]
    assert found.with_first == pytest.approx([cosine(updates[0], update) for update in updates], abs=1e-9)
    assert found.update_with_gradient == pytest.approx([cosine(down, update) for update in updates], abs=1e-9)
    assert found.vector_with_gradient == pytest.approx(
        [cosine(down, after - weights[0]) for after in weights[1:]], abs=1e-9
    )
    assert found.with_first[0] == pytest.approx(1, abs=1e-12) and found.vector_with_gradient[0] == pytest.approx(
        1, abs=1e-9
    )

    folders = []
    for number, model in enumerate((base, *epochs)):
        folders.append(tmp_path / str(number))
        model.save_pretrained(folders[-1])
    from_files = gradient_alignment(folders[1:], gradient, base=folders[0])
    assert from_files.shares == pytest.approx(found.shares, rel=1e-9)
    without = gradient_alignment([2 * TaskVector.from_finetuned(base, model) for model in epochs])
    assert without.vector_with_gradient is None and without.shares == pytest.approx(found.shares)


def test_a_vector_that_nearly_returns_to_the_base_keeps_its_direction(run) -> None:
    """Its direction is its own, not what rounding leaves of the long way there and back (bf16 goes through fp32)."""
    generator = torch.Generator().manual_seed(0)
    there, rest = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    away, near = TaskVector.from_tensors({"w": there}), 1e-6 * TaskVector.from_tensors({"w": rest})
    found = gradient_alignment([away, near], near)
    assert found.vector_with_gradient[1] == pytest.approx(1, abs=1e-6)


def test_epochs_are_read_from_where_they_are_saved(run, tmp_path: Path) -> None:
    """Vectors, an adapter and models, from where they are saved."""
    base, epochs = run
    vectors = [TaskVector.from_finetuned(base, model, name=f"e{n}") for n, model in enumerate(epochs)]
    base.save_pretrained(tmp_path / "base")
    for number, (vector, model) in enumerate(zip(vectors, epochs, strict=True)):
        vector.save(tmp_path / f"vector{number}")
        model.save_pretrained(tmp_path / f"model{number}")
    expected = gradient_alignment(vectors)
    count = range(len(vectors))
    assert gradient_alignment([tmp_path / f"vector{n}" for n in count]).shares == pytest.approx(expected.shares)
    mixed = [str(tmp_path / "vector0"), *(tmp_path / f"model{n}" for n in count[1:])]
    for where in (base, tmp_path / "base"):
        found = gradient_alignment(mixed, base=where)
        assert found.shares == pytest.approx(expected.shares) and found.with_first == pytest.approx(expected.with_first)
    low = vectors[0].filter(include="*q_proj.weight").compress(rank=2)
    low.to_adapter(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    assert gradient_alignment([tmp_path / "adapter", vectors[1]]).shares == pytest.approx(
        gradient_alignment([low, vectors[1]]).shares, rel=1e-5
    )


def test_a_gradient_is_taken_inside_inference_mode_too(run) -> None:
    base, _ = run
    expected = TaskVector.from_gradient(base, rows(0), 0.1)
    with torch.inference_mode():
        found = TaskVector.from_gradient(base, rows(0), 0.1)
    assert all(torch.equal(found.dense(name), expected.dense(name)) for name in expected)


def test_epochs_without_a_direction_are_refused(run, tmp_path: Path) -> None:
    base, epochs = run
    vector = TaskVector.from_finetuned(base, epochs[0])
    for alone in (vector, "me/epoch", tmp_path, base):
        with pytest.raises(BadValueError, match="a list of epochs"):
            gradient_alignment(alone)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="one epoch at least"):
        gradient_alignment([])
    with pytest.raises(BadValueError, match="need base="):
        gradient_alignment([tmp_path])
    with pytest.raises(BadValueError, match="epoch 2 changed nothing"):
        gradient_alignment([vector, vector])
    with pytest.raises(BadValueError, match="after epoch 3 the weights are those of the base again"):
        gradient_alignment([vector, 2 * vector, 0 * vector], vector)
    assert gradient_alignment([vector, 2 * vector, 0 * vector]).with_first == pytest.approx((1, 1, -1))
    with pytest.raises(BadValueError, match="the gradient is zero"):
        gradient_alignment([vector, 2 * vector], 0 * vector)
    with pytest.raises(BadValueError, match="'gradient' is not a task vector"):
        gradient_alignment([vector], "gradient")  # type: ignore[arg-type]
    other = TaskVector.from_finetuned(make("gpt2"), tuned_copy(make("gpt2")))
    with pytest.raises(ValueError, match="different architectures"):
        gradient_alignment([vector], other)
