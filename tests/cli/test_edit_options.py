"""`taskvec sweep` over whole edits: the library's report, by the names that were typed; and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny_models
from support.command_line import Run
from support.edited_model import Edited

from hf_taskvec import TaskVector
from hf_taskvec.evaluation import UnlearningReport, edit_grid, load_book, protocols, sweep
from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer

SMALL = ["--block-words", 300, "--set", "samples=4", "--set", "prompt_length=20", "--set", "answer_length=6"]
BOOKS = ["--forget", "lamps.txt", "--retain", "boats.txt", *SMALL]


@pytest.fixture(scope="module")
def keep(edited: Edited, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vector of the other book, from the same base."""
    base = load_for_evaluation(edited.pair.base)
    pair = tiny_models.save_pair(tmp_path_factory.mktemp("boats"), base, tiny_models.tuned_copy(base, 0.03))
    TaskVector.from_finetuned(edited.pair.base, pair.tuned, name="boats").save(pair.tuned.parent / "vector")
    return pair.tuned.parent / "vector"


def swept(edited: Edited, edits: dict[str, TaskVector]) -> UnlearningReport:
    """What the library gives for the same."""
    roles = {edited.lamps: "forget", edited.boats: "retain"}
    return sweep(
        load_for_evaluation(edited.pair.tuned),
        edits,
        None,
        [load_book(path, role=role, block_words=300) for path, role in roles.items()],
        protocols.get(samples=4, prompt_length=20, answer_length=6),
        reference={"base": load_for_evaluation(edited.pair.base)},
        tokenizer=load_tokenizer(edited.pair.tuned),
    )


def test_edits_and_a_grid_are_compared_as_by_the_library(
    taskvec: Run, edited: Edited, keep: Path, tmp_path: Path
) -> None:
    options = ["--vector", "forget=vector", "--vector", f"keep={keep}", "--reference", "base"]
    options += ["--edit", " -0.9*forget  + 0.5*keep", "--edit", "half=filter(-0.5*forget, include='*mlp*')"]
    options += ["--grid", "forget=-0.5,-1", "--grid", "keep=0,0.5"]
    answer = taskvec("sweep", "tuned", *options, *BOOKS, "-o", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    report = UnlearningReport.load(tmp_path / "out")
    forget, kept = TaskVector.load(edited.saved).named("forget"), TaskVector.load(keep).named("keep")
    wanted = {"-0.9*forget + 0.5*keep": -0.9 * forget + 0.5 * kept, "half": (-0.5 * forget).filter(include="*mlp*")}
    wanted |= edit_grid({"forget": forget, "keep": kept}, {"forget": [-0.5, -1], "keep": [0, 0.5]})
    expected = swept(edited, wanted)
    assert {edit.name for edit in report.edits} == set(wanted) and len(report.edits) == 6
    assert [(e.name, e.distance) for e in report.edits] == [(e.name, e.distance) for e in expected.edits]
    assert report.scores == expected.scores and report.choice == expected.choice
    assert report.references[0].name == "base"
    names = ["untouched", *(edit.name for edit in report.edits)]
    assert answer.json["edits"] == [{"scale": float(at), "name": name} for at, name in enumerate(names)]
    chosen, nearest = report.choice.scale, report.choice.nearest
    assert answer.json["edit"] == (None if chosen is None else names[int(chosen)])
    assert answer.json["nearest_edit"] == (None if nearest is None else names[int(nearest)])
    assert answer.json["reason"] == report.choice.reason


def test_the_screen_has_a_line_for_each_edit(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    options = ["--vector", "forget=vector", "--grid", "forget=-0.5,-1", "-o", tmp_path / "out"]
    shown = taskvec("sweep", "tuned", *options, *BOOKS)
    assert shown.code == 0, shown.err
    anew = taskvec("choose", tmp_path / "out")
    assert anew.code == 0, anew.err
    report = UnlearningReport.load(tmp_path / "out")
    for out in (shown.out, anew.out):
        lines = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
        for name in ("untouched", "-0.5*forget", "-1*forget"):
            row = next(line for line in lines if line[0] == name)
            scores = [report.score(book.name, name, split=s) for book in report.books for s in ("seen", "held_out")]
            assert row[1:] == [f"{score.value.value:.3f}" for score in scores]
        assert report.choice.reason.split(";")[0] in out and "λ" not in out


def test_low_rank_edits_are_attached(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    edited.vector.filter(include="*.mlp.*").compress(rank=2).save(tmp_path / "small")
    options = ["--edit", "-1*small", *BOOKS, "--attach", "--json"]
    done = taskvec("sweep", "tuned", "--vector", tmp_path / "small", *options, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    dense = taskvec("sweep", "tuned", "--vector", "small=vector", *options, "-o", tmp_path / "x")
    assert (
        dense.code == 1 and "the edit '-1*small': " in dense.json["error"] and "can be attached" in dense.json["error"]
    )


def test_a_dry_run_tells_the_edits_and_reads_no_model(taskvec: Run, edited: Edited, keep: Path, tmp_path: Path) -> None:
    options = ["--vector", "forget=vector", "--vector", f"keep={keep}", "--edit", "-0.9*forget + 0.5*keep"]
    plan = taskvec(
        "sweep", "tuned", *options, "--grid", "forget=-1", *BOOKS, "-o", tmp_path / "x", "--dry-run", "--json"
    )
    assert plan.code == 0, plan.err
    assert plan.json["reads"]["vector"] == edited.vector.nbytes
    assert plan.json["reads"][str(keep)] == TaskVector.load(keep).nbytes and "tuned" in plan.json["reads"]
    assert any("2 edits are compared: -0.9*forget + 0.5*keep; -1*forget" in note for note in plan.json["notes"])
    assert not (tmp_path / "x").exists()


TWO = ["tuned", "--vector", "forget=vector", "--vector", "keep=vector"]
ONE = ["tuned", "--vector", "forget=vector"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tuned"], "takes VECTOR and MODEL, and there is only tuned.*--vector and --edit"),
        (["vector", "other", "tuned"], "not 3 names"),
        (["tuned", "--edit", "-1*forget"], r"--edit '-1\*forget' has no vectors.*--vector NAME=PATH"),
        (["tuned", "--grid", "forget=-1"], "--grid 'forget=-1' has no vectors"),
        (["vector", "tuned", "--edit", "-1*forget"], "vector has none: give it as --vector NAME=vector"),
        (ONE, "--vector 'forget=vector' counts for --edit and --grid only"),
        (["vector", *ONE], "counts for --edit and --grid only"),
        ([*ONE, "--edit", "-1*forget", "--scales", "0,-1"], "--scales 0,-1 and --edit .* are two ways"),
        ([*ONE, "--edit", "-1*forgot"], r"--edit '-1\*forgot': no vector is called 'forgot'. Did you mean 'forget'"),
        ([*ONE, "--grid", "forgot=-1"], "'forgot=-1': no vector is called 'forgot'. Did you mean 'forget'"),
        ([*ONE, "--edit", "-1*retain"], "Add --vector 'retain=PATH', or use forget"),
        ([*ONE, "--edit", "-1*(forget"], "is not an expression"),
        ([*ONE, "--edit", "forget*forget"], "does not add vectors to vectors"),
        ([*ONE, "--edit", "-1*forget", "--edit", " -1*forget"], "is there twice"),
        ([*ONE, "--edit", "-1*forget", "--edit", "-forget"], r"the edits '-1\*forget' and '-forget' are the same"),
        ([*ONE, "--edit", "a=-1*forget", "--edit", "a=-2*forget"], "'a' is there twice"),
        ([*ONE, "--edit", "-0.5*forget", "--grid", "forget=-1,-0.5"], r"and '-0.5\*forget' are the same"),
        ([*TWO, "--edit", "forget + keep", "--edit", "keep + forget"], "are the same. Leave one"),
        ([*ONE, "--edit", "forget - forget"], "changes nothing"),
        ([*ONE, "--edit", "untouched=-1*forget"], "is what the report calls the model without"),
        ([*ONE, "--edit", "+".join(["forget"] * 30)], "cannot be the name of an edit"),
        ([*TWO, "--edit", "-1*forget"], "no edit uses --vector 'keep=vector'"),
        ([*ONE, "--grid", "forget"], "write it as NAME=LIST"),
        ([*ONE, "--grid", "forget="], "write it as NAME=LIST"),
        ([*ONE, "--grid", "forget=-1", "--grid", "forget=-2"], "has coefficients already"),
        ([*ONE, "--grid", "forget=much"], "'much' is no list"),
        ([*ONE, "--grid", "forget=nan"], "the coefficient nan of forget"),
        ([*ONE, "--grid", "forget=-1", "--controls"], "--controls stand beside one vector.*taskvec combine"),
        (["tuned", "--vector", "a b=vector", "--edit", "-1*a"], "cannot name a vector"),
        (["tuned", "--vector", "a=vector", "--vector", "a=vector", "--edit", "-1*a"], "two vectors are called 'a'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(
    taskvec: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    answer = taskvec("sweep", *arguments, *BOOKS, "-o", tmp_path / "x", "--dry-run")  # which loads none
    assert answer.code == 1 and len(answer.err.strip().splitlines()) == 1
    assert re.search(message, answer.err), answer.err


def test_vectors_of_two_bases_have_no_base_of_their_own(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    TaskVector.from_finetuned(edited.pair.tuned, edited.pair.base).save(tmp_path / "back")
    options = ["--vector", "forget=vector", "--vector", f"back={tmp_path / 'back'}", "--edit", "back - forget"]
    asked = ["sweep", "tuned", *options, *BOOKS, "-o", tmp_path / "x", "--dry-run"]
    assert taskvec(*asked).code == 0
    answer = taskvec(*asked, "--reference", "base")
    assert answer.code == 1 and "comes from several bases" in answer.err and "--reference MODEL" in answer.err


def test_a_report_of_edits_says_how_to_get_its_edit(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    report = edited.report_of_edits
    assert report.choice is not None

    def refused(scale: float | None) -> str:
        replace(report, choice=replace(report.choice, scale=scale)).save(tmp_path / "report", plots=False)
        asked = ["apply", edited.saved, edited.pair.base, "--report", tmp_path / "report", "-o", tmp_path / "out"]
        answer = taskvec(*asked)
        assert answer.code == 1 and not (tmp_path / "out").exists()
        assert "the report compares whole edits, not λ" in answer.err and "--scale 1" in answer.err
        return answer.err

    made = report.edits[1].expression
    assert f'the edit “all of it”, which it chose, with `taskvec combine "{made}" NAME=PATH …`' in refused(2.0)
    assert "It chose the untouched model" in refused(0.0) and "It chose none of them" in refused(None)
    label = edited.vector.expression
    asked = ["combine", made, f"{label}={edited.saved}", "-o", tmp_path / "edit", "--json"]
    assert made == f"-{label}" and taskvec(*asked).code == 0  # what it says can be done
    assert json.loads((tmp_path / "edit" / "taskvec.json").read_text())
