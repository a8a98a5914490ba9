"""What an edit costs in abilities that no book measures: functions of a model and lm-eval's own tasks, at each λ."""

import copy
import io
import json
import random
from pathlib import Path

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager
from support.tiny_books import InPlaceEdit, make_books, make_tokenizer, tiny_llama

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.evaluation import UnlearningReport, lm_eval_metric, protocols, sweep

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=4)
FAST = {"resamples": 200, "permutations": 100, "likelihood": False}


@pytest.fixture(scope="module")
def made():
    return make_tokenizer(), make_books(), tiny_llama(), tiny_llama(seed=1)


def table(report, metric):
    """λ or reference -> the score."""
    return {s.reference or s.scale: s for s in report.utility if s.metric == metric}


def test_a_function_of_the_model_stands_beside_the_books(made, tmp_path):
    tokenizer, books, base, joint = made
    model = copy.deepcopy(joint).train()
    edit = InPlaceEdit(model, base)

    def size(asked):
        torch.manual_seed(5)  # what a metric does to the numbers of others is undone
        random.seed(5)
        asked.eval()
        return {"size": sum(weight.detach().double().sum().item() for weight in asked.parameters())}

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    random.seed(4)
    before = random.getstate()
    report = sweep(
        model, edit, [0, -1], books, SHORT, tokenizer=tokenizer, reference={"base": base}, utility=size, **FAST
    )
    assert random.getstate() == before and torch.rand(1) == expected and model.training
    sizes = {0.0: size(joint)["size"], "base": size(base)["size"]}
    sizes[-1.0] = 2 * sizes[0.0] - sizes["base"]
    found = table(report, "size")
    assert set(found) == set(sizes)
    for where, value in sizes.items():
        score = found[where]
        assert score.value.value == pytest.approx(value, rel=1e-5) and score.n == 0
        assert score.difference.value == pytest.approx(value - sizes[0.0], abs=1e-3)
        assert score.value.low == score.value.high == score.value.value
    text = report.to_markdown()
    assert "| task | λ = 0 | λ = −1 | reference: base |" in text
    report.save(tmp_path, plots=False)
    assert UnlearningReport.load(tmp_path).utility == report.utility
    assert not sweep(joint, None, [0], books, SHORT, tokenizer=tokenizer, **FAST).utility


def test_a_task_that_lm_eval_lacks_is_refused_before_the_books_are_asked(made, tasks, tmp_path):
    tokenizer, books, _, joint = made
    metric = lm_eval_metric(["arc_easy", "arc_esy"], tokenizer, task_manager=tasks)
    with pytest.raises(MissingNameError, match=r"lm-eval has no task 'arc_esy'.*arc_easy"):
        sweep(joint, None, [0, -1], books, SHORT, tokenizer=tokenizer, utility=metric, output=tmp_path / "out", **FAST)
    assert not list(tmp_path.rglob("*.json*"))


def test_what_gives_no_scores_is_refused(made):
    tokenizer, books, _, joint = made

    def swept(utility):
        return sweep(joint, None, [0, -1], books, SHORT, tokenizer=tokenizer, utility=utility, **FAST)

    names = iter("ab")
    with pytest.raises(BadValueError, match=r"gave \['b'\] at λ=-1 and \['a'\] of the untouched model"):
        swept(lambda model: {next(names): 1.0})
    with pytest.raises(BadValueError, match=r"must give scores by name.*λ=0 gave 0\.5"):
        swept(lambda model: 0.5)
    with pytest.raises(BadValueError, match="'x' is no finite number at λ=0"):
        swept(lambda model: {"x": float("nan")})
    with pytest.raises(BadValueError, match="give a list of names of lm-eval's tasks"):
        swept([])
    with pytest.raises(BadValueError, match="cache does not know λ"):
        lm_eval_metric(["arc_easy"], use_cache="here")


ARC = [
    {
        "id": str(i),
        "question": f"What does sentence number {i} tell of?",
        "choices": {"text": [" the lamps", " a room", " number 7"], "label": ["A", "B", "C"]},
        "answerKey": "ABC"[i % 3],
    }
    for i in range(12)
]
LAMBADA = [{"text": f"Sentence number {i} tells of the {i * 7919 % 1009} lamps in room {i % 17}"} for i in range(12)]


@pytest.fixture
def tasks(hub) -> TaskManager:
    """lm-eval's own arc_easy and lambada_openai, whose data sets are on the loopback Hub; no other of its tasks."""
    import datasets

    def parquet(rows) -> bytes:
        buffer = io.BytesIO()
        datasets.Dataset.from_list(rows).to_parquet(buffer)
        return buffer.getvalue()

    splits = ("train", "validation", "test")
    card = "---\nconfigs:\n- config_name: {}\n  data_files:\n" + "".join(
        f"  - split: {split}\n    path: {split}.parquet\n" for split in splits
    )
    for repo, config, rows in (
        ("allenai/ai2_arc", "ARC-Easy", ARC),
        ("EleutherAI/lambada_openai", "default", LAMBADA),
    ):
        files = {f"{split}.parquet": parquet(rows) for split in splits}
        hub.add_repo(repo, {"README.md": (card.format(config) + "---\n").encode(), **files}, repo_type="dataset")
    folder = Path(lm_eval.__file__).parent / "tasks"
    return TaskManager(include_path=[str(folder / "arc"), str(folder / "lambada")], include_defaults=False)


def test_lm_evals_own_tasks_are_asked_at_each_scale(made, tasks, tmp_path):
    tokenizer, books, base, joint = made
    joint.save_pretrained(tmp_path / "joint")
    base.save_pretrained(tmp_path / "base")
    vector = TaskVector.from_finetuned(tmp_path / "base", tmp_path / "joint", name="v")
    model = copy.deepcopy(joint)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    metric = lm_eval_metric(["arc_easy", "lambada_openai"], tokenizer, task_manager=tasks)
    report = sweep(
        model,
        vector,
        [0, -1],
        books,
        SHORT,
        tokenizer=tokenizer,
        reference={"base": base},
        utility=metric,
        **FAST,
    )
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    names = {"arc_easy/acc", "arc_easy/acc_norm", "lambada_openai/acc", "lambada_openai/perplexity"}
    assert {score.metric for score in report.utility} == names
    written = vector.apply(tmp_path / "joint", tmp_path / "written", scale=-1.0)
    tokenizer.save_pretrained(written)
    for where, folder in ((0.0, tmp_path / "joint"), (-1.0, written), ("base", tmp_path / "base")):
        own = lm_eval.simple_evaluate(
            "hf",
            model_args={"pretrained": str(folder), "dtype": "float32", "tokenizer": str(written)},
            tasks=["arc_easy", "lambada_openai"],
            task_manager=tasks,
            device="cpu",
            bootstrap_iters=0,
        )
        for name in names:
            task, _, short = name.partition("/")
            assert table(report, name)[where].value.value == pytest.approx(own["results"][task][f"{short},none"])
    # Of means, the interval is that of the documents, paired with the untouched model's.
    pairs = [metric.measure(each)["arc_easy/acc"].documents for each in (joint, base)]
    score = table(report, "arc_easy/acc")["base"]
    assert score.n == 12 and score.difference.value == pytest.approx(np.mean(pairs[1]) - np.mean(pairs[0]))
    assert score.value.low <= score.value.value <= score.value.high
    assert score.value.low < score.value.high
    perplexity = table(report, "lambada_openai/perplexity")["base"]
    assert perplexity.n == 0 and perplexity.value.low == perplexity.value.high
    assert json.loads(report.to_json())["utility"][0]["metric"] == report.utility[0].metric
