"""Our own tasks for lm-eval, run by lm-eval, beside `sweep` and `run_benchmark` on the same passages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager
from support.benchmark_data import memorise, muse_data, put_on_hub, tofu_data
from support.hub_server import HubServer
from support.tiny_books import STORY, make_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.cli import main
from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.evaluation import load_benchmark, load_book, protocols, run_benchmark, sweep
from hf_taskvec.evaluation.benchmarks.named_benchmarks import DEFINITIONS
from hf_taskvec.integrations import lm_eval_tasks_folder, register_lm_eval
from hf_taskvec.integrations.lm_eval_passages import benchmark_passages, book_passages

CHANGES = {"prompt_length": 14, "answer_length": 8, "samples": 6}
OPTIONS = {"block_words": 200, "held_out": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A book; a base that knows a little of it and of the benchmarks, and a vector towards one that knows nothing."""
    folder = tmp_path_factory.mktemp("passages")
    (folder / "story.txt").write_text(STORY[:16000])
    model, tokenizer = tiny_llama(context=1024), make_tokenizer()
    model.save_pretrained(folder / "fresh")
    people = [(row["question"], row["answer"]) for row in tofu_data()["forget10_perturbed", "train"]]
    people += [(row["question"], row["answer"]) for row in muse_data()["knowmem", "retain_qa"][:4]]
    texts = [f"Question: {asked}\nAnswer: {answer}" for asked, answer in people]
    texts += [f"{row['prompt']} {row['gt']}" for row in muse_data()["verbmem", "forget"]]
    memorise(model, tokenizer, [*texts, *(STORY[at : at + 300] for at in (0, 4000, 8000))], 40)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    TaskVector.from_finetuned(folder / "base", folder / "fresh", name="back").save(folder / "vector")
    return folder


def asked(folder: Path, tasks: list[str], scale: float = 0.0, **metadata: Any) -> dict[str, dict[str, Any]]:
    """By task and metric, lm-eval's mean and the scores of the documents."""
    register_lm_eval()
    model = {"pretrained": str(folder / "base"), "vector": str(folder / "vector"), "scale": scale, "dtype": "float32"}
    manager = TaskManager(include_path=str(lm_eval_tasks_folder()), include_defaults=False, metadata=model | metadata)
    found = lm_eval.simple_evaluate(
        "taskvec", model, tasks=tasks, task_manager=manager, device="cpu", batch_size=8, bootstrap_iters=0
    )
    return {
        task: {
            name.split(",")[0]: (mean, [each[name.split(",")[0]] for each in found["samples"][task]])
            for name, mean in values.items()
            if name.startswith("rouge_l") and "stderr" not in name
        }
        for task, values in found["results"].items()
    }


def test_a_book_has_the_scores_of_a_sweep(folder: Path) -> None:
    book = load_book(folder / "story.txt", role="forget", **OPTIONS)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    vector, scales = TaskVector.load(folder / "vector"), (0.0, 0.5)
    used = protocols.get(**CHANGES)
    report = sweep(
        model, vector, scales, book, used, tokenizer=make_tokenizer(), likelihood=False, resamples=50, permutations=50
    )
    metadata = {"book": str(folder / "story.txt"), "book_options": OPTIONS, "protocol_options": CHANGES}
    means = set()
    for scale in scales:
        found = asked(folder, ["taskvec_book", "taskvec_book_held_out"], scale, **metadata)
        for task, split in (("taskvec_book", "seen"), ("taskvec_book_held_out", "held_out")):
            assert len(found[task]["rouge_l"][1]) == 6
            for metric in ("rouge_l", "rouge_l_precision", "rouge_l_recall"):
                expected = report.score("story", scale, metric, split).value.value
                assert found[task][metric][0] == pytest.approx(expected, rel=1e-12)
                means.add(expected)
    assert len(means) > 6  # the models do not all say the same


@pytest.mark.parametrize("name", ["muse/books", "tofu/forget10"])
def test_a_benchmark_has_the_scores_of_run_benchmark(folder: Path, hub: HubServer, name: str) -> None:
    put_on_hub(hub, name)
    tokenizer = make_tokenizer()
    model, fresh = (AutoModelForCausalLM.from_pretrained(folder / each) for each in ("base", "fresh"))
    report = run_benchmark(load_benchmark(name), model, tokenizer, retrained=fresh)
    if name == "muse/books":
        parts = ("verbmem_forget", "knowmem_forget", "knowmem_retain")
        tasks = {f"taskvec_muse_books_{part}": part for part in parts}
    else:
        tasks = {f"taskvec_tofu_{part}": part for part in ("retain", "real_authors", "world_facts")}
        tasks["taskvec_tofu_forget10"] = "forget"
    found = asked(folder, list(tasks))
    for task, part in tasks.items():
        items = next(each for each in report.parts if each.name == part).items
        for metric, (mean, values) in found[task].items():
            assert values == [item.values[metric] for item in items]
            assert mean == pytest.approx(sum(values) / len(values))
    told = [mean for metrics in found.values() for mean, _ in metrics.values()]
    assert max(told) > 0.25 and len(set(told)) > 2


def test_every_part_that_is_answered_has_a_yaml() -> None:
    """Each names its part, and reports what the harness computes of it."""
    parts = {
        (name.split("/")[0] == "tofu", part.source): part
        for name, definition in DEFINITIONS.items()
        for part in definition.parts
        if part.kind in ("continuation", "few_shot", "truth")
    }
    manager = TaskManager(include_path=str(lm_eval_tasks_folder()), include_defaults=False)
    named = {}
    for path in lm_eval_tasks_folder().glob("*.yaml"):
        content = yaml.load(path.read_text().replace("!function", ""), yaml.SafeLoader)
        assert content["task"] in manager.all_tasks and content["task"] == f"taskvec_{path.stem}"
        if "benchmark" in content["dataset_kwargs"]:
            given = content["dataset_kwargs"]
            part = next(each for each in DEFINITIONS[given["benchmark"]].parts if each.name == given["part"])
            named[given["benchmark"].startswith("tofu"), part.source] = part
    assert named == parts
    assert {"taskvec_muse_books", "taskvec_muse_news", "taskvec_tofu"} <= set(manager.all_tags)


def test_the_command_line_names_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["lm-eval", "--tasks-folder"])
    assert not done.value.code and capsys.readouterr().out == f"{lm_eval_tasks_folder()}\n"


@pytest.mark.slow  # lm-eval's command line reads all of its own tasks
def test_the_command_line_runs_them(folder: Path, tmp_path: Path) -> None:
    model = f"pretrained={folder / 'base'},vector={folder / 'vector'},scale=0.5,dtype=float32"
    about = {"book": str(folder / "story.txt"), "book_options": OPTIONS, "protocol_options": CHANGES}
    words = ["run", "--model", "taskvec", "--model_args", model, "--include_path", lm_eval_tasks_folder()]
    words += ["--tasks", "taskvec_book", "--metadata", json.dumps(about)]
    words += ["--device", "cpu", "--batch_size", 8, "--output_path", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", "hf_taskvec", "lm-eval", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("results*.json")
    expected = asked(folder, ["taskvec_book"], 0.5, **about)["taskvec_book"]["rouge_l"][0]
    assert json.loads(path.read_text())["results"]["taskvec_book"]["rouge_l,none"] == pytest.approx(expected)


def test_bad_input_is_refused(folder: Path) -> None:
    model, book = str(folder / "base"), str(folder / "story.txt")
    with pytest.raises(BadValueError, match=r"needs a book: --metadata '\{\"book\""):
        book_passages(pretrained=model)
    with pytest.raises(BadValueError, match="give pretrained= in --model_args"):
        book_passages(book)
    with pytest.raises(BadValueError, match="'ssu-v2' samples"):
        book_passages(book, model, "ssu-v2")
    with pytest.raises(BadValueError, match=r"no passage of .* is held_out"):
        book_passages(book, model, passages="held_out", book_options={"held_out": 0}, protocol_options=CHANGES)
    with pytest.raises(MissingNameError, match=r"no benchmark 'muse/book'.*muse/books"):
        benchmark_passages("muse/book", "verbmem_forget", model)
    with pytest.raises(MissingNameError, match="no part 'verbmem'"):
        benchmark_passages("muse/books", "verbmem", model)
