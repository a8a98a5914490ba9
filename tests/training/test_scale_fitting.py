"""Learned coefficients: their gradient is right, a planted truth is found, and the model is left as it was."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support import launch
from support.launched_fitting import fitted
from support.launched_training import make_blocks
from support.tiny_models import low_rank, make, tuned_copy
from transformers import PreTrainedModel

from hf_taskvec import TaskVector, combine
from hf_taskvec.algebra.parameter_names import GROUPINGS, Grouping
from hf_taskvec.errors import BadValueError, DivergedError, MismatchError, TaskVectorError, UnsupportedError
from hf_taskvec.models.live_model import live_checkpoint
from hf_taskvec.training import FittedScales, ForgetObjective, MergeObjective, TextBatch, block_losses, fit_scales
from hf_taskvec.training.coefficients import CoefficientTable, coefficient_gradients

MERGE = MergeObjective({"one": make_blocks(10), "two": make_blocks(8, seed=1)})


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(model: PreTrainedModel, before: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


def two_vectors(model: PreTrainedModel) -> dict[str, TaskVector]:
    return {"a": TaskVector.from_finetuned(model, tuned_copy(model, 0.1)), "b": low_rank(model)}


def dense_vector(model: PreTrainedModel, seed: int) -> TaskVector:
    draw = torch.Generator().manual_seed(seed)
    shapes = {name: source.shape for name, source in live_checkpoint(model).tensors.items()}
    return TaskVector.from_tensors({n: torch.randn(s, generator=draw).double() * 0.1 for n, s in shapes.items()})


# The gradient.


@pytest.mark.parametrize(
    ("architecture", "kinds", "by"),
    [
        *(("gpt2", kinds, by) for kinds in ("dense", "low-rank", "mixed", "a sum of both") for by in GROUPINGS),
        ("phi", "mixed", "kind"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_each_coefficient_is_that_of_finite_differences(
    architecture: str, kinds: str, by: Grouping, tied: bool
) -> None:
    """In fp64. A head that is the embedding has two gradients and is one parameter."""
    model = make(architecture, torch.float64, tie_word_embeddings=tied)
    dense, factors = dense_vector(model, 3), low_rank(model, size=0.2)
    vectors = {
        "dense": {"a": dense, "b": dense_vector(model, 4)},
        "low-rank": {"a": factors, "b": factors.filter("*.0.*")},
        "mixed": {"a": dense, "b": factors},
        "a sum of both": {"a": 0.5 * dense - 2.0 * factors},
    }[kinds]
    table = CoefficientTable(vectors, by)
    ids = torch.tensor(make_blocks(3)["input_ids"][:])
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(-30, 30, (len(table.places),), generator=draw).double() / 100
    with table.vector(values).applied_to(model), coefficient_gradients(model, table) as gradient:
        _loss(model, ids).backward()
    step = 1e-4  # which six digits hold
    for place in torch.randperm(len(values), generator=draw)[:4].tolist():
        losses = []
        for moved in (step, -step):
            point = values.clone()
            point[place] += moved
            with table.vector(point).applied_to(model), torch.no_grad():
                losses.append(_loss(model, ids).item())
        expected = (losses[0] - losses[1]) / (2 * step)
        assert gradient[place].item() == pytest.approx(expected, rel=1e-5, abs=1e-8), list(table.places)[place]


def _loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def test_gradients_are_freed_and_what_the_user_had_comes_back() -> None:
    model = make("llama")
    frozen, kept = model.model.norm.weight, model.lm_head.weight
    frozen.requires_grad_(False)
    kept.grad = torch.ones_like(kept)
    table = CoefficientTable({"a": low_rank(model)}, "vector")
    ids = torch.tensor(make_blocks(2)["input_ids"][:])
    with coefficient_gradients(model, table) as gradient:
        _loss(model, ids).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        first = gradient.clone()
        _loss(model, ids).backward()
    assert first.abs().sum() > 0 and torch.allclose(gradient, 2 * first)
    assert not frozen.requires_grad and torch.equal(kept.grad, torch.ones_like(kept))
    assert all(parameter.requires_grad for parameter in model.parameters() if parameter is not frozen)
    _loss(model, ids).backward()  # no hook is left
    assert model.model.embed_tokens.weight.grad is not None


# What is learned.


@dataclass(frozen=True)
class Imitation:
    """An objective of one's own: the logits of another model."""

    target: PreTrainedModel
    blocks: datasets.Dataset

    @property
    def texts(self) -> Mapping[str, datasets.Dataset]:
        return {"text": self.blocks}

    @property
    def compared(self) -> Collection[str]:
        return ()

    def __call__(self, model: Any, batch: TextBatch) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.target(input_ids=batch.ids).logits
        return (model(input_ids=batch.ids).logits - wanted).square().mean(dim=(1, 2))


@pytest.mark.parametrize(("by", "steps"), [("vector", 40), ("kind", 100)])
def test_planted_coefficients_are_found(by: Grouping, steps: int) -> None:
    base = make("llama")
    whole = TaskVector.from_finetuned(base, tuned_copy(base, 0.3))
    parts = {"a": ["*.mlp.down_proj.*", "model.embed_tokens.weight"], "b": ["*.mlp.up_proj.*", "lm_head.weight"]}
    vectors = {name: whole.filter(patterns) for name, patterns in parts.items()}
    target = copy.deepcopy(base)
    (0.3 * vectors["a"] - 0.7 * vectors["b"]).edit(target).keep()
    fit = fit_scales(base, vectors, Imitation(target, make_blocks(24)), by=by, steps=steps, batch_size=8)
    for name, planted in (("a", 0.3), ("b", -0.7)):
        for group, found in fit.coefficients[name].items():
            assert found == pytest.approx(planted, abs=0.02), (name, group)
    assert fit.validation_loss is not None and fit.validation_loss < 1e-3 * fit.validation[0][1]


def test_the_vector_gives_the_weights_of_the_kept_step(tmp_path: Path) -> None:
    model = make("phi", torch.bfloat16)
    seen: list[dict[str, torch.Tensor]] = []

    class Watching(MergeObjective):
        def __call__(self, model: Any, batch: TextBatch) -> torch.Tensor:
            if not torch.is_grad_enabled():
                seen.append(weights_of(model))
            return super().__call__(model, batch)

    vectors = two_vectors(model)
    alike = datasets.concatenate_datasets([make_blocks(1)] * 5)  # so what is held out improves as the rest does
    fit = fit_scales(model, vectors, Watching({"one": alike}), steps=4, start=0.1, evaluate_every=1)
    assert fit.kept_step > 0 and len(seen) == fit.steps + 1
    with fit.vector.applied_to(model):
        assert_same_weights(model, seen[fit.kept_step])
    fit.vector.save(tmp_path / "vector")
    loaded = TaskVector.load(tmp_path / "vector")
    assert loaded.expression == fit.vector.expression and "'learned'" in loaded.expression
    with loaded.applied_to(model):
        assert_same_weights(model, seen[fit.kept_step])
    tables = [fit.coefficients[name] for name in vectors]
    assert fit.vector == combine(list(vectors.values()), "learned", scales=tables, by="tensor")


def test_without_validation_the_last_step_is_kept() -> None:
    model = make("llama")
    fit = fit_scales(model, {"a": low_rank(model)}, MERGE, steps=2, validation=0.0)
    assert fit.kept_step == fit.steps == 2 and fit.validation == () and fit.validation_loss is None


def _patterns(seed: int, count: int = 24) -> datasets.Dataset:
    """Blocks of one pattern, from different places in it."""
    pattern = torch.randperm(17, generator=torch.Generator().manual_seed(seed)) + 3
    rows = [torch.cat([pattern, pattern]).roll(-start)[:16].tolist() for start in range(count)]
    return datasets.Dataset.from_dict({"input_ids": rows})


def _trained_on(model: PreTrainedModel, blocks: datasets.Dataset) -> PreTrainedModel:
    tuned = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-2)
    ids = torch.tensor(blocks["input_ids"][:])
    for _ in range(25):
        _loss(tuned, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tuned


def test_learned_coefficients_merge_no_worse_than_the_sum() -> None:
    """Two tasks that disagree, on blocks that nothing was learned from."""
    base = make("llama")
    tasks = {"one": _patterns(1), "two": _patterns(2)}
    vectors = {name: TaskVector.from_finetuned(base, _trained_on(base, each)) for name, each in tasks.items()}
    later = {name: each.select(range(17, 24)) for name, each in tasks.items()}
    earlier = {name: each.select(range(17)) for name, each in tasks.items()}

    def loss_of(vector: TaskVector) -> float:
        with vector.applied_to(base):
            return sum(block_losses(base, each).mean().item() for each in later.values()) / 2

    by_sum = loss_of(combine(list(vectors.values()), "sum"))
    grouping: Grouping
    for grouping in ("layer", "tensor"):
        fit = fit_scales(base, vectors, MergeObjective(earlier), by=grouping, start=1.0, steps=15)
        assert loss_of(fit.vector) < by_sum, grouping


def test_text_is_forgotten_up_to_the_target_and_other_text_kept() -> None:
    base = make("llama")
    forget, keep = _patterns(1), _patterns(2)
    both = datasets.concatenate_datasets([forget, keep])
    model = _trained_on(base, both)
    vectors = {"forget": TaskVector.from_finetuned(base, _trained_on(base, forget))}
    before = {name: block_losses(model, each).mean().item() for name, each in (("forget", forget), ("keep", keep))}
    target = before["forget"] + 0.5
    objective = ForgetObjective(forget, keep, target=target, slack=0.05)
    fit = fit_scales(model, vectors, objective, steps=25)
    plain = min(_distance(scale * vectors["forget"], model, objective) for scale in (-0.2, -0.4, -0.6, -0.8, -1.0))
    assert _distance(fit.vector, model, objective) < plain
    with fit.vector.applied_to(model):
        forgotten, kept = (block_losses(model, each).mean().item() for each in (forget, keep))
    assert before["forget"] + 0.2 < forgotten < target + 0.5
    assert kept < before["keep"] + 0.2


def _distance(vector: TaskVector, model: PreTrainedModel, objective: ForgetObjective) -> float:
    """The objective, from the mean losses of blocks."""
    untouched = block_losses(model, objective.keep_blocks).mean(dim=1)
    with vector.applied_to(model):
        forgotten = block_losses(model, objective.forget_blocks).mean(dim=1)
        kept = block_losses(model, objective.keep_blocks).mean(dim=1)
    below = (objective.target - forgotten).clamp_min(0).mean()
    return (below + (kept - untouched - objective.slack).clamp_min(0).mean()).item()


def test_learning_ends_when_validation_no_longer_helps() -> None:
    """Random tokens: what is learned of some says nothing about others."""
    model = make("llama")
    vectors = {"a": TaskVector.from_finetuned(model, tuned_copy(model, 0.2))}
    options: dict[str, Any] = {"learning_rate": 0.3, "steps": 60, "evaluate_every": 2}
    fit = fit_scales(model, vectors, MergeObjective({"one": make_blocks(10)}), patience=2, **options)
    assert fit.ended == "the validation loss no longer fell" and fit.steps < 60
    found = dict(fit.validation)
    assert fit.kept_step == min(found, key=lambda step: (found[step], step)) == fit.steps - 4
    assert fit.validation_loss <= found[0]
    patient = fit_scales(model, vectors, MergeObjective({"one": make_blocks(10)}), patience=100, **options)
    assert patient.ended == "all steps were made" and patient.steps == 60 == patient.validation[-1][0]
    assert patient.losses[: fit.steps] == fit.losses


def test_weight_decay_pulls_towards_the_start() -> None:
    model = make("llama")
    vectors = two_vectors(model)
    free, held = (
        fit_scales(
            model, vectors, MERGE, by="vector", start={"a": 0.5, "b": -0.5}, steps=10, validation=0.0, weight_decay=w
        )
        for w in (0.0, 8.0)
    )
    for name, start in (("a", 0.5), ("b", -0.5)):
        far, near = (abs(fit.coefficients[name]["all"] - start) for fit in (free, held))
        assert near < 0.75 * far


def test_a_seed_gives_the_same_coefficients_and_no_other_random_numbers_are_used() -> None:
    model = make("phi")
    vectors = two_vectors(model)
    torch.manual_seed(5)
    one = fit_scales(model, vectors, MERGE, steps=6)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)
    two, other = (fit_scales(model, vectors, MERGE, steps=6, seed=seed) for seed in (0, 1))
    assert two.coefficients == one.coefficients and two.losses == one.losses and two.validation == one.validation
    assert other.losses != one.losses


def test_learning_goes_on_from_learned_coefficients(tmp_path: Path) -> None:
    model = make("llama")
    vectors = two_vectors(model)
    first = fit_scales(model, vectors, MERGE, by="kind", steps=4)
    stored = json.loads(first.save(tmp_path / "new" / "fit.json").read_text())
    assert stored == json.loads(json.dumps(first.to_dict())) and stored["expression"] == first.vector.expression
    again = fit_scales(model, vectors, MERGE, by="kind", steps=1, start=stored["coefficients"])
    assert again.validation[0][1] == pytest.approx(first.validation_loss, rel=1e-6)


# The model is left as it was.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_restored_bit_for_bit(dtype: torch.dtype) -> None:
    model = make("gpt2", dtype).train()
    before = weights_of(model)
    assert fit_scales(model, two_vectors(model), MERGE, steps=3).steps == 3
    assert_same_weights(model, before)
    assert all(module.training for module in model.modules())


class StoppedError(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "error"), [("raises", StoppedError), ("nan", DivergedError), ("infinite", DivergedError)]
)
def test_the_model_is_restored_when_learning_fails(kind: str, error: type[Exception]) -> None:
    model = make("phi").train()
    model.lm_head.weight.requires_grad_(False)
    before = weights_of(model)
    calls = []

    class Failing(MergeObjective):
        def __call__(self, model: Any, batch: TextBatch) -> torch.Tensor:
            calls.append(batch.text)
            values = super().__call__(model, batch)
            if len(calls) < 12:
                return values
            if kind == "raises":
                raise StoppedError
            return values * (math.nan if kind == "nan" else math.inf)

    with pytest.raises(error, match=None if kind == "raises" else "the model is as it was"):
        fit_scales(model, two_vectors(model), Failing(MERGE.blocks), start=0.2)
    assert_same_weights(model, before)
    assert model.training and not model.lm_head.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert fit_scales(model, two_vectors(model), MERGE, steps=1).steps == 1  # no edit is left open


def test_vectors_that_cancel_are_learned_apart() -> None:
    model = make("llama")
    v = TaskVector.from_finetuned(model, tuned_copy(model, 0.1))
    fit = fit_scales(model, {"v": v, "opposite": -v}, MERGE, by="vector", steps=3, validation=0.0)
    assert fit.coefficients["v"]["all"] == pytest.approx(-fit.coefficients["opposite"]["all"], abs=1e-5) != 0.0


# Several processes.


@pytest.fixture(scope="module")
def alone() -> FittedScales:
    return fitted()


def test_two_processes_learn_the_coefficients_of_one(alone: FittedScales) -> None:
    """To 1e-4, of coefficients up to 0.4: numbers are summed in another order."""
    output = launch.succeed(launch.SUPPORT / "launched_fitting.py", processes=2)
    coefficients, losses, validation = json.loads(output.splitlines()[-1])
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    assert [loss for _, loss in validation] == pytest.approx([loss for _, loss in alone.validation], rel=1e-5)
    for name, table in alone.coefficients.items():
        assert coefficients[name] == pytest.approx(table, abs=1e-4)


# What is refused.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vectors": {}}, "no vectors"),
        ({"vectors": [1]}, "mapping from names"),
        ({"vectors": {"a": 1.0}}, r"vectors\['a'\] is a float"),
        ({"by": "tensors"}, "Did you mean 'tensor'"),
        ({"start": {"a": 1.0}}, "no number for 'b'"),
        ({"start": {"a": 1.0, "b": 1.0, "c": 1.0}}, "'c', which is no vector"),
        ({"start": {"a": {"x": 1.0}, "b": 1.0}}, "no number for .* of 'a'"),
        ({"start": math.nan}, "finite"),
        ({"steps": 0}, "steps=0"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"patience": 0}, "patience=0"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"validation": 1.0}, "validation=1.0"),
        ({"validation": 0.99}, "too few blocks"),
        ({"objective": MergeObjective({})}, "no texts"),
        ({"objective": MergeObjective({"one": make_blocks(0)})}, "no blocks"),
        ({"objective": MergeObjective({"one": make_blocks(4, vocabulary=50)})}, "vocabulary"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changed: dict[str, Any], message: str) -> None:
    model = make("llama")
    before = weights_of(model)
    options = {"vectors": two_vectors(model), "objective": MERGE, **changed}
    with pytest.raises(TaskVectorError, match=message):
        fit_scales(model, options.pop("vectors"), options.pop("objective"), **options)
    assert_same_weights(model, before)


def test_vectors_that_do_not_fit_are_refused() -> None:
    model = make("llama")
    with pytest.raises(MismatchError, match="made for"):
        fit_scales(model, {"a": low_rank(model), "b": low_rank(make("gpt2"))}, MERGE)
    wide = TaskVector.from_tensors({"model.norm.weight": torch.ones(17)})
    with pytest.raises(MismatchError, match=r"model\.norm\.weight"):
        fit_scales(model, {"a": wide}, MERGE)
    with pytest.raises(BadValueError, match="changes nothing"):
        fit_scales(model, {"a": wide - wide}, MERGE)
    with pytest.raises(BadValueError, match="takes a live model"):
        fit_scales("gpt2", {"a": wide}, MERGE)


def test_a_quantised_model_is_refused() -> None:
    model = make("llama")
    vectors = {"a": low_rank(model)}
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"up_proj.weight is quantised"):
        fit_scales(model, vectors, MERGE)


def test_more_coefficients_than_an_expression_holds_are_refused() -> None:
    model = make("llama")
    vector = low_rank(model)
    with pytest.raises(BadValueError, match=r"coefficients by='tensor' are too many.*by='layer'"):
        fit_scales(model, {f"v{number}": vector for number in range(150)}, MERGE)
