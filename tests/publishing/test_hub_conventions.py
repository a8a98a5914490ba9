"""The Hub's own conventions: who asks, leaderboards, collections, and a report that `datasets` reads."""

import re
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import yaml
from huggingface_hub.cli import extensions
from support.edited_model import Edited
from support.hub_server import HubServer

from hf_taskvec import TaskVector, __version__
from hf_taskvec.errors import BadValueError, HubError
from hf_taskvec.evaluation.benchmarks.benchmark_report import BenchmarkReport, PartResult, RetrainedModel
from hf_taskvec.evaluation.benchmarks.prompt_forms import PROMPT_FORMS
from hf_taskvec.evaluation.reporting.report_parts import UtilityScore
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.publishing import push_collection, push_folder

REPO = "me/forget"


def test_every_request_says_who_makes_it(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    edited.vector.push_to_hub("me/vector", base_model="me/base")
    TaskVector.from_pretrained("me/vector", revision="main")
    edited.vector.apply(edited.pair.base, tmp_path / "out", scale=-0.5)
    push_folder(tmp_path / "out", REPO)
    edited.vector.apply(edited.pair.base, tmp_path / "other", scale=-1)
    push_folder(tmp_path / "other", "me/other")
    TaskVector.from_finetuned(REPO, "me/other@main", stream=True).norm()  # by byte range
    asked = [request for request in hub.log if hub.url in request.line]
    assert len(asked) > 20
    strangers = {request.line for request in asked if f"hf_taskvec/{__version__}" not in request.agent}
    assert not strangers


def test_scores_on_data_sets_of_the_hub_are_for_its_leaderboards(
    hub: HubServer, edited: Edited, tmp_path: Path
) -> None:
    scale = edited.report.scales[-1]
    exact = Interval(0.5, 0.5, 0.5)
    scores = [
        UtilityScore("arc_easy/acc", scale, None, 200, Interval(0.412345678, 0.3, 0.5), exact, "allenai/ai2_arc"),
        UtilityScore("arc_easy/acc", 0.0, None, 200, exact, exact, "allenai/ai2_arc"),
        UtilityScore("own/acc", scale, None, 9, exact, exact, "json"),
    ]
    report = replace(edited.report, utility=tuple(scores))
    part = PartResult("verbmem_forget", "muse-bench/MUSE-Books (verbmem, split forget)", "0", "p", ())
    retrained = RetrainedModel("1", {"verbmem": 0.2})
    form = PROMPT_FORMS["question"]
    benchmark = BenchmarkReport("muse/books", "0", form, {"verbmem": 0.25}, retrained, (part,), {})
    folder = edited.vector.apply(edited.pair.base, tmp_path / "out", scale=scale)
    push_folder(folder, REPO, report=report, benchmarks=[benchmark])
    files = hub.files(REPO)
    found = {
        name: huggingface_hub.parse_eval_result_entries(yaml.safe_load(data))
        for name, data in files.items()
        if name.startswith(".eval_results/")
    }
    assert set(found) == {".eval_results/hf_taskvec.yaml", ".eval_results/muse-books.yaml"}
    (task,) = found[".eval_results/hf_taskvec.yaml"]
    assert (task.dataset_id, task.task_id, task.value) == ("allenai/ai2_arc", "arc_easy/acc", 0.412346)
    (metric,) = found[".eval_results/muse-books.yaml"]
    assert (metric.dataset_id, metric.task_id, metric.value) == ("muse-bench/MUSE-Books", "verbmem", 0.25)
    entries = yaml.safe_load(files[".eval_results/hf_taskvec.yaml"])
    assert huggingface_hub.eval_result_entries_to_yaml([task]) == entries
    edited.vector.push_to_hub("me/vector", report=report)  # a vector is no model that a leaderboard could rank
    assert not [name for name in hub.files("me/vector") if name.startswith(".eval")]


def test_datasets_reads_a_published_report(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    folder = edited.vector.apply(edited.pair.base, tmp_path / "out", scale=-1)
    push_folder(folder, REPO, report=edited.report)
    read = datasets.load_dataset("json", data_files=f"hf://{REPO}/report/scores.jsonl", split="train")
    frame = edited.report.to_pandas()
    assert read.column_names == list(frame.columns) and len(read) == len(frame)
    assert read["value"][:] == pytest.approx(list(frame["value"]))


def test_a_base_its_vectors_and_its_models_are_a_collection(hub: HubServer) -> None:
    for name in ("base", "vector", "model", "adapter"):
        hub.add_repo(f"me/{name}", {"README.md": b"x"})
    given = {"base": "me/base", "vectors": ["me/vector@main"], "models": ["me/model"]}
    address = push_collection("Forgotten books", **given)
    slug = f"me/forgotten-books-{'0' * 24}"
    assert address == f"{hub.url}/collections/{slug}"
    assert push_collection("Forgotten books", **given, adapters=["me/adapter"]) == address  # adds what it lacks
    items = huggingface_hub.get_collection(slug).items
    assert [(item.item_id, item.note) for item in items] == [
        ("me/base", "the base"),
        ("me/vector", "a task vector"),
        ("me/model", "an edited model"),
        ("me/adapter", "an adapter"),
    ]
    with pytest.raises(HubError, match="refused the push to the collection 'Forgotten books'"):
        push_collection("Forgotten books", base="me/nothing")
    with pytest.raises(BadValueError, match="needs a title"):
        push_collection(" ", base="me/base")


def test_the_command_is_named_as_an_extension_of_hf() -> None:
    """`hf extensions install OWNER/hf-taskvec` looks for a console script of that name."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    scripts = dict(re.findall(r'^([\w-]+) = "(hf_taskvec\.cli:main)"', text, re.M))
    assert set(scripts) == {"taskvec", "hf-taskvec"}
    assert extensions._get_executable_name("taskvec").removesuffix(".exe") == "hf-taskvec"
