"""What training minimises: against formulas in fp64, and a run known by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from support.launched_training import QUICK, SETTINGS, StoppedError, Stopping, make_blocks
from support.tiny_books import make_tokenizer
from support.tiny_models import TinyModels, make
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from hf_taskvec.errors import BadValueError, MismatchError, OutputError
from hf_taskvec.training import Guard, Teacher, finetune
from hf_taskvec.training.accelerators import SingleProcess
from hf_taskvec.training.teachers import TeacherLoss
from hf_taskvec.training.text_losses import divergence, next_token_loss
from hf_taskvec.training.token_blocks import IGNORED, TokenBlocks, epoch_order
from hf_taskvec.training.training_loop import TrainingLoop, make_optimizer

FIRST_STEP = replace(QUICK, batch_size=21, weight_decay=0.0)


def exact_means(model: Any, teacher: Any, ids: torch.Tensor) -> tuple[float, float]:
    """The mean divergence and the mean next-token loss, element by element in fp64."""
    student, taught = ({"input_ids": ids} for _ in range(2))
    with torch.no_grad():
        own = model.double()(**student).logits[:, :-1].softmax(-1)
        given = teacher.double()(**taught).logits[:, :-1].softmax(-1)
    kl = (given * (given / own).log()).sum(-1).mean().item()
    chosen = own.gather(-1, ids[:, 1:, None]).log().mean().item()
    return kl, -chosen


def test_divergence_is_that_of_fp64_and_counts_what_a_label_names() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, taught = (torch.randn(3, 6, 11, generator=draw, requires_grad=True) for _ in range(2))
    labels = torch.randint(11, (3, 6), generator=draw)
    labels[1, 2:] = labels[2] = IGNORED
    found = divergence(logits, taught, labels)
    expected = 0.0
    for row, column in ((0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)):
        p, q = (each[row, column].detach().double().softmax(0) for each in (taught, logits))
        expected += sum(float(a) * float((a / b).log()) for a, b in zip(p, q, strict=True))
    assert found.item() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(found, logits)
    expected_gradient = (logits.softmax(-1) - taught.softmax(-1)).detach()
    expected_gradient[:, -1] = expected_gradient[1, 1:] = expected_gradient[2] = 0.0
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert divergence(logits, logits, labels).item() == pytest.approx(0.0, abs=1e-6)


def test_a_teacher_may_be_mixed_with_the_text() -> None:
    teacher, ids = make("phi", seed=5), torch.randint(3, 20, (2, 8))
    logits = torch.randn(2, 8, 20)
    alone, plain = TeacherLoss(teacher)(logits, ids, ids), next_token_loss(logits, ids, ids)
    mixed = TeacherLoss(teacher, 0.25)(logits, ids, ids)
    assert mixed.item() == pytest.approx(0.25 * alone.item() + 0.75 * plain.item(), rel=1e-6)


def test_the_first_loss_of_a_run_is_the_formula(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    taught, never = make("phi", seed=5), make("phi", seed=6)
    guarded = make_blocks(7, length=12, seed=3)
    run = finetune(
        base, blocks, FIRST_STEP, tmp_path / "out", teacher=Teacher(taught, 0.75), guard=Guard(guarded, never, 2.0)
    )
    assert run.steps == 1
    model = AutoModelForCausalLM.from_pretrained(base)
    kl, nll = exact_means(model, taught, torch.tensor(blocks["input_ids"][:]))
    guard, _ = exact_means(model, never, torch.tensor(guarded["input_ids"][:]))
    assert run.losses[0] == pytest.approx(0.75 * kl + 0.25 * nll + 2.0 * guard, rel=1e-5)
    record = json.loads((run.folder / "training.json").read_text())["objective"]
    assert (record["loss"], record["weight"], record["guard"]["weight"]) == ("teacher", 0.75, 2.0)
    assert record["guard"]["blocks"]["count"] == 7


def test_a_guard_leads_to_its_teacher(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    never, guarded = make("phi", seed=6), make_blocks(6, seed=3)
    ids = torch.tensor(guarded["input_ids"][:])
    settings = replace(SETTINGS, epochs=8, learning_rate=1e-2)
    found = {}
    for name, guard in (("free", None), ("guarded", Guard(guarded, never, 4.0))):
        run = finetune(base, blocks, settings, tmp_path / name, guard=guard)
        found[name], _ = exact_means(AutoModelForCausalLM.from_pretrained(run.folder), never, ids)
    assert found["guarded"] < 0.5 * found["free"]


def test_micro_batches_change_nothing(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    more: dict[str, Any] = {"teacher": make("phi", seed=5), "guard": Guard(make_blocks(5, seed=3), base)}
    runs = [
        finetune(base, blocks, replace(QUICK, micro_batch_size=size), tmp_path / str(size), **more) for size in (8, 3)
    ]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-5)


def test_a_run_is_continued_with_its_own_objective_only(
    models: TinyModels, base: Path, blocks: datasets.Dataset, tmp_path: Path
) -> None:
    tuned = models.pair("phi").tuned
    guard = Guard(make_blocks(5, seed=3), base)
    with pytest.raises(StoppedError):
        finetune(
            base, blocks, QUICK, tmp_path / "out", teacher=tuned, guard=guard, checkpoint_every=1,
            accelerator=Stopping(2),
        )  # fmt: skip
    others: list[dict[str, Any]] = [
        {},
        {"teacher": tuned},
        {"guard": guard},
        {"teacher": base, "guard": guard},
        {"teacher": Teacher(tuned, 0.5), "guard": guard},
        {"teacher": tuned, "guard": replace(guard, weight=0.5)},
        {"teacher": tuned, "guard": replace(guard, blocks=make_blocks(5, seed=4))},
    ]
    for other in others:
        with pytest.raises(OutputError, match="unfinished run of another"):
            finetune(base, blocks, QUICK, tmp_path / "out", **other)
    counting = Stopping(3)
    live = AutoModelForCausalLM.from_pretrained(tuned)  # the same model, wherever it is
    resumed = finetune(base, blocks, QUICK, tmp_path / "out", teacher=live, guard=guard, accelerator=counting)
    assert counting.left == 2
    whole = finetune(base, blocks, QUICK, tmp_path / "whole", teacher=tuned, guard=guard)
    assert resumed.losses == whole.losses
    one, two = (load_file(run.folder / "model.safetensors") for run in (resumed, whole))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("weight", [0, 1.5, -1, float("nan"), True, "1"])
def test_a_weight_that_makes_no_sense_is_refused(weight: Any) -> None:
    with pytest.raises(BadValueError, match="of a teacher"):
        Teacher("model", weight)
    if weight != 1.5:
        with pytest.raises(BadValueError, match="of a guard"):
            Guard(make_blocks(1), "model", weight)


def test_the_plain_loss_is_what_the_loop_minimises_by_default(blocks: datasets.Dataset) -> None:
    """Bit for bit the next-token loss written out, over several steps."""
    ids = torch.tensor(blocks["input_ids"][:])
    model, reference = make("phi"), make("phi")
    loop = TrainingLoop(SingleProcess(), model, make_optimizer(model, QUICK), TokenBlocks(ids, ids), QUICK, "fp32")
    loop.run(False, lambda done: None)
    optimizer = make_optimizer(reference, QUICK)
    order = epoch_order(21, QUICK.seed, 0)
    for step, rows in enumerate(order.split(8)):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = QUICK.learning_rate_at(step, 3)
        logits = reference(input_ids=ids[rows], use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[rows][:, 1:].flatten(), reduction="sum")
        (loss / (len(rows) * 15)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), QUICK.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    theirs = dict(reference.named_parameters())
    assert all(torch.equal(weight, theirs[name]) for name, weight in model.named_parameters())


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make("phi", vocab_size=400).save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    file = tmp_path / "two" / "tokenizer.json"
    document = json.loads(file.read_text())
    numbers = document["model"]["vocab"]
    numbers["a"], numbers["b"] = numbers["b"], numbers["a"]
    file.write_text(json.dumps(document))
    with pytest.raises(MismatchError, match="have different tokenizers"):
        finetune(tmp_path / "one", make_blocks(), QUICK, tmp_path / "out", teacher=tmp_path / "two")


def test_a_teacher_with_another_vocabulary_is_refused(base: Path, blocks: datasets.Dataset, tmp_path: Path) -> None:
    make("phi", vocab_size=21).save_pretrained(tmp_path / "other")
    with pytest.raises(MismatchError, match="predicts 21 tokens, the trained model"):
        finetune(base, blocks, QUICK, tmp_path / "out", teacher=tmp_path / "other")
