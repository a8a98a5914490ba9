"""Gradient vectors and importances against plain gradients, distributed or not; alignment against dense fp64."""

import copy
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
from support import launch
from support.tiny_models import DENSE, make, tuned_copy
from support.token_rows import rows

from hf_taskvec import TaskVector
from hf_taskvec.analysis import epoch_gradients, gradient_alignment, gradient_importance
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError

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


# Importance.


Measure = Literal["absolute", "squared"]
MEASURES: tuple[Measure, ...] = ("absolute", "squared")


def filled(model: torch.nn.Module, values: Iterable[torch.Tensor]) -> torch.nn.Module:
    """A copy of the model with other parameters."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    return model


def plain_importance(model: torch.nn.Module, data: list[list[int]], measure: Measure) -> TaskVector:
    """Row by row, by `backward`, and then under canonical names: the difference of two models."""
    worker = copy.deepcopy(model)
    sums = [torch.zeros_like(parameter) for parameter in worker.parameters()]
    for row in data:
        worker.zero_grad()
        logits = worker(torch.tensor([row])).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:])).backward()
        for total, parameter in zip(sums, worker.parameters(), strict=True):
            if parameter.grad is not None:
                total += parameter.grad.abs() if measure == "absolute" else parameter.grad**2
    return TaskVector.from_finetuned(
        filled(model, [torch.zeros_like(total) for total in sums]), filled(model, [total / len(data) for total in sums])
    )


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize("measure", MEASURES)
def test_importance_is_the_mean_size_of_the_rows_gradients(architecture: str, measure: Measure) -> None:
    model = make(architecture).double()
    model.train()
    first = next(iter(model.parameters()))
    first.grad = torch.ones_like(first)
    before = copy.deepcopy(model.state_dict())
    expected = plain_importance(model.eval(), rows(0), measure)
    found = gradient_importance(model.train(), rows(0), measure=measure)
    close = {"atol": 1e-15, "rtol": 1e-9} if architecture in WHOLLY_DOUBLE else {"atol": 1e-6, "rtol": 1e-3}
    assert set(found) >= set(expected) and len(expected) > 10
    for name in found:
        if name in expected:
            torch.testing.assert_close(found.dense(name, torch.float64), expected.dense(name, torch.float64), **close)
        else:  # a fine-tune does not tell what it left as it was
            assert not found.dense(name).any()
        assert found.dense(name).min() >= 0
    # What the rule has to find an importance for: all that a fine-tune may change.
    assert set(found) == set(TaskVector.from_finetuned(model, tuned_copy(model)))
    assert model.training and all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert torch.equal(first.grad, torch.ones_like(first)) and sum(p.grad is not None for p in model.parameters()) == 1


def test_a_tied_weight_has_the_importance_of_both_its_uses() -> None:
    tied = make("gpt2").double()
    assert tied.lm_head.weight is tied.transformer.wte.weight
    found = gradient_importance(tied, rows(0))
    assert "lm_head.weight" not in found
    # Tokens that no row has are still predicted not to come: only the head gives them a gradient.
    unused = [token for token in range(20) if all(token not in row for row in rows(0))]
    assert unused and found.dense("transformer.wte.weight")[unused].min() > 0
    untied = gradient_importance(make("gpt2", tie_word_embeddings=False).double(), rows(0))
    assert "lm_head.weight" in untied and not untied.dense("transformer.wte.weight")[unused].any()


def test_importance_is_of_rows_whatever_they_are_given_as(tmp_path: Path) -> None:
    model, data = make("phi"), rows(0)
    found = gradient_importance(model, data)
    name = "model.layers.0.mlp.fc1.weight"
    assert torch.equal(gradient_importance(model, {"input_ids": data}).dense(name), found.dense(name))
    one_token = gradient_importance(model, [[5], *data, [3]])  # which predict nothing
    assert torch.equal(one_token.dense(name), found.dense(name))
    twice = gradient_importance(model, data + data)
    torch.testing.assert_close(twice.dense(name), found.dense(name))
    cut = gradient_importance(model, [row + [4] * 12 for row in data], max_length=3)
    assert torch.equal(cut.dense(name), gradient_importance(model, [row[:3] for row in data]).dense(name))
    # Gradients that point against each other add up: the full-batch gradient is smaller.
    assert found.norm() > TaskVector.from_gradient(model, data, 1.0).norm()
    model.lm_head.requires_grad_(False)
    assert set(found) - set(gradient_importance(model, data)) == {"lm_head.weight", "lm_head.bias"}
    loaded = TaskVector.load(found.save(tmp_path / "importance"))
    assert set(loaded) == set(found) and all(torch.equal(loaded.dense(n), found.dense(n)) for n in found)
    (origin,) = loaded.provenance.origins
    assert origin.base is None and "mean absolute gradient over 7 rows of text, at live PhiFor" in origin.how


@pytest.mark.parametrize("measure", MEASURES)
def test_importances_of_sixteen_bits_are_added_up_in_thirty_two(measure: Measure) -> None:
    """The square of 1e-4 is below what fp16 holds."""
    model = make("phi", torch.float16)
    found = gradient_importance(model, rows(0), measure=measure)
    expected = gradient_importance(copy.deepcopy(model).double(), rows(0), measure=measure)
    assert {source.dtype for source in found.sources} == {torch.float32}
    tiny = 0
    for name in expected:
        values, exact = found.dense(name), expected.dense(name)
        torch.testing.assert_close(values, exact, atol=2e-3 * exact.max().item(), rtol=0.02)
        small = (exact > 1e-10) & (exact < 1e-8)
        tiny += int(small.sum())
        assert values[small].all()
    assert tiny > 10 or measure == "absolute"


def test_two_processes_share_the_rows_of_an_importance(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    call = 'gradient_importance(make("phi"), rows(0))'
    old = 'TaskVector.from_gradient(make("phi"), rows(0), 1.0, batch_size=2)'
    assert old in SCRIPT
    script.write_text("from hf_taskvec.analysis import gradient_importance\n" + SCRIPT.replace(old, call))
    assert launch.succeed(script, tmp_path / "vector", processes=2).count("processes 2") == 2
    found, expected = TaskVector.load(tmp_path / "vector"), gradient_importance(make("phi"), rows(0))
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(found.dense(name), expected.dense(name), atol=1e-7, rtol=1e-5)


def test_what_has_no_importance_is_refused() -> None:
    model = make("phi")
    with pytest.raises(MissingNameError, match=r"no measure='square'. Did you mean 'squared'\? It is one of absolute"):
        gradient_importance(model, rows(0), measure="square")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="'a-b' cannot name a vector"):
        gradient_importance(model, rows(0), name="a-b")
    with pytest.raises(BadValueError, match="no next token"):
        gradient_importance(model, [[3], [4]])
    with pytest.raises(BadValueError, match="holds the token 20"):
        gradient_importance(model, [[3, 20]])
    with pytest.raises(BadValueError, match="needs a live model, not str"):
        gradient_importance("me/model", rows(0))  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="requires a gradient"):
        gradient_importance(make("phi").requires_grad_(False), rows(0))
    with pytest.raises(UnsupportedError, match="fused experts"):
        gradient_importance(make("mixtral", num_experts_per_tok=2), rows(0))
    with torch.no_grad():
        model.lm_head.bias.fill_(float("nan"))
    with pytest.raises(BadValueError, match="the gradient is NaN"):
        gradient_importance(model, rows(0))
    sure = make("phi", vocab_size=20)
    with torch.no_grad():
        sure.lm_head.weight.zero_()
        sure.lm_head.bias.copy_(torch.eye(20)[5] * 1e9)  # always token 5, with a probability of 1
    sure.requires_grad_(False).lm_head.bias.requires_grad_(True)
    with pytest.raises(BadValueError, match="zero everywhere"):
        gradient_importance(sure, [[5, 5, 5]])


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
    assert found.update_shares == pytest.approx((norms / norms.sum()).tolist(), rel=1e-9)
    assert sum(found.update_shares) == pytest.approx(1)

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
    assert from_files.update_shares == pytest.approx(found.update_shares, rel=1e-9)
    without = gradient_alignment([2 * TaskVector.from_finetuned(base, model) for model in epochs])
    assert without.vector_with_gradient is None and without.update_shares == pytest.approx(found.update_shares)


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
    assert gradient_alignment([tmp_path / f"vector{n}" for n in count]).update_shares == pytest.approx(
        expected.update_shares
    )
    mixed = [str(tmp_path / "vector0"), *(tmp_path / f"model{n}" for n in count[1:])]
    for where in (base, tmp_path / "base"):
        found = gradient_alignment(mixed, base=where)
        assert found.update_shares == pytest.approx(expected.update_shares) and found.with_first == pytest.approx(
            expected.with_first
        )
    low = vectors[0].filter(include="*q_proj.weight").compress(rank=2)
    low.to_adapter(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    assert gradient_alignment([tmp_path / "adapter", vectors[1]]).update_shares == pytest.approx(
        gradient_alignment([low, vectors[1]]).update_shares, rel=1e-5
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


# The gradients at the epochs' ends.


def test_epoch_gradients_are_those_of_each_checkpoint(run) -> None:
    """Full-batch gradient descent tells them: each update is −η times the gradient that its epoch began with."""
    base, models = run
    before = flat(base).clone()
    found = epoch_gradients(base, [TaskVector.from_finetuned(base, model) for model in models], rows(0))
    weights = [before, *(flat(model) for model in models)]
    gradients = [(earlier - later) / 0.2 for earlier, later in pairwise(weights)]
    assert found.norms == pytest.approx([each.norm().item() for each in gradients], rel=1e-6)
    assert found.shares == pytest.approx([n / sum(found.norms) for n in found.norms]) and sum(
        found.shares
    ) == pytest.approx(1)
    cosines = [torch.cosine_similarity(each, gradients[0], dim=0).item() for each in gradients]
    assert found.with_first == pytest.approx(cosines, abs=1e-9) and min(cosines) < 0.999
    assert torch.equal(flat(base), before)


def test_epoch_gradients_need_a_list_of_vectors(run) -> None:
    base, models = run
    vector = TaskVector.from_finetuned(base, models[0])
    with pytest.raises(BadValueError, match="a list of task vectors"):
        epoch_gradients(base, vector, rows(0))  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="one epoch at least"):
        epoch_gradients(base, [], rows(0))
    with pytest.raises(BadValueError, match="'me/epoch' is not a task vector"):
        epoch_gradients(base, ["me/epoch"], rows(0))  # type: ignore[list-item]
