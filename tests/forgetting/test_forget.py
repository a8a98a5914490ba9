"""`forget`: one call from a model that knows a book to one that does not, or to why not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import launch
from support.forgetting_world import ANYTHING, LORA, NOTHING, World
from support.launched_training import StoppedError, Stopping
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_taskvec import Forgotten, TaskVector, TaskVectorError, forget
from hf_taskvec.errors import BadValueError, MissingNameError, OutputError
from hf_taskvec.evaluation import Criteria, load_book
from hf_taskvec.training import repairing

SCRIPT = launch.SUPPORT / "launched_forget.py"


@pytest.fixture(scope="module")
def done(world: World, tmp_path_factory: pytest.TempPathFactory) -> Forgotten:
    """The whole of it, with the attack that it makes by default."""
    return forget(**world.arguments(attacks=("relearn",)), output=tmp_path_factory.mktemp("forget") / "out")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_equal_weights(one: Path, two: Path) -> None:
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_the_book_is_forgotten_and_the_others_are_kept(done: Forgotten) -> None:
    assert done.outcome in ("forgotten", "perhaps"), done.sentence
    assert "repaired" in done.edit and done.model is not None
    choice = done.report.choice
    assert choice is not None and choice.verdict is not None
    relative = {found.metric: found.relative for found in choice.verdict.metrics}
    for metric in ("rouge_l", "loss", "exact_memorisation"):
        found = relative[metric]
        assert found is not None and 0.6 < found.value < 1.4, (metric, found)
    assert all(loss.lost.value < 0.3 for loss in choice.verdict.retained), choice.verdict.retained
    # The plain negation was tried first: it forgets as well, and takes the other books with it.
    plain = next(each for each in choice.candidates if done.report.names.short(each.scale).endswith("*forget"))
    assert not plain.qualifies and plain.worst_retain > 0.5


def test_all_of_it_is_written(done: Forgotten) -> None:
    assert done.model is not None and done.adapter is None and done.audit is not None
    reports = ("report.json", "report.md", "report.html", "audit.json", "forgotten.json")
    for name in (*reports, "vector/taskvec.json", "scores.png"):
        assert (done.folder / name).is_file(), name
    AutoTokenizer.from_pretrained(done.model)
    assert done.vector.expression.endswith("*forget + repair")
    costs = {cost.name: cost for cost in done.record.tried}
    assert costs[done.edit].steps > 0 and costs[done.edit].tokens > 0
    assert done.record.vector_tokens > 0 and done.record.written
    assert done.audit.finding("relearn-forget") is not None
    assert "Under attack:" in done.sentence
    page = (done.folder / "report.html").read_text("utf-8")
    assert "relearn-forget" in page and '"audit": null' not in page
    for text in ((done.folder / "forgotten.json").read_text("utf-8"), (done.folder / "config.json").read_text("utf-8")):
        assert str(done.folder.parent) not in text


def test_the_vector_gives_the_model_bit_for_bit(done: Forgotten, world: World, tmp_path: Path) -> None:
    assert done.model is not None
    done.vector.apply(world.joint, tmp_path / "again")
    assert_equal_weights(done.model, tmp_path / "again")


def test_it_is_read_back_as_it_was(done: Forgotten) -> None:
    again = Forgotten.load(done.folder)
    assert again.record == done.record and again.report == done.report and again.audit == done.audit
    assert again.vector == done.vector and again.model == done.model


def test_what_is_finished_is_not_done_again(done: Forgotten, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairing, "make_accelerator", lambda: Stopping(0))
    again = forget(**world.arguments(attacks=("relearn",)), output=done.folder)
    assert again.record == done.record


def test_an_interrupted_call_goes_on(
    done: Forgotten, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(done.folder / "stages", tmp_path / "stages")
    for folder in (tmp_path / "stages").glob("repair-*"):
        shutil.rmtree(folder)
    out = tmp_path / "out"
    (out / "stages").parent.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(repairing, "make_accelerator", lambda: Stopping(30))
        with pytest.raises(StoppedError):
            forget(**world.arguments(), output=out)
    assert not (out / "forgotten.json").exists() and not (out / "model").exists()
    again = forget(**world.arguments(), output=out)
    assert again.edit == done.edit and again.model is not None and done.model is not None
    assert_equal_weights(again.model, done.model)


def test_the_first_kind_that_qualifies_ends_the_search(world: World, tmp_path: Path) -> None:
    vector = TaskVector.from_finetuned(world.base, world.joint, name="forget")
    done = forget(**world.arguments(criteria=ANYTHING, vector=vector), output=tmp_path / "out")
    assert [cost.kind for cost in done.record.tried] == ["negate"] and done.record.vector_tokens == 0
    assert done.model is not None and done.outcome != "not_reached"


def test_what_cannot_be_reached_is_said_and_not_written(world: World, tmp_path: Path) -> None:
    vector = TaskVector.from_finetuned(world.base, world.joint, name="forget")
    given = world.arguments(criteria=NOTHING, vector=vector, rounds=1, repairing=replace(LORA, epochs=1))
    done = forget(**given, output=tmp_path / "out")
    assert done.outcome == "not_reached" and not done.passed
    assert done.model is None and not (tmp_path / "out" / "model").exists()
    plain, repaired, *adjusted = done.record.tried
    assert (plain.kind, repaired.kind) == ("negate", "repair") and len(adjusted) <= 6
    # One repair was trained, however often it was adjusted.
    assert all(each.name.startswith(f"{repaired.name}, then ") for each in adjusted)
    assert {each.tokens for each in adjusted} <= {repaired.tokens}
    assert "no edit qualifies" in done.sentence and "No model was written" in done.sentence
    assert done.edit in [cost.name for cost in done.record.tried]
    anyway = forget(**given, output=tmp_path / "anyway", write_anyway=True)
    assert anyway.outcome == "not_reached" and anyway.model is not None
    assert "No model was written" not in anyway.sentence


def test_low_rank_throughout_is_one_adapter(world: World, tmp_path: Path) -> None:
    from peft import PeftModel

    given = world.arguments(edits=["repair"], training=LORA, repairing=LORA, rounds=1, write_anyway=True)
    done = forget(**given, output=tmp_path / "out")
    assert done.adapter is not None and done.model is not None and done.vector.is_low_rank
    base: Any = AutoModelForCausalLM.from_pretrained(world.joint)
    adapted = PeftModel.from_pretrained(base, str(done.adapter)).eval()
    merged: Any = AutoModelForCausalLM.from_pretrained(done.model)
    ids = torch.tensor([world.books[1].training_blocks(world.tokenizer, 32)["input_ids"][0]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-3, atol=1e-3)


def test_kept_vectors_and_learned_coefficients_are_tried(world: World, tmp_path: Path) -> None:
    vector = TaskVector.from_finetuned(world.base, world.joint, name="forget")
    kept = TaskVector.from_finetuned(world.base, world.reference, name="kept")
    given = world.arguments(edits=["project", "learned"], vector=vector, keep_vectors={"kept": kept}, rounds=1)
    done = forget(**given, output=tmp_path / "out", write_anyway=True)
    assert [cost.kind for cost in done.record.tried][:1] == ["project"]
    assert "⊥" in done.record.tried[0].name and "'without'" in done.record.tried[0].expression


def test_two_processes_find_what_one_finds(world: World, tmp_path: Path) -> None:
    for count in (1, 2):
        launch.succeed(SCRIPT, world.joint.parent, tmp_path / str(count), processes=count)
    one, two = (Forgotten.load(tmp_path / str(count)) for count in (1, 2))
    assert [cost.name for cost in one.record.tried] == [cost.name for cost in two.record.tried]
    assert (one.outcome, one.edit) == (two.outcome, two.edit)
    for name in one.vector:  # the order of summation, over 40 steps of AdamW
        torch.testing.assert_close(two.vector.dense(name), one.vector.dense(name), rtol=0.05, atol=5e-3)


# What is refused, before any long work.


@pytest.fixture
def refused(world: World, tmp_path: Path) -> Any:
    def call(error: type[TaskVectorError], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            forget(**world.arguments(**changes), output=tmp_path / "out")
        assert not (tmp_path / "out" / "stages").exists()

    return call


def test_nothing_to_keep_is_refused(refused: Any) -> None:
    refused(BadValueError, "there is no text to keep", keep=[])


def test_nothing_to_forget_is_refused(refused: Any) -> None:
    refused(BadValueError, "there is no book to forget", book=[])


def test_a_book_that_is_kept_and_forgotten_is_refused(refused: Any, world: World) -> None:
    refused(BadValueError, "a book cannot be forgotten and kept", keep=[replace(world.books[0], role="retain")])


def test_a_base_is_needed_to_make_a_vector(refused: Any) -> None:
    refused(BadValueError, "neither the book's vector nor a base", base=None)


def test_a_model_that_never_saw_the_book_is_needed(refused: Any, world: World) -> None:
    vector = TaskVector.from_finetuned(world.base, world.joint)
    refused(BadValueError, "no model is given that never saw the book", base=None, reference=None, vector=vector)
    refused(BadValueError, "the base is the model itself", base=world.joint, reference=None)
    refused(BadValueError, "the reference is the model itself", reference=world.joint)


def test_a_model_that_does_not_know_the_book_is_refused(refused: Any, world: World) -> None:
    refused(BadValueError, "does not clearly know the book", model=world.reference, reference=world.base)


def test_a_vector_of_another_architecture_is_refused(refused: Any) -> None:
    refused(TaskVectorError, "wrong", vector=TaskVector.from_tensors({"wrong": torch.ones(2)}))


def test_kinds_rounds_and_attacks_are_checked(refused: Any) -> None:
    refused(MissingNameError, "no kind of edit", edits=["erase"])
    refused(MissingNameError, "hypnosis", attacks=["hypnosis"])
    refused(BadValueError, "rounds=0", rounds=0)


def test_another_rule_than_relative_forgetting_is_refused(refused: Any) -> None:
    refused(BadValueError, "relative forgetting", criteria=Criteria(rule="margin"))


def test_a_text_shorter_than_a_block_is_refused(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Ba koden. " * 3)
    refused(BadValueError, "less than one block", keep=[load_book(tmp_path / "short.txt", held_out=0.0)])


def test_an_output_of_other_arguments_is_refused(done: Forgotten, world: World) -> None:
    before = (done.folder / "forgotten.json").read_bytes()
    with pytest.raises(OutputError, match="another config"):
        forget(**world.arguments(rounds=2), output=done.folder)
    assert (done.folder / "forgotten.json").read_bytes() == before


def test_a_damaged_record_is_told(done: Forgotten, tmp_path: Path) -> None:
    for name, content in (("cut", '{"schema"'), ("other", None)):
        folder = tmp_path / name
        folder.mkdir()
        record = json.loads((done.folder / "forgotten.json").read_text("utf-8")) | {"version": 99}
        (folder / "forgotten.json").write_text(content or json.dumps(record))
        with pytest.raises(TaskVectorError, match=r"forgotten\.json"):
            Forgotten.load(folder)
