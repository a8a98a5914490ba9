"""The usual unlearning methods: their losses against formulas in fp64, and what a run of them leaves."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support import launch, launched_unlearning
from support.launched_training import LORA, QUICK, SETTINGS, Stopping, make_blocks
from support.tiny_models import TinyModels, make
from transformers import AutoModelForCausalLM

from hf_taskvec.errors import BadValueError, DivergedError, MissingNameError, UnsupportedError
from hf_taskvec.training import (
    NPO,
    RMU,
    GradientAscent,
    GradientDifference,
    SimNPO,
    UnlearningMethod,
    unlearn,
    unlearning_method,
)
from hf_taskvec.training.text_losses import NEXT_TOKEN, TextLoss
from hf_taskvec.training.token_blocks import IGNORED, TokenBlocks
from hf_taskvec.training.unlearning_methods import METHODS

SCRIPT = launch.SUPPORT / "launched_unlearning.py"
#: one step over all blocks
FIRST_STEP = replace(QUICK, batch_size=21, weight_decay=0.0)


# The losses, element by element in fp64.


def log_probabilities(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[list[torch.Tensor]]:
    """For each block log π of the tokens that a label names, one by one."""
    logits = model(input_ids=ids).logits
    found: list[list[torch.Tensor]] = []
    for row in range(len(ids)):
        found.append([])
        for position in range(1, ids.shape[1]):
            if labels[row, position] != IGNORED:
                scores = logits[row, position - 1]
                found[-1].append(scores[labels[row, position]] - scores.exp().sum().log())
    return found


def total(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).sum()


def ascent(model: Any, before: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = [value for block in log_probabilities(model, ids, labels) for value in block]
    return total(each) / len(each)


def npo(model: Any, before: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    now, was = (log_probabilities(one, ids, labels) for one in (model, before))
    ratios = [(total(a) - total(b).detach()).exp() for a, b in zip(now, was, strict=True)]
    # −2/β log σ(−β log r) = 2/β log(1 + r^β), eq. (3) of the paper
    return total([2 / 0.3 * (1 + ratio**0.3).log() for ratio in ratios]) / len(ratios)


def simnpo(model: Any, before: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    means = [total(block) / len(block) for block in log_probabilities(model, ids, labels)]
    return total([2 / 2.5 * (1 + (2.5 * (mean + 0.2)).exp()).log() for mean in means]) / len(means)


def states_after(model: Any, ids: torch.Tensor, layer: int) -> torch.Tensor:
    """Read by a hook on the layer itself."""
    found: list[torch.Tensor] = []

    def keep(module: Any, given: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    with model.model.layers[layer].register_forward_hook(keep):
        model(input_ids=ids)
    return found[0]


def mean_square(states: torch.Tensor, goal: Callable[[int, int], torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    blocks = []
    for row in range(len(labels)):
        kept = [place for place in range(labels.shape[1]) if labels[row, place] != IGNORED]
        parts = [(states[row, place] - goal(row, place)).pow(2).sum() / states.shape[-1] for place in kept]
        blocks.append(total(parts) / len(parts))
    return total(blocks) / len(blocks)


def place(method: RMU, config: Any, seed: int) -> torch.Tensor:
    """Where hidden states go, which is drawn. It is read off the loss: the gradient of |s − c|² by s is 2 (s − c)."""
    loss = method.forget_loss(config, None, seed)
    zeros = torch.zeros(1, 1, config.hidden_size, requires_grad=True)
    one = torch.zeros(1, 1, dtype=torch.int64)
    (slope,) = torch.autograd.grad(loss.summed(zeros, one, one), zeros)
    return (-slope[0, 0] * config.hidden_size / 2).double()


def rmu(model: Any, before: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    goal = place(RMU(steering=3.0, layer=1), model.config, 11)
    assert goal.norm().item() == pytest.approx(3.0, rel=1e-5) and bool((goal >= 0).all())
    return mean_square(states_after(model, ids, 1), lambda row, position: goal, labels)


def stays(model: Any, before: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    were = states_after(before, ids, 1).detach()
    return mean_square(states_after(model, ids, 1), lambda row, position: were[row, position], labels)


FORGETTING: list[tuple[UnlearningMethod, Any]] = [
    (GradientAscent(), ascent),
    (GradientDifference(), ascent),
    (NPO(beta=0.3), npo),
    (SimNPO(beta=2.5, delta=0.2), simnpo),
    (RMU(steering=3.0, layer=1), rmu),
]


def texts(hidden: bool) -> TokenBlocks:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 20, (4, 9), generator=draw)
    labels = ids.clone()
    if hidden:  # blocks of different numbers of labels tell a mean over blocks from one over tokens
        labels[1, 3:] = labels[2, :7] = IGNORED
    return TokenBlocks(ids, labels)


def check_loss(loss: TextLoss, formula: Any, hidden: bool) -> None:
    data = texts(hidden)
    model = make("llama", num_hidden_layers=3)
    found = loss.summed(loss.of(model, data.ids), data.ids, data.labels) / loss.count(data, torch.arange(4))
    found.backward()
    exact, exact_before = (make("llama", seed=seed, num_hidden_layers=3).double() for seed in (0, 5))
    expected = formula(exact, exact_before, data.ids, data.labels)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    reached = 0
    for name, weight in exact.named_parameters():
        gradient = model.get_parameter(name).grad
        if weight.grad is None:  # what comes after the layer that is read
            assert gradient is None or not gradient.any(), name
            continue
        assert gradient is not None
        reached += bool(gradient.any())
        scale = weight.grad.abs().max().item()
        torch.testing.assert_close(gradient.double(), weight.grad, rtol=1e-3, atol=1e-4 * scale + 1e-9)
    assert reached >= 8


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("method", "formula"), FORGETTING, ids=lambda value: getattr(value, "name", ""))
def test_what_forgets_is_the_formula(method: UnlearningMethod, formula: Any, hidden: bool) -> None:
    config = make("llama", num_hidden_layers=3).config
    check_loss(method.forget_loss(config, make("llama", seed=5, num_hidden_layers=3), 11), formula, hidden)


@pytest.mark.parametrize("hidden", [False, True])
def test_what_keeps_is_the_formula(hidden: bool) -> None:
    config, before = make("llama", num_hidden_layers=3).config, make("llama", seed=5, num_hidden_layers=3)
    check_loss(RMU(layer=1).keep_loss(config, before), stays, hidden)
    check_loss(NPO().keep_loss(config, before), lambda *given: -ascent(*given), hidden)
    assert NEXT_TOKEN.weight == 1.0


def test_npo_begins_at_its_middle_and_levels_off() -> None:
    model = make("llama")
    loss = NPO(beta=0.5).forget_loss(model.config, model, 0)
    data = texts(False)
    logits = loss.of(model, data.ids).detach()
    start = loss.summed(logits, data.ids, data.labels) / 4
    assert start.item() == pytest.approx(2 / 0.5 * math.log(2), rel=1e-6)
    logits.scatter_(2, data.ids[:, 1:, None], -1e4)  # every true token is next to impossible
    assert (loss.summed(logits, data.ids, data.labels) / 4).item() == pytest.approx(0.0, abs=1e-6)


# A run.


@pytest.fixture(scope="module")
def model(models: TinyModels) -> Path:
    return models.pair("phi").tuned


@pytest.fixture
def kept() -> datasets.Dataset:
    return make_blocks(7, length=12, seed=3)


def test_the_first_loss_of_a_run_is_both_texts_weighted(
    model: Path, blocks: datasets.Dataset, kept: datasets.Dataset, tmp_path: Path
) -> None:
    method = SimNPO(beta=2.5, delta=0.2, forget_weight=0.5, keep_weight=2.0)
    done = unlearn(model, blocks, tmp_path / "out", method=method, keep_blocks=kept, settings=FIRST_STEP)
    exact = AutoModelForCausalLM.from_pretrained(model).double()
    forgotten, others = (torch.tensor(each["input_ids"][:]) for each in (blocks, kept))
    with torch.no_grad():
        expected = 0.5 * simnpo(exact, None, forgotten, forgotten) - 2.0 * ascent(exact, None, others, others)
    assert (done.steps, done.tokens) == (1, 21 * 16 + 7 * 12)
    assert done.losses[0] == pytest.approx(expected.item(), rel=1e-5)
    record = json.loads((done.folder / "training.json").read_text())["objective"]
    assert (record["loss"], record["beta"], record["kept"]["count"]) == ("simnpo", 2.5, 7)
    assert done.method == method and done.vector.provenance.origins[0].how == "unlearning by simnpo, full"


@pytest.mark.parametrize("method", ["ga", "grad_diff", "npo", "simnpo"])
def test_a_text_is_unlearned(
    model: Path, blocks: datasets.Dataset, kept: datasets.Dataset, tmp_path: Path, method: str
) -> None:
    text = {} if method == "ga" else {"keep_blocks": kept}
    settings = replace(SETTINGS, epochs=10, batch_size=7, learning_rate=5e-3, micro_batch_size=None)
    done = unlearn(model, blocks, tmp_path / "out", method=method, settings=settings, **text)
    ids = torch.tensor(blocks["input_ids"][:])
    with torch.no_grad():
        before, after = (
            -ascent(AutoModelForCausalLM.from_pretrained(folder), None, ids, ids).item()
            for folder in (model, done.folder)
        )
    assert after > before + 0.02
    live = AutoModelForCausalLM.from_pretrained(model)
    with done.vector.applied_to(live):
        made = AutoModelForCausalLM.from_pretrained(done.folder).state_dict()
        assert all(torch.equal(weight, made[name]) for name, weight in live.state_dict().items())


def test_rmu_moves_three_matrices_towards_the_place(tmp_path: Path, blocks: datasets.Dataset) -> None:
    base = make("llama", num_hidden_layers=6)
    base.save_pretrained(tmp_path / "model")
    settings, method = replace(SETTINGS, epochs=8, learning_rate=3e-2), RMU(keep_weight=0.1)
    others = make_blocks(5, seed=7)
    done = unlearn(tmp_path / "model", blocks, tmp_path / "out", method=method, keep_blocks=others, settings=settings)
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out"))
    changed = {name for name in one if not torch.equal(one[name].float(), two[name])}
    assert changed == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (1, 2, 3)}
    assert changed == {name for name in done.vector if done.vector[name].norm}
    ids, goal = torch.tensor(blocks["input_ids"][:]), place(RMU(), base.config, settings.seed)
    with torch.no_grad():
        before, after = (
            states_after(AutoModelForCausalLM.from_pretrained(tmp_path / folder).double(), ids, 3).sub(goal).norm()
            for folder in ("model", "out")
        )
    assert after < 0.95 * before and done.losses[-1] < done.losses[0]


def test_lora_gives_an_adapter(model: Path, blocks: datasets.Dataset, kept: datasets.Dataset, tmp_path: Path) -> None:
    for method in ("npo", "rmu"):
        done = unlearn(model, blocks, tmp_path / method, method=method, keep_blocks=kept, settings=LORA)
        assert done.vector.is_low_rank and done.vector.provenance.origins[0].how == f"unlearning by {method}, LoRA"
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), done.folder)
        merged = adapted.merge_and_unload().state_dict()
        live = AutoModelForCausalLM.from_pretrained(model)
        with done.vector.applied_to(live):
            for name, weight in live.state_dict().items():
                torch.testing.assert_close(weight, merged[name], rtol=1e-5, atol=1e-6)
    assert {name.split(".")[2] for name in done.vector} == {"0"}  # of two layers, the last one is not read


def test_what_diverges_leaves_nothing(model: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    wild = replace(SETTINGS, learning_rate=1e30, warmup=0.0)
    with pytest.raises(DivergedError, match="nothing was saved"):
        unlearn(model, blocks, tmp_path / "out", method="ga", settings=wild)
    assert not list(tmp_path.iterdir())


def test_a_killed_run_goes_on(model: Path, tmp_path: Path) -> None:
    killed = launch.run(SCRIPT, model, tmp_path / "killed", "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not (tmp_path / "killed").exists()
    counting = Stopping(12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_taskvec.training.finetuning.make_accelerator", lambda: counting)
        resumed = launched_unlearning.run("npo-full", model, tmp_path / "killed")
    assert counting.left == 6  # the checkpoint was that of step 6
    whole = launched_unlearning.run("npo-full", model, tmp_path / "whole")
    one, two = (load_file(each.folder / "model.safetensors") for each in (resumed, whole))
    assert resumed.losses == whole.losses and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def two_processes(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    launch.succeed(SCRIPT, models.pair("phi").tuned, folder, *launched_unlearning.JOBS, processes=2)
    return folder


@pytest.mark.parametrize("job", launched_unlearning.JOBS)
def test_two_processes_unlearn_like_one(model: Path, two_processes: Path, tmp_path: Path, job: str) -> None:
    one = launched_unlearning.run(job, model, tmp_path / "one")
    record = json.loads((two_processes / job / "training.json").read_text())
    assert record["timing"]["processes"] == 2
    assert record["losses"] == pytest.approx(one.losses, rel=1e-4)
    name = "adapter_model.safetensors" if job.endswith("lora") else "model.safetensors"
    a, b = (load_file(folder / name) for folder in (one.folder, two_processes / job))
    assert set(a) == set(b) and max((a[key] - b[key]).abs().max().item() for key in a) < 5e-5


# What is refused.


def test_what_makes_no_sense_is_refused(
    model: Path, blocks: datasets.Dataset, kept: datasets.Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(MissingNameError, match=r"no unlearning method 'nop'\. Did you mean 'npo'"):
        unlearn(model, blocks, out, method="nop", keep_blocks=kept)
    for method in set(METHODS) - {"ga"}:
        with pytest.raises(BadValueError, match=f"{method} trains on text to keep"):
            unlearn(model, blocks, out, method=method)
    for alone in (GradientAscent(), NPO(keep_weight=0.0)):
        with pytest.raises(BadValueError, match="trains on no text to keep"):
            unlearn(model, blocks, out, method=alone, keep_blocks=kept)
    with pytest.raises(BadValueError, match="no blocks"):
        unlearn(model, datasets.Dataset.from_dict({"input_ids": []}), out, method="ga")
    with pytest.raises(BadValueError, match="layer=1 of rmu: of the model's 2 layers, 0 to 0"):
        unlearn(model, blocks, out, method=RMU(layer=1), keep_blocks=kept)
    assert not out.exists()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "1"])
def test_numbers_that_make_no_sense_are_refused(value: Any) -> None:
    for make_method in (lambda: NPO(beta=value), lambda: GradientDifference(keep_weight=value), lambda: RMU(value)):
        with pytest.raises(BadValueError, match="must be"):
            make_method()
    for zero in (lambda: NPO(beta=0), lambda: SimNPO(beta=0.0)):
        with pytest.raises(BadValueError, match="must be above 0"):
            zero()


def test_rmu_says_where_it_knows_no_mlp(tmp_path: Path, blocks: datasets.Dataset) -> None:
    from transformers import MptConfig, MptForCausalLM

    MptForCausalLM(MptConfig(vocab_size=20, d_model=16, n_layers=3, n_heads=2)).save_pretrained(tmp_path / "m")
    with pytest.raises(UnsupportedError, match="second MLP matrices"):
        unlearn(tmp_path / "m", blocks, tmp_path / "out", method="rmu", keep_blocks=make_blocks(5))


def test_every_method_is_known_by_its_name_and_paper() -> None:
    for name, kind in METHODS.items():
        method = unlearning_method(name)
        assert type(method) is kind and method.paper.startswith("https://arxiv.org/abs/")
        assert unlearning_method(method) is method
