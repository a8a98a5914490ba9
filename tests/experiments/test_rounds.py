"""Rounds of fine-tuning and merging: what they compute, that they resume, and that processes agree."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import launch
from support.launched_rounds import FULL, LORA, MERGES, NAMES, make_task_blocks, make_tasks
from support.tiny_models import TinyModels, tensors
from transformers import AutoConfig

from hf_taskvec import TaskVector, TaskVectorError, combine
from hf_taskvec.errors import BadValueError, CorruptFileError, MissingNameError, OutputError
from hf_taskvec.experiments.multitask import Merge, Task, Trace, run_rounds
from hf_taskvec.experiments.multitask.rounds import STATE, TRACE, check_rounds_memory
from hf_taskvec.experiments.multitask.task_trainer import TaskTrainer
from hf_taskvec.merging import search_scale
from hf_taskvec.merging.combining import combine_parameter
from hf_taskvec.training import TrainingSettings, estimate_memory


@pytest.fixture(scope="session")
def base(models: TinyModels) -> Path:
    return models.pair("phi").base


def run(base: Path, folder: Path, settings: TrainingSettings = FULL, rounds: int = 3, **options: Any) -> Trace:
    return run_rounds(base, make_tasks(), settings, folder, rounds=rounds, steps_per_round=2, **options)


def task_vectors(folder: Path) -> list[TaskVector]:
    return [TaskVector.load(folder / "tasks" / name) for name in NAMES]


def shared_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / STATE)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# What is computed.


@pytest.mark.parametrize("rounds", [1, 3])
def test_mima_ends_at_the_average_of_the_task_models(rounds: int, base: Path, tmp_path: Path) -> None:
    """Eq. (4) of the MIMA paper, after any number of rounds."""
    run(base, tmp_path / "out", rounds=rounds)
    mean = combine(task_vectors(tmp_path / "out"), "mean")
    start = tensors(base)
    for name, weight in shared_weights(tmp_path / "out").items():
        expected = start[name].read().double() + mean.dense(name, "float64")
        assert torch.allclose(weight.double(), expected, atol=1e-7), name


def test_atm_adds_up_the_updates_of_a_round(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path / "out", rounds=1, merge=MERGES["atm"])
    total = 0.4 * combine(task_vectors(tmp_path / "out"), "sum")
    start = tensors(base)
    for name, weight in shared_weights(tmp_path / "out").items():
        assert torch.allclose(weight.double(), start[name].read().double() + total.dense(name, "float64"), atol=1e-7)


def test_one_round_is_plain_fine_tuning(base: Path, tmp_path: Path) -> None:
    """Each task's vector is what it would be without the others."""
    run(base, tmp_path / "three", rounds=1)
    others = [Task("x", make_task_blocks(7)), Task("b", make_task_blocks(1))]
    run_rounds(base, others, FULL, tmp_path / "two", rounds=1, steps_per_round=2)
    first, second = (TaskVector.load(tmp_path / name / "tasks" / "b") for name in ("three", "two"))
    assert set(first) == set(second)
    assert all(torch.equal(first.dense(name), second.dense(name)) for name in first)


@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
def test_the_trace_has_the_vectors_cosines_and_norms(settings: TrainingSettings, base: Path, tmp_path: Path) -> None:
    trace = run(base, tmp_path / "out", settings)
    assert [(each.round, each.steps) for each in trace.rounds] == [(1, 2), (2, 4), (3, 6)]
    assert trace.rounds[0].task_cosines == trace.rounds[0].update_cosines  # δ = τ in the first round
    last, vectors = trace.rounds[-1], task_vectors(tmp_path / "out")
    for i, j in combinations(range(3), 2):
        assert last.task_cosines[i][j] == pytest.approx(vectors[i].cosine(vectors[j]), abs=1e-4)
        assert last.task_cosines[j][i] == last.task_cosines[i][j]
    assert last.task_norms == pytest.approx([vector.norm() for vector in vectors], rel=1e-4)
    assert last.task_cosines[0][1] > trace.rounds[0].task_cosines[0][1]
    assert Trace.from_json((tmp_path / "out" / TRACE).read_text()) == trace


def test_lora_stays_low_rank_and_tells_what_was_discarded(base: Path, tmp_path: Path) -> None:
    trace = run(base, tmp_path / "out", LORA)
    for vector in task_vectors(tmp_path / "out"):
        assert vector.is_low_rank and {vector.rank(name) for name in vector} == {4}
    assert all(0 < each.discarded < 0.5 for each in trace.rounds)  # twelve directions do not fit into four
    wide = run(base, tmp_path / "wide", replace(LORA, rank=16))  # as wide as the model
    assert all(each.discarded < 1e-9 for each in wide.rounds)


def test_lora_goes_on_from_the_average(base: Path, tmp_path: Path) -> None:
    """If the rank holds all directions nothing is lost: the shared factors multiply to the average of the tasks'."""
    run(base, tmp_path / "out", replace(LORA, rank=16), rounds=1)
    mean = combine(task_vectors(tmp_path / "out"), "mean")
    weights = shared_weights(tmp_path / "out")
    for name in mean:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (weights[f"{prefix}.lora_{side}.default.weight"] for side in "AB")
        assert torch.allclose(2.0 * b @ a, mean.dense(name), atol=1e-6), name  # alpha / rank is 2


@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "merge", [Merge("layers", 1.0, {"schedule": [0.0, 1.0]}), Merge("rows", 0.5, {"fraction": 0.25})]
)
def test_rules_see_what_they_would_see_of_whole_vectors(
    merge: Merge, settings: TrainingSettings, models: TinyModels, tmp_path: Path
) -> None:
    """How many layers there are, and which matrices are an MLP's, though a round merges one parameter at a time."""
    base = models.pair("phi", num_hidden_layers=3).base
    run(base, tmp_path / "out", replace(settings, rank=16), rounds=1, merge=merge)
    expected = merge.scale * combine(task_vectors(tmp_path / "out"), merge.rule, **merge.options)
    weights, start = shared_weights(tmp_path / "out"), tensors(base)
    names = [name for name in start if ".layers." in name and name.endswith("fc1.weight")]
    assert len(names) == 3
    for name in names:
        if settings is FULL:
            found = weights[name].double() - start[name].read().double()
        else:
            a, b = (
                weights[f"base_model.model.{name.removesuffix('weight')}lora_{side}.default.weight"] for side in "AB"
            )
            found = 2.0 * b.double() @ a.double()
        wanted = expected.dense(name, "float64") if name in expected else torch.zeros_like(found)
        assert torch.allclose(found, wanted, atol=1e-6), name
    assert 0 < expected.norm(names[1]) < combine(task_vectors(tmp_path / "out")).norm(names[1])


def test_random_rules_draw_anew_in_each_round(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def record(*given: Any, seed: int, **options: Any) -> Any:
        seeds.append(seed)
        return combine_parameter(*given, seed=seed, **options)

    monkeypatch.setattr("hf_taskvec.experiments.multitask.rounds.combine_parameter", record)
    merge = Merge("dare", 1.0, {"density": 0.5})
    run(base, tmp_path / "one", rounds=2, merge=merge)
    assert len(set(seeds)) == 2
    run(base, tmp_path / "again", rounds=2, merge=merge)
    assert len(set(seeds)) == 2
    run(base, tmp_path / "other", replace(FULL, seed=1), rounds=2, merge=merge)
    assert len(set(seeds)) == 4
    run(base, tmp_path / "third", rounds=1, merge=replace(merge, options={"seed": 1}))
    assert len(set(seeds)) == 5


def test_the_weights_of_all_own_tasks_count_as_memory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.from_pretrained(base)
    training = estimate_memory(config, FULL, 16)
    for tasks in (2, 50):
        free = training.total + (1 + tasks) * training.gradients
        monkeypatch.setattr("hf_taskvec.training.memory_estimate.free_memory", lambda _, free=free: free)
        check_rounds_memory(config, FULL, 16, tasks)
        with pytest.raises(TaskVectorError, match="too little memory"):
            check_rounds_memory(config, FULL, 16, tasks + 1)


# Resuming.


class StoppedError(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    train, left = TaskTrainer.train, [calls]

    def limited(self: TaskTrainer, *arguments: Any) -> list[float]:
        left[0] -= 1
        if left[0] < 0:
            raise StoppedError
        return train(self, *arguments)

    monkeypatch.setattr(TaskTrainer, "train", limited)


@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
def test_an_interrupted_run_continues_after_its_last_round(
    settings: TrainingSettings, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(base, tmp_path / "whole", settings)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)  # within the second round
        with pytest.raises(StoppedError):
            run(base, tmp_path / "stopped", settings)
    assert len(Trace.from_json((tmp_path / "stopped" / TRACE).read_text()).rounds) == 1
    with monkeypatch.context() as patch:
        stop_after(patch, 6)  # two more rounds of three tasks
        assert run(base, tmp_path / "stopped", settings) == whole
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 0)  # a finished run is not repeated
        assert run(base, tmp_path / "whole", settings) == whole


def test_a_run_that_was_stopped_between_its_files_is_made_whole(base: Path, tmp_path: Path) -> None:
    trace = run(base, tmp_path / "out", rounds=2)
    before = files(tmp_path / "out")
    Trace(trace.tasks, trace.rounds[:1]).save(tmp_path / "out" / TRACE)
    assert run(base, tmp_path / "out", rounds=2) == trace
    assert files(tmp_path / "out") == before


def test_what_a_killed_run_was_about_to_write_is_replaced(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path / "whole", rounds=1)
    (tmp_path / "killed").mkdir()
    for name in (STATE, TRACE):
        (tmp_path / "killed" / f".{name}.partial").write_text("half")
    run(base, tmp_path / "killed", rounds=1)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    (tmp_path / "killed" / f".{STATE}.partial").write_text("half")
    run(base, tmp_path / "killed", rounds=1, overwrite=True)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_rounds_of_other_settings_are_not_continued(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path / "out", rounds=1)
    with pytest.raises(OutputError, match="rounds of another base, other tasks or other settings"):
        run(base, tmp_path / "out", replace(FULL, seed=1), rounds=1)
    renamed = [Task(f"{task.name}2", task.blocks) for task in make_tasks()]
    with pytest.raises(OutputError, match="other tasks"):
        run_rounds(base, renamed, FULL, tmp_path / "out", rounds=1, steps_per_round=2)
    (tmp_path / "out" / STATE).write_bytes(b"damaged")
    with pytest.raises(CorruptFileError, match=r"rounds\.safetensors in out is damaged"):
        run(base, tmp_path / "out", rounds=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="other files"):
        run(base, tmp_path / "mine", rounds=1)


# Processes.


def test_processes_agree_to_the_last_bit(base: Path, tmp_path: Path) -> None:
    """Each task is trained by one process, and tensors are exchanged as sums of one number and zeros."""
    launch.succeed(launch.SUPPORT / "launched_rounds.py", base, tmp_path / "two", processes=2)
    for name, merge in MERGES.items():
        run(base, tmp_path / "one" / name, merge=merge)
    run(base, tmp_path / "one" / "lora", LORA)
    for name in (*MERGES, "lora"):
        one, two = files(tmp_path / "one" / name), files(tmp_path / "two" / name)
        assert one.keys() == two.keys()
        assert [file for file in one if one[file] != two[file]] == [], name
    refusals = [(tmp_path / "two" / f"refused-{rank}.txt").read_text() for rank in (0, 1)]
    assert all("'b' belongs to this process, which has no data for it" in text for text in refusals)


# Bad input.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tasks": [Task("a", make_task_blocks(0))]}, BadValueError, "at least two"),
        ({"tasks": [Task("a", make_task_blocks(0))] * 2}, BadValueError, "two tasks are called 'a'"),
        (
            {"tasks": [Task("a", make_task_blocks(0)), Task("../b", make_task_blocks(1))]},
            BadValueError,
            "name is that of a folder",
        ),
        ({"tasks": [Task("a", make_task_blocks(0)), Task("b")]}, BadValueError, "no data"),
        ({"rounds": 0}, BadValueError, "rounds=0"),
        ({"steps_per_round": 1.5}, BadValueError, r"steps_per_round=1\.5"),
        ({"merge": Merge("avarage")}, MissingNameError, "no merging rule"),
        ({"merge": Merge("ties", 1.0, {"density": 2.0})}, BadValueError, "density"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    change: dict[str, Any], error: type[TaskVectorError], message: str, base: Path, tmp_path: Path
) -> None:
    given = {"tasks": make_tasks(), "rounds": 1, "steps_per_round": 1, **change}
    with pytest.raises(error, match=message):
        run_rounds(base, given.pop("tasks"), FULL, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


# λ.


@pytest.mark.parametrize("method", ["grid", "bounded"])
def test_the_search_finds_the_best_scale_within_its_budget(method: Any) -> None:
    pytest.importorskip("scipy")
    calls: list[float] = []

    def score(scale: float) -> float:
        calls.append(scale)
        return -((scale - 0.37) ** 2)

    found = search_scale(score, (0.0, 1.0), method=method, budget=12)
    assert len(calls) <= 12 and found.scale in calls
    assert abs(found.scale - 0.37) < (0.05 if method == "grid" else 0.001)
    assert found.score == max(value for _, value in found.tried)


def test_the_grid_has_both_ends_and_prefers_the_smaller_edit() -> None:
    found = search_scale(lambda scale: 0.5, (-1.0, 1.0), budget=5)
    assert [scale for scale, _ in found.tried] == [-1.0, -0.5, 0.0, 0.5, 1.0] and found.scale == 0.0
    with pytest.raises(BadValueError, match="the smaller first"):
        search_scale(lambda scale: 0.0, (1.0, 0.0))
    with pytest.raises(BadValueError, match="at least 2"):
        search_scale(lambda scale: 0.0, budget=1)
    with pytest.raises(BadValueError, match="not a number"):
        search_scale(lambda scale: float("nan"))
    with pytest.raises(MissingNameError, match="grid or bounded"):
        search_scale(lambda scale: 0.0, method="gird")  # type: ignore[arg-type]
