"""`taskvec sweep`, `eval` and `choose`: every setting of Python's, and the verdict on the screen."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import Run
from support.edited_model import Edited
from support.hub_server import HubServer

from hf_taskvec.evaluation import Criteria, UnlearningReport

SMALL = ["--block-words", 300, "--set", "samples=4", "--set", "prompt_length=20", "--set", "answer_length=6"]
BOOKS = ["--forget", "lamps.txt", "--retain", "boats.txt", *SMALL]


@pytest.fixture(scope="module")
def swept(edited: Edited, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the sweep that the commands are tested with: of two untrained models, but it has all parts."""
    folder = tmp_path_factory.mktemp("swept") / "report"
    edited.report.save(folder, plots=False)
    return folder


def test_a_sweep_has_every_criterion_of_the_library(taskvec: Run, tmp_path: Path) -> None:
    given = Criteria(("loss", "rouge_l"), 0.5, 1.5, 0.3, 0.4, True, "margin", 0.05)
    options = ["--metric", "loss", "--metric", "rouge_l", "--low", 0.5, "--high", 1.5, "--membership", 0.3]
    options += ["--retain-bound", 0.4, "--certain", "--rule", "margin", "--margin", 0.05, "--scales", "0,-1"]
    answer = taskvec("sweep", "vector", "tuned", *BOOKS, *options, "-o", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    report = UnlearningReport.load(tmp_path / "out")
    assert report.choice is not None and report.choice.criteria == given
    assert answer.json["criteria"] == {**vars(given), "metrics": ["loss", "rouge_l"]}
    plain = json.loads(report.to_json())["choice"]
    assert answer.json["verdict"] == plain["verdict"] and answer.json["never_seen"] == plain["never_seen"]
    assert (answer.json["scale"], answer.json["nearest"]) == (plain["scale"], plain["nearest"])


def test_the_vectors_own_base_is_the_reference_and_is_named_so(taskvec: Run, tmp_path: Path) -> None:
    options = ["--reference", "base", "--scales", "0,-1", "--all-seen", "--unseen", "boats.txt"]
    answer = taskvec("sweep", "vector", "tuned", "--forget", "lamps.txt", *SMALL, *options, "-o", tmp_path / "out")
    assert answer.code == 0, answer.err
    report = UnlearningReport.load(tmp_path / "out")
    assert report.choice is not None
    assert (report.choice.never_seen.source, report.choice.never_seen.name) == ("reference", "base")
    assert {book.name: (book.role, book.seen > 0, book.held_out > 0) for book in report.books} == {
        "lamps": ("forget", True, False),
        "boats": ("unseen", False, True),
    }
    heads = ["metric", "untouched", "edited", "never seen", "R", "says"]
    lines = [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in answer.out.splitlines()]
    assert heads in lines and lines[0] == ["Rouge-L"] and lines[1] == ["book", "λ=0", "λ=-1", "base"]
    verdict = report.choice.verdict
    assert verdict is not None
    for found in verdict.metrics:
        row = next(line for line in lines if line[0] == found.metric)
        assert row[1:4] == [f"{value:.3f}" for value in (found.before, found.after.value, found.never)]
    assert any(line[0] == "membership AUC" for line in lines)
    assert report.choice.reason.split(";")[0] in answer.out


@pytest.mark.slow  # lm-eval reads all of its tasks
def test_lm_evals_tasks_are_asked_beside_the_books(taskvec: Run, hub: HubServer, tmp_path: Path) -> None:
    """`sciq`, one of lm-eval's own, whose data set is on the loopback Hub."""
    rows = [
        {
            "support": f"Sentence number {i} tells of the lamps.",
            "question": f"What does sentence number {i} tell of?",
            "correct_answer": "the lamps",
            **{f"distractor{k}": f"room {i + k}" for k in (1, 2, 3)},
        }
        for i in range(9)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    hub.add_repo(
        "allenai/sciq", {f"{split}.jsonl": content for split in ("train", "validation", "test")}, repo_type="dataset"
    )
    asked = ["--scales", "0,-1", "--utility", "sciq", "--utility-limit", 5]
    answer = taskvec("sweep", "vector", "tuned", *BOOKS, *asked, "-o", tmp_path / "out")
    assert answer.code == 0, answer.err
    found = {(each.metric, each.scale): each for each in UnlearningReport.load(tmp_path / "out").utility}
    assert set(found) == {(f"sciq/{name}", scale) for name in ("acc", "acc_norm") for scale in (0.0, -1.0)}
    assert all(each.n == 5 and each.value.value * 5 in range(6) for each in found.values())
    planned = taskvec("sweep", "vector", "tuned", *BOOKS, *asked, "-o", tmp_path / "new", "--dry-run")
    assert planned.code == 0 and "lm-eval asks sciq at each of them" in planned.out


def test_a_reference_is_named_by_its_folder_and_measured_by_eval_too(taskvec: Run, tmp_path: Path) -> None:
    answer = taskvec("eval", "tuned", *BOOKS, "--reference", "./base", "-o", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    assert {each["reference"] for each in answer.json["rouge_l_of_references"]} == {"base"}
    assert "scale" not in answer.json and "reason" not in answer.json  # there is no λ to choose
    shown = taskvec("eval", "tuned", *BOOKS, "-o", tmp_path / "out").out
    assert "λ=0" in shown and "no λ" not in shown


def test_the_word_base_asks_for_the_address_where_the_record_has_none(
    taskvec: Run, edited: Edited, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(edited.saved, "vector")
    arguments = ["sweep", "vector", edited.pair.tuned, "--forget", edited.lamps, "--reference", "base", "-o", "x"]
    lost = taskvec(*arguments, "--dry-run")
    assert lost.code == 1 and "does not tell where that lies" in lost.err and "--reference FOLDER" in lost.err
    shutil.copytree(edited.pair.tuned, "base")  # of that name, but another model
    assert "these weights here" in taskvec(*arguments, "--dry-run").err
    shutil.rmtree("base")
    shutil.copytree(edited.pair.base, "base")
    assert taskvec(*arguments, "--dry-run").code == 0


def test_choosing_anew_is_the_librarys_rechoose(taskvec: Run, swept: Path, tmp_path: Path) -> None:
    before = (swept / "report.json").read_bytes()
    options = ["--metric", "rouge_l", "--rule", "margin", "--margin", 1, "--retain-bound", 1]
    answer = taskvec("choose", swept, *options, "-o", tmp_path / "new", "--json")
    assert answer.code == 0, answer.err
    wanted = Criteria(metrics=("rouge_l",), rule="margin", margin=1.0, retain_bound=1.0)
    expected = UnlearningReport.load(swept).rechoose(wanted)
    assert UnlearningReport.load(tmp_path / "new") == expected
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {"report.json", "report.md", "scores.png"}
    assert answer.json["reason"] == expected.choice.reason
    assert (swept / "report.json").read_bytes() == before
    shown = taskvec("choose", swept / "report.json")  # no output: nothing but the answer
    assert shown.code == 0 and "hardly knew the book" in shown.out and "report.json" not in shown.out


def test_choosing_anew_refuses_what_it_cannot_judge(taskvec: Run, swept: Path, tmp_path: Path) -> None:
    same = taskvec("choose", swept, "-o", swept)
    assert same.code == 1 and "Name another --output" in same.err
    report = UnlearningReport.load(swept)
    replace(report, passages=()).save(tmp_path / "published", plots=False)
    refused = taskvec("choose", tmp_path / "published", "-o", tmp_path / "x")
    assert refused.code == 1 and "this report has no passages, as those on the Hub" in refused.err
    assert not (tmp_path / "x").exists()
    unknown = taskvec("choose", swept, "--metric", "exact_memorization")
    assert unknown.code == 1 and "Did you mean 'exact_memorisation'" in unknown.err


def test_a_base_on_the_hub_is_found_by_its_id(
    hub: HubServer, taskvec: Run, edited: Edited, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add_repo("me/base", edited.pair.base)
    assert taskvec("extract", "me/base", edited.pair.tuned, "-o", tmp_path / "vector").code == 0
    arguments = [tmp_path / "vector", "tuned", "--forget", "lamps.txt", *SMALL, "-o", tmp_path / "x"]
    plan = taskvec("sweep", *arguments, "--reference", "base", "--dry-run", "--json")
    assert plan.code == 0, plan.err
    assert any(name.startswith("me/base@") for name in plan.json["reads"])


def test_a_number_of_an_edit_is_not_taken_for_a_scale(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    edited.report_of_edits.save(tmp_path / "report", plots=False)
    answer = taskvec("apply", edited.saved, edited.pair.base, "--report", tmp_path / "report", "-o", tmp_path / "out")
    assert answer.code == 1 and "compares whole edits" in answer.err and "--scale 1" in answer.err
    assert not (tmp_path / "out").exists()
