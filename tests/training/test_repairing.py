"""Repair: edit and repair as one expression that gives the repaired model bit for bit, and gives the base back."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support import launch, launched_repair
from support.folders import names
from support.hub_server import HubServer
from support.launched_training import LORA, QUICK, SETTINGS, StoppedError, Stopping, make_blocks
from support.tiny_adapters import adapter
from support.tiny_books import make_tokenizer
from support.tiny_models import Pair, TinyModels, make, tensors
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MismatchError, OutputError, UnsupportedError
from hf_taskvec.publishing import push_folder
from hf_taskvec.training import Guard, Repaired, finetune, repair

SCRIPT = launch.SUPPORT / "launched_repair.py"


@pytest.fixture
def pair(models: TinyModels) -> Pair:
    return models.pair("phi")


def forget(pair: Pair) -> TaskVector:
    return -1.2 * pair.vector(name="forget")


def bits(folder: Path) -> dict[str, torch.Tensor]:
    return {name: source.read().view(torch.uint8) for name, source in tensors(folder).items()}


def assert_same_bits(one: Path, two: Path) -> None:
    first, second = bits(one), bits(two)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def contents(folder: Path) -> dict[str, bytes]:
    """All that a repair wrote, but for its timing and memory and the time of the files it was made from."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads(found["repair.json"])
    assert record.pop("seconds") > 0
    record.pop("peak_bytes")  # measured, so some pages more or less
    return {**found, "repair.json": json.dumps(record).encode()}


# The whole as one expression.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_whole_vector_gives_the_repaired_model_bit_for_bit(
    models: TinyModels, dtype: torch.dtype, method: Any, blocks: datasets.Dataset, tmp_path: Path
) -> None:
    pair = models.pair("phi", dtype)
    edit = forget(pair)
    settings = QUICK if method == "full" else replace(LORA, epochs=1)
    repaired = repair(pair.base, edit, blocks, settings, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["model", "repair", "repair.json", "vector"]
    assert repaired.vector.expression == "-1.2*forget + repair"
    assert repaired.steps == -(-21 // settings.batch_size) and repaired.tokens == 21 * 16
    assert len(repaired.epoch_losses) == 1 and repaired.seconds > 0
    repaired.vector.apply(pair.base, tmp_path / "again")
    assert_same_bits(repaired.model, tmp_path / "again")
    assert {source.dtype for source in tensors(repaired.model).values()} == {dtype}
    assert AutoModelForCausalLM.from_pretrained(repaired.model).dtype == dtype
    # By other means: the edited model, trained.
    edit.apply(pair.base, tmp_path / "edited")
    tuned = finetune(tmp_path / "edited", blocks, settings, tmp_path / "tuned")
    if method == "full":
        repaired.vector.apply(pair.base, tmp_path / "single", dtype="float32")
        assert_same_bits(tmp_path / "single", tuned.folder)
        alone = TaskVector.from_finetuned(tmp_path / "edited", tuned.folder)
    else:
        alone = TaskVector.from_adapter(tuned.folder, base=tmp_path / "edited")
    assert set(alone) == set(repaired.repair)
    for name in alone:
        assert torch.equal(alone.dense(name), repaired.repair.dense(name))
    assert repaired.epoch_losses == tuned.epoch_losses
    # Edit and repair add up to the whole, but for what writing the edited checkpoint has rounded.
    half_unit = 2.0 ** (-8 if dtype == torch.bfloat16 else -24)
    left = repaired.vector - edit - alone
    for name, source in tensors(tmp_path / "edited").items():
        if method == "lora":
            assert name not in left or left.dense(name).abs().max() < 1e-15, name
        else:
            assert (left.dense(name, torch.float64).abs() <= half_unit * source.read().double().abs()).all(), name


def test_a_full_repair_can_be_undone_bit_for_bit(pair: Pair, blocks: datasets.Dataset, tmp_path: Path) -> None:
    repaired = repair(pair.base, forget(pair), blocks, QUICK, tmp_path / "out")
    (-repaired.vector).apply(repaired.model, tmp_path / "undone")
    assert_same_bits(tmp_path / "undone", pair.base)
    before, after = bits(pair.base), bits(repaired.model)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_low_rank_edit_and_repair_are_one_adapter(pair: Pair, blocks: datasets.Dataset, tmp_path: Path) -> None:
    book = adapter(pair.base, tmp_path / "book", target_modules=["q_proj", "fc1"])
    edit = -0.5 * book.vector(base=pair.base, name="book")
    repaired = repair(pair.base, edit, blocks, LORA, tmp_path / "out")
    vector = repaired.vector
    assert vector.is_low_rank and vector.expression == "-0.5*book + repair"
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert vector.rank(changed) == 8 and repaired.repair.rank(changed) == 4
    vector.to_adapter(tmp_path / "whole", base=pair.base)
    plain = AutoModelForCausalLM.from_pretrained(pair.base)
    merged: Any = PeftModel.from_pretrained(plain, tmp_path / "whole").merge_and_unload()
    expected = AutoModelForCausalLM.from_pretrained(repaired.model).state_dict()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_of_a_dense_edit_a_lora_repair_is_low_rank_alone(pair: Pair, blocks: datasets.Dataset, tmp_path: Path) -> None:
    repaired = repair(pair.base, forget(pair), blocks, replace(LORA, epochs=1), tmp_path / "out")
    assert repaired.repair.is_low_rank and not repaired.vector.is_low_rank
    with pytest.raises(UnsupportedError, match="not low-rank"):
        repaired.vector.to_adapter(tmp_path / "whole", base=pair.base)
    assert repaired.repair.to_adapter(tmp_path / "alone", base=pair.base).is_dir()


def test_provenance_names_the_edit_and_the_repair(pair: Pair, blocks: datasets.Dataset, tmp_path: Path) -> None:
    repaired = repair(pair.base, forget(pair), blocks, QUICK, tmp_path / "out")
    first, second = repaired.vector.provenance.origins
    assert (first.label, second.label) == ("forget", "repair")
    assert second.how == "full fine-tune on kept text, after -1.2*forget"
    assert first.base and first.tuned and second.base and second.tuned
    assert (second.base.name, second.tuned.name) == ("edited", "trained")
    assert repaired.repair.expression == "repair"
    record = json.loads((tmp_path / "out" / "repair.json").read_text())
    assert record["expression"] == "-1.2*forget + repair" and record["objective"] == {"loss": "next token"}
    assert str(tmp_path) not in json.dumps(record)
    # Repaired once more, the two repairs are told apart.
    twice = repair(pair.base, repaired.vector, make_blocks(seed=2), QUICK, tmp_path / "twice")
    assert twice.vector.expression == "-1.2*forget + repair + repair_2"
    written = json.loads((repaired.model / "taskvec_apply.json").read_text())
    assert {label for label, _ in written["vector"]["weights"]} == {"forget", "repair"}


def test_repairing_brings_the_kept_text_back(pair: Pair, blocks: datasets.Dataset, tmp_path: Path) -> None:
    settings = replace(SETTINGS, epochs=4, learning_rate=1e-2)
    repaired = repair(pair.base, forget(pair), blocks, settings, tmp_path / "out")
    assert repaired.epoch_losses[-1] < repaired.epoch_losses[0] - 0.05


def test_an_edit_may_add_tokens(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("llama", vocab_size=20)
    larger = make("llama", vocab_size=24, seed=4)
    larger.save_pretrained(tmp_path / "larger")
    edit = TaskVector.from_finetuned(pair.base, tmp_path / "larger", name="grown", vocabulary="extend")
    repaired = repair(pair.base, edit, make_blocks(vocabulary=24), QUICK, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(repaired.model).config.vocab_size == 24
    repaired.vector.apply(pair.base, tmp_path / "again")
    assert_same_bits(repaired.model, tmp_path / "again")


def test_a_tokenizer_is_saved_beside_the_model(pair: Pair, blocks: datasets.Dataset, tmp_path: Path) -> None:
    repaired = repair(pair.base, forget(pair), blocks, QUICK, tmp_path / "out", tokenizer=make_tokenizer())
    assert AutoTokenizer.from_pretrained(repaired.model)("lamps").input_ids
    repair(pair.base, forget(pair), blocks, replace(QUICK, seed=1), tmp_path / "out", overwrite=True)


def test_vector_and_model_can_be_pushed(pair: Pair, blocks: datasets.Dataset, hub: HubServer, tmp_path: Path) -> None:
    repaired = repair(pair.base, forget(pair), blocks, QUICK, tmp_path / "out")
    repaired.vector.push_to_hub("me/forget")
    again = TaskVector.load("me/forget")
    assert again.expression == "-1.2*forget + repair"
    again.apply(pair.base, tmp_path / "again")
    assert_same_bits(tmp_path / "again", repaired.model)
    push_folder(repaired.model, "me/repaired")
    card = hub.files("me/repaired")["README.md"].decode()
    assert r"$$\theta = \theta_0 - 1.2 \cdot \tau_{\text{forget}} + \tau_{\text{repair}}$$" in card
    assert "repair = TaskVector.from_finetuned('./edited', './trained', name='repair')" in card
    assert hub.files("me/repaired")["model.safetensors"] == (repaired.model / "model.safetensors").read_bytes()


# Again, and interrupted.


def test_a_finished_repair_is_returned(
    pair: Pair, blocks: datasets.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (pair.base, forget(pair), blocks, QUICK, tmp_path / "out")
    first = repair(*arguments, teacher=pair.base)
    monkeypatch.setattr("hf_taskvec.training.repairing.finetune", None)  # what is called again fails
    assert repair(*arguments, teacher=pair.base) == first == Repaired.load(tmp_path / "out")


@pytest.mark.parametrize("other", ["edit", "blocks", "settings", "teacher", "guard", "base"])
def test_other_arguments_are_refused_or_replace(
    pair: Pair, blocks: datasets.Dataset, tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    given: dict[str, Any] = {"base": pair.base, "edit": forget(pair), "blocks": blocks, "settings": QUICK}
    changed: dict[str, Any] = {
        "edit": 0.5 * forget(pair),
        "blocks": make_blocks(seed=1),
        "settings": replace(QUICK, seed=1),
        "teacher": pair.base,
        "guard": Guard(make_blocks(seed=3), pair.base),
        "base": pair.tuned,
    }
    asked = {**given, other: changed[other]}
    with monkeypatch.context() as stopped, pytest.raises(StoppedError):
        stopped.setattr("hf_taskvec.training.repairing.make_accelerator", lambda: Stopping(1))
        repair(**given, output=out, checkpoint_every=1)
    with pytest.raises(OutputError, match="unfinished repair of another base or edit"):
        repair(**asked, output=out)
    repair(**given, output=out)
    with pytest.raises(OutputError, match="already holds an output"):
        repair(**asked, output=out)
    repaired = repair(**asked, output=out, overwrite=True)
    alone = repair(**asked, output=tmp_path / "alone")
    assert_same_bits(repaired.model, alone.model)
    assert repaired.epoch_losses == alone.epoch_losses
    assert names(tmp_path) == ["alone", "out"]


def test_nothing_of_others_is_replaced(pair: Pair, blocks: datasets.Dataset, tmp_path: Path) -> None:
    repaired = repair(pair.base, forget(pair), blocks, QUICK, tmp_path / "out")
    (repaired.model / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"model/notes\.txt"):
        repair(pair.base, forget(pair), blocks, replace(QUICK, seed=1), tmp_path / "out", overwrite=True)


def test_a_killed_repair_continues(pair: Pair, blocks: datasets.Dataset, tmp_path: Path) -> None:
    killed = launch.run(SCRIPT, pair.base, pair.tuned, tmp_path, "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    left = tmp_path / ".killed.unfinished"
    assert {".trained.unfinished", "edited"} <= set(names(left))
    counting = Stopping(12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_taskvec.training.repairing.make_accelerator", lambda: counting)
        resumed = launched_repair.run("killed", pair.base, pair.tuned, tmp_path / "killed")
    assert counting.left == 6  # the checkpoint was that of step 6
    whole = launched_repair.run("killed", pair.base, pair.tuned, tmp_path / "whole")
    assert contents(resumed.folder) == contents(whole.folder)
    assert names(tmp_path) == ["killed", "whole"]


@pytest.mark.parametrize("moment", ["save_vectors", "write_repair", "clear"])
def test_a_repair_that_ends_after_its_training_does_not_train_again(
    pair: Pair, blocks: datasets.Dataset, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (pair.base, forget(pair), blocks, QUICK, tmp_path / "out")
    module = "hf_taskvec.training.repairing"
    patched = f"{module}._Work.save_vectors" if moment == "save_vectors" else f"{module}.{moment}"
    real = getattr(__import__(module, fromlist=["clear"]), moment, None)
    calls = []

    def fails(*given: Any) -> Any:
        calls.append(given)
        if real and len(calls) == 1:  # at the start of the run
            return real(*given)
        raise StoppedError

    with monkeypatch.context() as stopped, pytest.raises(StoppedError):
        stopped.setattr(patched, fails)
        repair(*arguments)
    counting = Stopping(0)  # not one more step
    monkeypatch.setattr(f"{module}.make_accelerator", lambda: counting)
    repaired = repair(*arguments)
    assert_same_bits(repaired.model, _applied(repaired, pair.base, tmp_path / "again"))
    assert names(tmp_path / "out") == ["model", "repair", "repair.json", "vector"]


def _applied(repaired: Repaired, base: Path, folder: Path) -> Path:
    return repaired.vector.apply(base, folder)


@pytest.fixture(scope="module")
def two_processes(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair, folder = models.pair("phi"), tmp_path_factory.mktemp("two")
    launch.succeed(SCRIPT, pair.base, pair.tuned, folder, *launched_repair.JOBS, processes=2)
    return folder


@pytest.mark.parametrize("job", launched_repair.JOBS)
def test_two_processes_repair_like_one(pair: Pair, two_processes: Path, tmp_path: Path, job: str) -> None:
    one = launched_repair.run(job, pair.base, pair.tuned, tmp_path / "one")
    two = Repaired.load(two_processes / job)
    assert two.epoch_losses == pytest.approx(one.epoch_losses, rel=1e-5)
    assert set(one.vector) == set(two.vector) and one.vector.expression == two.vector.expression
    a, b = (load_file(each.model / "model.safetensors") for each in (one, two))
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 2e-5
    assert one.repair.norm() > 1e-2


# What is refused.


def test_what_cannot_be_repaired_is_refused(
    pair: Pair, blocks: datasets.Dataset, models: TinyModels, tmp_path: Path
) -> None:
    out, edit = tmp_path / "out", forget(pair)
    none = datasets.Dataset.from_dict({"input_ids": []})
    with pytest.raises(BadValueError, match="no blocks"):
        repair(pair.base, edit, none, QUICK, out)
    with pytest.raises(MismatchError, match="was made for"):
        repair(pair.base, models.pair("gpt2").vector(), blocks, QUICK, out)
    make("phi", vocab_size=30).save_pretrained(tmp_path / "other")
    for more in ({"teacher": tmp_path / "other"}, {"guard": Guard(blocks, tmp_path / "other")}):
        with pytest.raises(MismatchError, match="predicts 30 tokens"):
            repair(pair.base, edit, blocks, QUICK, out, **more)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="must be a TaskVector"):
        repair(pair.base, pair.tuned, blocks, QUICK, out)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="folder or a Hub id"):
        repair(make("phi"), edit, blocks, QUICK, out)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="guard must be a Guard"):
        repair(pair.base, edit, blocks, QUICK, out, guard=blocks)  # type: ignore[arg-type]
    assert names(tmp_path) == ["other"]
