"""lm-evaluation-harness with a task vector on its model, beside lm-eval's own type on the checkpoint written out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from support.tiny_books import make_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.evaluation import lm_eval_metric, score_scales
from hf_taskvec.integrations import TaskVectorLM, register_lm_eval

TASK = """
task: lamps
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a vector, and a task of sixteen questions, none of whose answers the model knows."""
    folder = tmp_path_factory.mktemp("lm-eval")
    model = tiny_llama()
    for where in ("base", "tuned"):
        model.save_pretrained(folder / where)
        make_tokenizer().save_pretrained(folder / where)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    TaskVector.from_finetuned(folder / "base", folder / "tuned", name="tuned").save(folder / "vector")
    rows = [
        {"question": f"Sentence number {i} tells of the", "choices": [" lamps", " room", " number"], "answer": i % 3}
        for i in range(16)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "lamps.yaml").write_text(TASK.format(file=folder / "rows.jsonl"))
    return folder


def asked(folder: Path, model: Any, **options: Any) -> list[Any]:
    """Every choice's log-probability."""
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=["lamps"], task_manager=tasks, bootstrap_iters=0, **options)
    return [each["filtered_resps"] for each in found["samples"]["lamps"]]


def options(folder: Path, **more: Any) -> str:
    given = {"pretrained": folder / "base", "vector": folder / "vector", "dtype": "float32"} | more
    return ",".join(f"{name}={value}" for name, value in given.items())


def test_the_type_taskvec_says_what_the_written_model_says(folder: Path, tmp_path: Path) -> None:
    written = TaskVector.load(folder / "vector").apply(folder / "base", tmp_path / "out", scale=-0.6)
    expected = asked(folder, "hf", model_args=f"pretrained={written},dtype=float32", device="cpu")
    register_lm_eval()
    register_lm_eval()  # twice is once
    found = asked(folder, "taskvec", model_args=options(folder, scale=-0.6), device="cpu")
    assert found == expected
    untouched = asked(folder, "taskvec", model_args=options(folder, scale=0), device="cpu")
    assert untouched != expected
    assert untouched == asked(folder, "hf", model_args=f"pretrained={folder / 'base'},dtype=float32", device="cpu")


def test_a_cache_keeps_each_scale_apart(folder: Path, tmp_path: Path) -> None:
    """lm-eval's own keys are the requests alone: with them the second λ would report the first one's text."""
    lm = TaskVectorLM(str(folder / "base"), vector=folder / "vector", scale=0.0, device="cpu", dtype="float32")
    cache = str(tmp_path / "cache")
    first = asked(folder, lm, use_cache=cache)
    lm.set_scale(-0.6)
    second = asked(folder, lm, use_cache=cache)
    assert first != second
    calls = []
    lm._loglikelihood_tokens = lambda *given, **more: calls.append(given)
    lm.set_scale(0.0)
    assert asked(folder, lm, use_cache=cache) == first  # all of it from the cache
    assert calls == []
    info = lm.get_model_info()
    assert (info["task_vector"], info["task_vector_scale"]) == ("tuned", 0.0)


def test_tasks_are_a_metric_for_any_scale(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    metric = lm_eval_metric(["lamps"], AutoTokenizer.from_pretrained(folder / "base"), task_manager=tasks, limit=8)
    found = score_scales(model, TaskVector.load(folder / "vector"), [0, -1], metric)
    assert set(found.scores) == {"lamps/acc"} and all(0 <= each <= 1 for each in found.scores["lamps/acc"])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    by_hand = asked(folder, TaskVectorLM(model, vector=folder / "vector", scale=-1.0, device="cpu"), limit=8)
    right = [max(range(3), key=lambda k: each[k][0]) == number % 3 for number, each in enumerate(by_hand)]
    assert found.of("lamps/acc")[-1.0] == pytest.approx(sum(right) / 8)


def test_bad_input_is_refused(folder: Path) -> None:
    with pytest.raises(BadValueError, match="scale='half' is no number"):
        TaskVectorLM(str(folder / "base"), vector=folder / "vector", scale="half", device="cpu")
    with pytest.raises(BadValueError, match="needs the base as well"):
        TaskVectorLM(str(folder / "base"), vector=folder / "tuned", device="cpu")
    other = TaskVector.from_tensors({"nowhere": torch.ones(2)})
    with pytest.raises(MismatchError):
        TaskVectorLM(str(folder / "base"), vector=other, device="cpu")
    with pytest.raises(BadValueError, match="give a list of names"):
        lm_eval_metric("arc_easy")


def test_the_command_line_is_lm_evals_own(folder: Path, tmp_path: Path) -> None:
    words = ["run", "--model", "taskvec", "--model_args", options(folder, scale=-0.6), "--tasks", "lamps"]
    words += ["--include_path", folder / "tasks", "--device", "cpu", "--output_path", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", "hf_taskvec", "lm-eval", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("results*.json")
    config = json.loads(path.read_text())["config"]
    assert (config["task_vector"], config["task_vector_scale"]) == ("tuned", -0.6)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from hf_taskvec.integrations import register_lm_eval\n"
        "try:\n    register_lm_eval()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "UnsupportedError this needs lm-evaluation-harness: pip install 'hf-taskvec[lm-eval]'"
