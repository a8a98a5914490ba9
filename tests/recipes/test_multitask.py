"""`accelerate launch recipes/multitask.py`, shrunk: the whole experiment, what it leaves, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from support import launch
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.experiments.config_options import parse_config, read_config
from hf_taskvec.experiments.multitask.multitask_config import MultitaskConfig
from hf_taskvec.experiments.multitask.results import MultitaskResults
from hf_taskvec.experiments.multitask.round_trace import pairs
from hf_taskvec.experiments.multitask.task_trainer import TaskTrainer
from hf_taskvec.experiments.multitask.token_accuracy import held_out, token_accuracy
from hf_taskvec.experiments.synthetic_library.book_writer import write_library

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs" / "multitask"
SMALL = {
    "tasks": 3,
    "words": 900,
    "section-words": 100,
    "held-out": 0.3,
    "general-words": 1500,
    "pretrain-epochs": 2,
    "hidden-size": 32,
    "layers": 1,
    "vocabulary": 700,
    "block-length": 48,
    "block-stride": 24,
    "learning-rate": 4e-3,
    "lora-rank": 4,
    "steps-per-round": 10,
    "evaluations": 5,
}


def flags(output: Path, *more: str, **changes: Any) -> list[str]:
    settings = SMALL | {name.replace("_", "-"): value for name, value in changes.items()}
    given = [part for name, value in settings.items() if value is not None for part in (f"--{name}", str(value))]
    return [*given, "--output", str(output), "--cache", str(output.parent / "cache"), *more]


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], MultitaskResults]:
    spec = importlib.util.spec_from_file_location("multitask", ROOT / "recipes" / "multitask.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("multitask")


@pytest.fixture(scope="module")
def results(main: Callable[[list[str]], MultitaskResults], folder: Path) -> MultitaskResults:
    return main(flags(folder / "out", "--rounds", "4", "1"))


def test_more_rounds_bring_the_merged_model_to_the_tasks_own(results: MultitaskResults) -> None:
    once, often = results.outcomes
    assert (once.rounds, once.steps_per_round, often.rounds, often.steps_per_round) == (1, 40, 4, 10)
    assert often.gap(often.merged[0]) < 0.5 * once.gap(once.merged[0])
    assert often.task_cosine > once.task_cosine and often.task_cosine > 0.9
    # The updates of a round differ while the vectors become alike. (This small model still learns how to write at all,
    # which all tasks share: their cosines are near 0 for a base that can.)
    updates, vectors = (
        [fmean(pairs(matrix)) for matrix in matrices]
        for matrices in zip(*((each.update_cosines, each.task_cosines) for each in often.trace.rounds), strict=True)
    )
    assert updates[-1] < updates[0] and all(d < t for d, t in zip(updates[1:], vectors[1:], strict=True))
    assert vectors == sorted(vectors)
    assert fmean(once.single) > fmean(results.base)


def test_report_plots_and_results_are_written(results: MultitaskResults, folder: Path) -> None:
    out = folder / "out"
    report = (out / "report.md").read_text("utf-8")
    assert results.table() in report and "cos(" not in report
    for name in ("gap", "cosines", "rounds", "tasks"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG") and f"({name}.png)" in report
    stored = json.loads((out / "results.json").read_text("utf-8"))
    assert stored["outcomes"][1]["merged"][0]["scores"] == list(results.outcomes[1].merged[0].scores)
    # λ was searched where a rule has one, on other text than is reported.
    mean, total, ties = results.outcomes[0].merged
    assert (mean.rule, mean.scale, mean.tried) == ("mean", 1.0, ())
    assert [scale for scale, _ in total.tried] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [scale for scale, _ in ties.tried] == pytest.approx([0.8, 1.05, 1.3, 1.55, 1.8])
    assert total.scale in dict(total.tried) and dict(total.tried)[total.scale] == max(dict(total.tried).values())
    assert str(ROOT) not in report and str(folder) not in report + json.dumps(stored)


def test_the_saved_model_is_the_merged_one(results: MultitaskResults, folder: Path) -> None:
    out = folder / "out"
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
    base = next((folder / "cache").glob("base-*"))
    vector = TaskVector.load(out / "vector")
    assert vector.expression.count("0.333") == 3
    other = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with vector.applied_to(other):
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, other.state_dict()[name]), name


def test_a_finished_run_is_not_repeated(
    main: Callable[[list[str]], MultitaskResults],
    results: MultitaskResults,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> list[float]:
        raise AssertionError("trained again")

    monkeypatch.setattr(TaskTrainer, "train", refuse)
    assert main(flags(folder / "out", "--rounds", "4", "1")) == results
    with pytest.raises(TaskVectorError, match="results of another config"):
        main(flags(folder / "out", "--rounds", "4", "1", seed=1))


def test_force_begins_anew(
    main: Callable[[list[str]], MultitaskResults], results: MultitaskResults, folder: Path
) -> None:
    """With other settings, and with the same ones."""
    shutil.copytree(folder / "out", folder / "again")
    other = main(flags(folder / "again", "--rounds", "1", "--force", "true", seed=1))
    assert other.outcomes != results.outcomes[:1]
    assert main(flags(folder / "again", "--rounds", "4", "1", "--force", "true")) == results


def test_rounds_that_do_not_fit_into_memory_are_refused(
    main: Callable[[list[str]], MultitaskResults], tmp_path: Path
) -> None:
    with pytest.raises(TaskVectorError, match="too little memory"):
        main(flags(tmp_path / "large", "--rounds", "1", batch_size=100_000_000))
    assert not (tmp_path / "large" / "stages").exists()


def test_atm_with_lora_runs_and_keeps_factors(main: Callable[[list[str]], MultitaskResults], folder: Path) -> None:
    """ATM is the same loop with another merge; LoRA the same with factors."""
    options = [
        "--rounds",
        "2",
        "--merge",
        "sum",
        "--merge-scale",
        "0.4",
        "--final",
        "mean",
        "tsv",
        "--search",
        "bounded",
    ]
    pytest.importorskip("scipy")
    found = main(flags(folder / "lora", *options, method="lora", lora_learning_rate=1e-2))
    (outcome,) = found.outcomes
    assert [merged.rule for merged in outcome.merged] == ["mean", "tsv"]
    assert all(each.discarded > 0 for each in outcome.trace.rounds)
    assert TaskVector.load(folder / "lora" / "vector").is_low_rank


def test_own_books_are_the_tasks(
    main: Callable[[list[str]], MultitaskResults], results: MultitaskResults, folder: Path
) -> None:
    texts = write_library(3, words=900, general_words=300, unrelated=2)
    for book in texts.unrelated:
        (folder / f"{book.name}.txt").write_text(book.text)
    books = [str(folder / f"{book.name}.txt") for book in texts.unrelated]
    base = str(next((folder / "cache").glob("base-*")))
    found = main(flags(folder / "own", "--rounds", "1", "--base-model", base, "--books", *books, tasks=None))
    assert found.tasks == tuple(book.name for book in texts.unrelated)
    with pytest.raises(TaskVectorError, match="no book at"):
        main(flags(folder / "none", "--base-model", base, "--books", books[0], str(folder / "no.txt"), tasks=None))
    assert not (folder / "none").exists()


def launch_in_folders(folders: Path, *arguments: str) -> None:
    launch.succeed(launch.SUPPORT / "launched_multitask.py", folders, *arguments, processes=2)


def test_two_processes_with_a_book_each_agree_with_one(
    main: Callable[[list[str]], MultitaskResults], results: MultitaskResults, folder: Path
) -> None:
    """The same results as one process with both; what is wrong with one process's book, both refuse."""
    base = str(next((folder / "cache").glob("base-*")))
    texts = [book.text for book in write_library(3, words=900, general_words=300, unrelated=2).unrelated]
    folders = folder / "ranks"
    for rank, text in enumerate(texts):
        (folders / f"rank-{rank}").mkdir(parents=True)
        (folders / f"rank-{rank}" / f"book{rank}.txt").write_text(text)
        (folders / f"rank-{rank}" / f"same{rank}.txt").write_text(texts[0])
        (folders / f"rank-{rank}" / f"short{rank}.txt").write_text(text if rank == 0 else text[:400])
    shared = ["--rounds", "2", "--base-model", base]

    def split(name: str) -> list[str]:
        return flags(folder / "two", *shared, "--books", f"{name}0.txt", f"{name}1.txt", tasks=None)

    launch_in_folders(folders, *split("book"))
    assert not list(folders.glob("refused-*"))
    books = [str(folders / f"rank-{rank}" / f"book{rank}.txt") for rank in (0, 1)]
    one = main(flags(folder / "one", *shared, "--books", *books, tasks=None))
    assert (folder / "two" / "results.json").read_text() == one.to_json()
    for name, message in (("same", "same0 and same1 are the same text, or mostly"), ("short", "short1")):
        launch_in_folders(folders, *split(name))
        refusals = [(folders / f"refused-{rank}.txt").read_text() for rank in (0, 1)]
        assert all(message in text for text in refusals), refusals


# Settings.


def config(*arguments: str) -> MultitaskConfig:
    return parse_config(
        MultitaskConfig, list(arguments), description="", configs=CONFIGS, default="default", unless=["base_model"]
    )


def test_every_setting_is_explained_and_every_config_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config("--help")
    shown = capsys.readouterr().out
    for field in dataclasses.fields(MultitaskConfig):
        assert f"--{field.name.replace('_', '-')}" in shown and len(field.metadata["help"]) > 10
    for path in CONFIGS.glob("*.yaml"):
        MultitaskConfig(**read_config(MultitaskConfig, path.stem, CONFIGS))
    assert config().steps == max(config().rounds) * config().steps_per_round


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "1"], "2 to 7"),
        (["--rounds", "3", "8"], "cannot be divided into 3 equal rounds"),
        (["--rounds", "0"], "at least 1"),
        (["--steps-per-round", "0"], "steps_per_round=0"),
        (["--merge", "maen"], "Did you mean 'mean'"),
        (["--final", "ties", "tsw"], "Did you mean 'tsv'"),
        (["--density", "1.5"], "above 0 and at most 1"),
        (["--merge-scale", "0"], "other than 0"),
        (["--evaluations", "1"], "at least 2"),
        (["--final", "interpolate"], "between two vectors"),
        (["--words", "-5"], "words=-5 must be at least 200"),
        (["--hidden-size", "0"], "hidden_size=0 must be at least 4"),
        (["--books", "one.txt"], "brings its own books"),
        (["--rule-options", "gamma"], "not of the form name=value"),
        (["--rule-options", "densty=0.5"], r"no rule of this run has an option 'densty'. Did you mean 'density'\?"),
        (["--rule-options", "tise.density=0.5"], r"'tise' is no rule of this run. Did you mean 'ties'\?"),
        (["--rule-options", "ties.density=2"], "above 0 and at most 1"),
        (["--final", "layers"], "needs schedule="),
        (["--base-model", "gpt2", "--books", "one.txt"], "at least two books"),
    ],
)
def test_bad_settings_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(TaskVectorError, match=message):
        config(*arguments)


def test_every_rule_gets_the_options_that_it_has() -> None:
    given = "schedule=[0.5, 1]", "density=0.4", "ties.density=0.3", "normalize=weight", "gamma=0.02", "rank=3"
    found = config("--merge", "layers", "--final", "ties", "breadcrumbs", "dare", "tsv", "--rule-options", *given)
    assert found.ends_round.options == {"schedule": [0.5, 1]}
    assert found.options("ties") == {"density": 0.3, "normalize": "weight"}
    assert found.options("breadcrumbs") == {"density": 0.4, "gamma": 0.02}
    assert found.options("tsv") == {"rank": 3}
    assert found.options("dare") == {"density": 0.4, "seed": 0}
    assert config("--seed", "5").options("dare") == {"density": 0.2, "seed": 5}
    assert config().options("mean") == {}


# Scores.


def test_accuracy_counts_each_held_out_token_once(results: MultitaskResults, folder: Path) -> None:
    from transformers import AutoTokenizer

    from hf_taskvec.experiments.book_reading import make_book

    base = next((folder / "cache").glob("base-*"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    text = write_library(0, words=900, general_words=300, unrelated=1).unrelated[0].text
    book = make_book(text, "book", "retain", MultitaskConfig(section_words=100, held_out=0.3))
    held = held_out(book, tokenizer, 48)
    sections = [text_of for s in book.sections if s.split == "held_out" for text_of in [book.text[s.start : s.end]]]
    right = total = 0
    for section in sections[1::2]:
        ids = torch.tensor(tokenizer(section.strip())["input_ids"])
        for block in ids.split(48):
            if len(block) > 1:
                guess = model(input_ids=block[None]).logits[0, :-1].argmax(-1)
                right, total = right + int((guess == block[1:]).sum()), total + len(block) - 1
    assert token_accuracy(model, held.test) == right / total
    with pytest.raises(TaskVectorError, match="needs two"):
        held_out(make_book(text, "book", "retain", MultitaskConfig(section_words=400, held_out=0.3)), tokenizer, 48)
