"""Small models to try things with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_taskvec import TaskVector
from hf_taskvec.errors import OutputError
from hf_taskvec.evaluation import protocols, sweep
from hf_taskvec.experiments.playground import make_playground
from hf_taskvec.models.loading import load_for_evaluation


def test_the_command_makes_models_that_know_what_they_should(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hf_taskvec.experiments.playground", "play"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    names = ["base", "tuned", "adapter", "adapter-2", "library", "without"]
    assert done.stdout.split() == [str(Path("play") / name) for name in names]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "play").glob("*/*.safetensors")}
    made = make_playground(tmp_path / "play")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "play").glob("*/*.safetensors")} == before
    vector = TaskVector.from_finetuned(made.base, made.tuned, name="one")
    assert TaskVector.from_adapter(made.adapter).expression
    report = sweep(
        load_for_evaluation(made.library),
        vector,
        [0, -1],
        list(made.books),
        protocols.get("taskvec-v1", prompt_length=8, answer_length=8),
        tokenizer=made.tokenizer,
        reference=load_for_evaluation(made.without),
        resamples=100,
        permutations=100,
    )
    knows = report.score("one", 0).value.value
    never = next(s for s in report.reference_scores if (s.book, s.metric, s.split) == ("one", "rouge_l", "seen"))
    assert knows > 2 * never.value.value > 0
    assert report.score("one", -1).value.value < 0.5 * knows


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds something else than a playground"):
        make_playground(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
