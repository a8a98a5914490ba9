"""`taskvec audit`: the library's audit with every setting, and its findings on the screen."""

import json
from pathlib import Path

import pytest
from support.command_line import Run
from support.edited_model import Edited

from hf_taskvec.auditing import AuditReport, Relearning, audit
from hf_taskvec.evaluation import Criteria, load_book, protocols
from hf_taskvec.filenames import COMMAND_RECORD

ASKED = ["--block-words", 300, "--set", "prompt_length=20", "--set", "answer_length=6"]
BOOKS = ["--forget", "lamps.txt", "--retain", "boats.txt", *ASKED]
BUDGET = ["--passages", 6, "--samples", 2, "--learning-rate", 1e-3, "--lora-learning-rate", 2e-3, "--seed", 3]


def test_an_audit_is_the_librarys_with_every_setting(
    taskvec: Run, edited: Edited, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from hf_taskvec.cli.evaluation_options import load_model

    criteria = ["--metric", "loss", "--metric", "rouge_l", "--low", 0.5, "--high", 1.5, "--membership", 0.45]
    options = [*BUDGET, *criteria, "--retain-bound", 0.4, "--attack", "sample", "--attack", "prompt", "--epochs", 2]
    where = ["-o", tmp_path / "out", "--scale", -0.5, "--reference", "base"]
    answer = taskvec("audit", "vector", "tuned", *BOOKS, *options, *where, "--json")
    assert answer.code == 0, answer.err
    report = AuditReport.load(tmp_path / "out")
    model, tokenizer = load_model("tuned", "float32", None)
    expected = audit(
        model,
        -0.5 * edited.vector,
        [
            load_book(edited.lamps, role="forget", block_words=300, seed=3),
            load_book(edited.boats, role="retain", block_words=300, seed=3),
        ],
        protocols.get(prompt_length=20, answer_length=6),
        reference=load_model("base", "float32", None)[0],
        attacks=["sample", "prompt"],
        tokenizer=tokenizer,
        criteria=Criteria(("loss", "rouge_l"), 0.5, 1.5, 0.45, 0.4),
        passages=6,
        samples=2,
        relearning=Relearning(learning_rate=1e-3, epochs=2, seed=3),
        lora_learning_rate=2e-3,
        seed=3,
        progress=True,
    )
    shown = capsys.readouterr().err
    parts = ("before any attack", "sample", "prompt")
    assert [f"audit, part {number} of 3: {what}\n" in shown for number, what in enumerate(parts, 1)] == [True] * 3
    assert {**report.to_dict(), "seconds": {}} == {**expected.to_dict(), "seconds": {}}
    told = {"output": str(tmp_path / "out"), "scale": -0.5, "passed": report.passed, "sentence": report.sentence}
    assert answer.json == told | json.loads((tmp_path / "out" / "audit.json").read_text("utf-8"))
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"audit.md", "audit-attacks.png", COMMAND_RECORD}


def test_the_edited_model_itself_is_audited_too_and_the_screen_tells_what_came_back(
    taskvec: Run, edited: Edited, tmp_path: Path
) -> None:
    where = ["-o", tmp_path / "out", "--reference", "./base"]
    options = [*BUDGET, "--attack", "relearn", "--all-seen", "--unseen", "boats.txt", "--membership", 0.45]
    answer = taskvec("audit", "tuned", "tuned", "--forget", "lamps.txt", *ASKED, *options, *where)
    assert answer.code == 0, answer.err
    report = AuditReport.load(tmp_path / "out")
    assert report.edited == report.untouched != report.reference
    assert (report.settings.learning_rate, report.settings.lora_learning_rate) == (1e-3, 2e-3)
    assert {book.name: (book.seen, book.held_out) for book in report.books} == {"lamps": (6, 0), "boats": (0, 6)}
    lines = answer.out.splitlines()
    assert lines[0] == report.sentence
    cells = [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in lines]
    assert any(row[0] == "attack" and row[-1] == "says" for row in cells)
    for finding in report.findings:
        row = next(row for row in cells if row[0] == finding.attack)
        by = {found.metric: found.relative for found in finding.last.verdict.metrics}
        for name, cell in zip(report.criteria.judged, row[1:-1], strict=True):
            relative = by[name]
            assert cell == "–" if relative is None else float(cell.replace("−", "-")) == round(relative.value, 2)
    assert [finding.attack for finding in report.findings] == ["relearn-forget", "relearn-forget-lora"]
    assert "Not tried: relearn-aligned, relearn-unrelated" in answer.out and "audit.md" in lines[-1]


@pytest.mark.parametrize("left_out", ["--forget", "--reference", "--output"])
def test_what_an_audit_cannot_do_without_is_asked_for(taskvec: Run, left_out: str) -> None:
    needed = {"--forget": "lamps.txt", "--reference": "base", "--output": "x"}
    given = [part for name, value in needed.items() if name != left_out for part in (name, value)]
    answer = taskvec("audit", "vector", "tuned", *given)
    assert answer.code == 2 and left_out in answer.err


def test_an_audit_takes_the_scale_that_a_report_chose(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    edited.report.save(tmp_path / "report", plots=False)
    given = ["--forget", "lamps.txt", "--reference", "base", "--report", tmp_path / "report", "-o", tmp_path / "x"]
    answer = taskvec("audit", "vector", "tuned", *given, "--dry-run")
    choice = edited.report.choice
    assert choice is not None and choice.scale is None
    assert answer.code == 1 and "the report chose no λ" in answer.err and "--scale" in answer.err
    assert taskvec("audit", "vector", "tuned", *given, "--scale", -1, "--dry-run").code == 0
