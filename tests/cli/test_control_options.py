"""`taskvec sweep --controls`: the library's controls at the λ that is judged, in the answer and in the report."""

import json
import re
from pathlib import Path

import pytest
import torch
from support import tiny_models
from support.command_line import Run
from support.edited_model import Edited
from support.tiny_books import tiny_llama

from hf_taskvec import TaskVector
from hf_taskvec.evaluation import UnlearningReport, load_book, protocols, run_controls
from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer

SMALL = ["--block-words", 300, "--set", "samples=4", "--set", "prompt_length=20", "--set", "answer_length=6"]
SWEEP = ["sweep", "vector", "tuned", "--forget", "lamps.txt", "--retain", "boats.txt", *SMALL, "--scales", "0,-1"]


@pytest.fixture(scope="module")
def boats(edited: Edited, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vector of the other book, from the same base."""
    base = load_for_evaluation(edited.pair.base)
    pair = tiny_models.save_pair(tmp_path_factory.mktemp("boats"), base, tiny_models.tuned_copy(base, 0.03))
    TaskVector.from_finetuned(edited.pair.base, pair.tuned, name="boats").save(pair.tuned.parent / "vector")
    return pair.tuned.parent / "vector"


def test_the_controls_are_those_of_the_library_at_the_judged_scale(
    taskvec: Run, edited: Edited, boats: Path, tmp_path: Path
) -> None:
    asked = [*SWEEP, "--reference", "base", "--controls", "--control-vector", f"boats={boats}", "-o", tmp_path / "out"]
    answer = taskvec(*asked, "--json")
    assert answer.code == 0, answer.err
    report = UnlearningReport.load(tmp_path / "out")
    assert report.controls is not None and report.choice is not None and report.choice.judged == -1
    roles = {edited.lamps: "forget", edited.boats: "retain"}
    books = [load_book(path, role=role, block_words=300) for path, role in roles.items()]
    expected = run_controls(
        load_for_evaluation(edited.pair.tuned),
        edited.vector,
        -1.0,
        books,
        protocols.get(samples=4, prompt_length=20, answer_length=6),
        others={"boats": TaskVector.load(boats)},
        reference={"base": load_for_evaluation(edited.pair.base)},
        tokenizer=load_tokenizer(edited.pair.tuned),
    )
    kinds = ["untouched", "vector", "other_vector", "noise", "output_noise", "reference"]
    assert [row.kind for row in report.controls.rows] == kinds
    assert report.controls == expected
    assert answer.json["controls"] == json.loads(json.dumps(expected.to_dict()))
    page = (tmp_path / "out" / "report.md").read_text()
    assert "## Controls" in page and "the vector of boats" in page
    assert (tmp_path / "out" / "scores.png").is_file()  # which the sweep has drawn

    kept = sorted((tmp_path / "out" / "store").iterdir())
    shown = taskvec(*asked)  # again, for people
    assert sorted((tmp_path / "out" / "store").iterdir()) == kept  # nothing was asked twice
    assert expected.sentence in shown.out
    lines = [[cell.strip() for cell in line.split("│")] for line in shown.out.splitlines()]
    for book in ("lamps (forget)", "boats (retain)"):
        start = lines.index([f"What each change takes of {book}, λ=-1"])
        rows = {line[0]: line[1:] for line in lines[start + 3 : start + 8]}
        assert list(rows) == [row.name for row in expected.rows if row.kind != "untouched"]
        for change, cells in rows.items():
            for metric, cell in zip(expected.metrics, cells, strict=True):
                lost = expected.score(change, book.split()[0], metric.name).lost
                assert cell == "–" if lost is None else cell.startswith(f"{100 * lost.value:.0f}".replace("-", "−"))


def test_low_rank_vectors_are_attached_for_their_controls_too(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    edited.vector.filter(include="*.mlp.*").compress(rank=2).save(tmp_path / "small")
    arguments = ["sweep", tmp_path / "small", *SWEEP[2:], "--controls", "--attach", "-o", tmp_path / "out"]
    answer = taskvec(*arguments, "--json")
    assert answer.code == 0, answer.err
    assert [row["kind"] for row in answer.json["controls"]["rows"]] == ["untouched", "vector", "noise", "output_noise"]
    refused = taskvec(*arguments[:-1], tmp_path / "x", "--control-vector", "boats=vector")
    assert refused.code == 1 and "the vector of boats: " in refused.err and "can be attached" in refused.err
    assert not (tmp_path / "x").exists()


def test_a_sweep_without_controls_says_that_there_are_none(taskvec: Run, tmp_path: Path) -> None:
    answer = taskvec(*SWEEP, "-o", tmp_path / "out", "--json")
    assert answer.code == 0 and answer.json["controls"] is None
    assert UnlearningReport.load(tmp_path / "out").controls is None


def test_a_dry_run_tells_what_controls_read_and_cost(taskvec: Run, boats: Path, tmp_path: Path) -> None:
    arguments = [
        *SWEEP,
        "--controls",
        "--control-vector",
        f"boats={boats}",
        "-o",
        tmp_path / "x",
        "--dry-run",
        "--json",
    ]
    plan = taskvec(*arguments).json
    assert plan["reads"][str(boats)] == TaskVector.load(boats).nbytes and "vector" in plan["reads"]
    assert any("asked 3 more times" in note for note in plan["notes"])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--control-vector", "boats=vector"], "counts for --controls only"),
        (["--controls", "--control-vector", "boats"], "write it as BOOK=PATH"),
        (["--controls", "--control-vector", "boats="], "write it as BOOK=PATH"),
        (["--controls", "--control-vector", "boats=vector", "--control-vector", "boats=vector"], "has one already"),
        (["--controls", "--control-vector", "boat=vector"], "--control-vector boat=… is of no book .*'boats'"),
        (["--controls", "--control-vector", "lamps=vector"], "--control-vector lamps=… is of no book"),
        (["--controls", "--control-vector", "boats=nowhere"], "neither a folder here nor a repository"),
        (["--controls", "--scales", "0"], "no λ but 0"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    taskvec: Run, tmp_path: Path, options: list[str], message: str
) -> None:
    answer = taskvec(*SWEEP, *options, "-o", tmp_path / "x", "--dry-run")  # which loads none
    assert answer.code == 1 and len(answer.err.strip().splitlines()) == 1
    assert re.search(message, answer.err), answer.err


def test_controls_need_a_book_to_forget(taskvec: Run, tmp_path: Path) -> None:
    answer = taskvec("sweep", "vector", "tuned", "--retain", "boats.txt", "--controls", "-o", tmp_path / "x")
    assert answer.code == 1 and "no book is to be forgotten" in answer.err and "--forget BOOK" in answer.err


def test_a_vector_of_another_base_is_refused(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    torch.manual_seed(5)
    base = tiny_llama(context=256)
    with torch.no_grad():
        base.model.norm.weight.add_(0.5)
    pair = tiny_models.save_pair(tmp_path, base, tiny_models.tuned_copy(base, 0.02))
    TaskVector.from_finetuned(pair.base, pair.tuned).save(tmp_path / "other")
    asked = [*SWEEP, "--controls", "-o", tmp_path / "x", "--control-vector"]
    other = taskvec(*asked, f"boats={tmp_path / 'other'}")
    assert other.code == 1 and "the vector of boats was taken from another base (base [" in other.err
    assert "Extract it from the same base" in other.err
    TaskVector.from_tensors({"model.norm.weight": torch.ones(3)}).save(tmp_path / "short")  # its base is not known
    short = taskvec(*asked, f"boats={tmp_path / 'short'}")
    assert short.code == 1 and "the vector of boats: model.norm.weight: the model has shape" in short.err
    assert not (tmp_path / "x").exists()


def test_a_sweep_that_judges_no_scale_has_no_controls_and_says_so(taskvec: Run, tmp_path: Path) -> None:
    answer = taskvec(*SWEEP, "--all-seen", "--controls", "-o", tmp_path / "out", "--json")  # and no reference
    assert answer.code == 1 and "no λ but 0 was judged" in answer.json["error"]
    assert "nothing tells what never having seen the book" in answer.json["error"]
    assert "The report without controls is in out" in answer.json["error"]
    report = UnlearningReport.load(tmp_path / "out")
    assert report.controls is None and report.choice is not None and report.choice.judged is None
