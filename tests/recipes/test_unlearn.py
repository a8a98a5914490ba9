"""`accelerate launch recipes/unlearn.py`, shrunk: the whole experiment, its stages, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import launch
from transformers import AutoModelForCausalLM as AutoModel

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.auditing import AuditReport
from hf_taskvec.evaluation import UnlearningReport
from hf_taskvec.experiments.config_options import parse_config
from hf_taskvec.experiments.synthetic_library.book_writer import write_library
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
from hf_taskvec.experiments.unlearning.unlearn_inputs import prepare_unlearning

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "unlearn.py"
# The default in miniature: seconds of work, and a model that learns just enough to have something to forget.
SMALL = {
    "words": 900,
    "section-words": 150,
    "held-out": 0.15,
    "general-words": 1500,
    "pretrain-epochs": 2,
    "epochs": 6,
    "learning-rate": 4e-3,
    "hidden-size": 32,
    "layers": 1,
    "vocabulary": 700,
    "block-length": 48,
    "block-stride": 24,
    "prompt-length": 8,
    "answer-length": 10,
    "refine": 1,
    "certain": "false",
    "lora-rank": 4,
    "edit": "paper",
}
SCALES = ["--scales", "0", "-0.5", "-1"]


def flags(**changes: Any) -> list[str]:
    settings = SMALL | {name.replace("_", "-"): value for name, value in changes.items()}
    given = [part for name, value in settings.items() if value is not None for part in (f"--{name}", str(value))]
    return [*given, *SCALES]


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], UnlearningReport]:
    spec = importlib.util.spec_from_file_location("unlearn", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What the command leaves behind and what it says, started as a user starts it."""
    folder = tmp_path_factory.mktemp("recipe")
    done = launch.run(RECIPE, *flags(), launched=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "outputs" / "unlearn", done.stdout


def without_timing(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "report.json").read_text("utf-8"))
    report.pop("timing")
    report.pop("edit")  # knows the files' stamps, which another run has others of
    return report


def stage(output: Path, name: str) -> Path:
    return next((output / "stages").glob(f"{name}-*"))


def test_the_experiment_forgets_the_book_and_leaves_all_its_outputs(finished: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, said = finished
    report = UnlearningReport.load(output)
    assert [book.role for book in report.books] == ["forget", "aligned", "retain"]
    assert {0.0, -0.5, -1.0} <= set(report.scales) and report.references
    assert report.score(report.books[0].name, -1.0).value.value < report.score(report.books[0].name, 0.0).value.value
    made = sorted(path.name.rsplit("-", 1)[0] for path in (output / "stages").iterdir())
    assert made == ["alone-aligned", "alone-retain", "base", "forget", "joint", "retrain"]
    for name in ("report.md", "scores.png", "scores.svg", "config.json"):
        assert (output / name).stat().st_size > 0
    vector = TaskVector.load(output / "vector")
    assert "forget" in vector.expression
    if report.choice is not None and report.choice.scale:
        model = AutoModelForCausalLM.from_pretrained(output / "model")
        joint = dict(AutoModelForCausalLM.from_pretrained(stage(output, "joint")).named_parameters())
        for name, parameter in model.named_parameters():
            expected = joint[name].double() + report.choice.scale * vector.dense(name, torch.float64)
            assert torch.allclose(parameter.double(), expected, rtol=1e-6, atol=1e-7), name
        AutoTokenizer.from_pretrained(output / "model")
    for words in (
        "(to forget)",
        "(same series)",
        "(unrelated)",
        "retrained",
        "θ_0",
        "before",
        "after",
        "report.html",
        "α̂",
        "Theory recommended λ=",
    ):
        assert words in said, words


def test_the_report_tells_how_good_theory_was(finished: tuple[Path, str]) -> None:
    output, said = finished
    theory = UnlearningReport.load(output).theory
    assert theory is not None and theory.judged is not None
    forget, *others = (book.name for book in UnlearningReport.load(output).books)
    assert theory.forget == forget and list(theory.alphas) == others
    assert theory.scale in UnlearningReport.load(output).scales
    written = (output / "report.md").read_text("utf-8")
    for line in (*theory.correlations, *theory.verdicts):
        assert line in written and line in said


def test_the_config_is_recorded_without_paths(finished: tuple[Path, str]) -> None:
    output, _ = finished
    recorded = json.loads((output / "config.json").read_text())
    assert recorded["words"] == SMALL["words"] and recorded["inputs"]["base_model"] == "embedded"
    for path in [output / "config.json", output / "report.json", *output.glob("*/taskvec*.json")]:
        assert str(output.parents[1]) not in path.read_text("utf-8"), path.name


def test_what_is_finished_is_not_done_again(finished: tuple[Path, str], main: Any, capsys: Any) -> None:
    output, _ = finished
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.safetensors") if "stages" in path.parts}
    report = main([*flags(), "--output", str(output)])
    assert report.timing.generated == 0
    assert len(re.findall("done before", capsys.readouterr().out)) == 6
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_an_edit_beyond_the_sweep_is_tried_reported_and_saved(
    finished: tuple[Path, str], main: Any, tmp_path: Path, capsys: Any
) -> None:
    output, _ = finished
    out = tmp_path / "out"
    more = ["--cache", str(output / "stages"), "--output", str(out), "--edit-rounds", "1"]
    report = main([*flags(edit="repair", low=0.01, high=100, retain_bound=1, membership=1), *more])
    said = capsys.readouterr().out
    compared = UnlearningReport.load(out / "edit")
    assert report.edits == () and [book.role for book in report.books] == ["forget", "aligned", "retain"]
    assert [book.role for book in compared.books] == ["forget", "retain", "retain"]
    names = [edit.name for edit in compared.edits]
    assert any(name.endswith("*forget") for name in names), names
    assert "Beyond the sweep" in said and "(to keep)" in said and names[0] in said
    vector = TaskVector.load(out / "edit" / "vector")
    assert compared.choice is not None and compared.choice.judged
    assert vector.expression == compared.edits[int(compared.choice.judged) - 1].expression
    if compared.choice.scale:  # the saved model is the edit's, not that of the paper's λ
        vector.apply(stage(output, "joint"), tmp_path / "again")
        ours, again = (AutoModel.from_pretrained(where).state_dict() for where in (out / "model", tmp_path / "again"))
        assert all(torch.equal(ours[name], again[name]) for name in again)
    # Begun anew without it, nothing of it is left.
    main([*flags(), "--cache", str(output / "stages"), "--output", str(out), "--force", "true"])
    assert not (out / "edit").exists()


def test_controls_and_an_audit_are_made_where_they_are_asked_for(
    finished: tuple[Path, str], main: Any, capsys: Any, tmp_path: Path
) -> None:
    asked = ["--controls", "true", "--audit", "true", "--audit-passages", "4", "--audit-samples", "2"]
    asked += ["--membership", "0.5"]  # four passages tell no reference that knows the book from one that does not
    report = main([*flags(), *asked, "--output", str(tmp_path / "out"), "--cache", str(finished[0] / "stages")])
    said = " ".join(capsys.readouterr().out.split())
    stored, audited = UnlearningReport.load(tmp_path / "out"), AuditReport.load(tmp_path / "out")
    assert stored.controls == report.controls and stored.choice is not None
    kinds = {row.kind for row in stored.controls.rows}
    assert {"untouched", "vector", "other_vector", "noise", "output_noise", "reference"} <= kinds
    assert stored.controls.scale == stored.choice.judged
    assert " ".join(stored.controls.sentence.split()) in said
    assert f"The audit of λ = {stored.choice.judged:g}: {audited.sentence}" in said
    assert {finding.group for finding in audited.findings} >= {"relearn", "sample", "prompt"}
    assert (audited.settings.passages, audited.settings.samples) == (4, 2)
    for name in ("audit.md", "audit-attacks.png", "audit-relearning.svg", "audit-inside.png"):
        assert (tmp_path / "out" / name).stat().st_size > 1000


def test_a_killed_experiment_continues_and_reports_the_same(finished: tuple[Path, str], tmp_path: Path) -> None:
    arguments = [*flags(), "--output", str(tmp_path / "out")]
    # Killed twice: in the joint training, and in the sweep.
    for is_there in (
        lambda: list((tmp_path / "out/stages").glob(".joint-*")),
        lambda: list((tmp_path / "out/store").glob("*.json")),
    ):
        experiment = launch.start(RECIPE, *arguments)
        deadline = time.monotonic() + 120
        while not is_there() and time.monotonic() < deadline:
            assert experiment.running(), "it ended before it could be killed"
            time.sleep(0.005)
        experiment.kill()
        assert not (tmp_path / "out/report.json").exists()
    done = launch.run(RECIPE, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done before" in done.stdout
    assert without_timing(tmp_path / "out") == without_timing(finished[0])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The embedded books as files, so that the finished stages can be given."""
    folder = tmp_path_factory.mktemp("books")
    found = write_library(0, words=SMALL["words"], general_words=SMALL["general-words"])  # type: ignore[arg-type]
    given = []
    for role, book in zip(("forget", "aligned", "retain"), (*found.series, *found.unrelated), strict=True):
        (folder / f"{book.name}.txt").write_text(book.text, "utf-8")
        given.append(f"{role}={folder / book.name}.txt")
    return given


def user_flags(output: Path, texts: list[str], *more: str) -> list[str]:
    own = {"held-out": 0.2, "evaluation-batch-size": 64, "margin": 0.05, "samples": 1000}
    own["prose"] = "false"  # the embedded books have their headings
    return [
        *flags(words=None, general_words=None, **own),
        *("--base-model", str(stage(output, "base")), "--books", *texts, *more),
    ]


def test_every_stage_can_be_given(finished: tuple[Path, str], texts: list[str], main: Any, tmp_path: Path) -> None:
    output, _ = finished
    joint, retrain = str(stage(output, "joint")), str(stage(output, "retrain"))
    both = ["--joint-model", joint, "--reference-model", retrain, "--output"]
    first = main(user_flags(output, texts, "--tuned-model", str(stage(output, "forget")), *both, str(tmp_path / "a")))
    second = main(user_flags(output, texts, "--task-vector", str(output / "vector"), *both, str(tmp_path / "b")))
    assert not (tmp_path / "a/stages").exists() and not (tmp_path / "b/stages").exists()
    whole = UnlearningReport.load(output)
    assert first.scores == second.scores == whole.scores
    # The sweep alone asks for passages, not for blocks to train on.
    given = ["--task-vector", str(output / "vector"), "--joint-model", joint, "--no-retrain", "--block-length", "192"]
    alone = main(user_flags(output, texts, *given, "--output", str(tmp_path / "c")))
    assert not alone.references and alone.choice.never_seen.source in ("split", "assumed")


def test_stages_on_the_hub_have_revisions(
    finished: tuple[Path, str], texts: list[str], main: Any, hub: Any, tmp_path: Path
) -> None:
    output, _ = finished
    where = {}
    for name in ("base", "joint", "forget", "retrain"):
        sha = hub.add_repo(f"me/{name}", stage(output, name))
        hub.add_repo(f"me/{name}", {"README.md": b"moved on"})
        where[name] = f"me/{name}@{sha}"
    given = ["--base-model", where["base"], "--joint-model", where["joint"], "--tuned-model", where["forget"]]
    report = main(
        [*user_flags(output, texts, *given, "--reference-model", where["retrain"]), "--output", str(tmp_path / "out")]
    )
    assert report.scores == UnlearningReport.load(output).scores
    assert not (tmp_path / "out/stages").exists()


def test_lora_shares_the_other_stages_and_saves_an_adapter(
    finished: tuple[Path, str], texts: list[str], main: Any, tmp_path: Path
) -> None:
    output, _ = finished
    shutil.copytree(output / "stages", tmp_path / "cache")
    more = ["--method", "lora", "--output", str(tmp_path / "lora"), "--cache", str(tmp_path / "cache")]
    report = main([*flags(), *more])
    new = {path.name for path in (tmp_path / "cache").iterdir()} - {path.name for path in (output / "stages").iterdir()}
    assert len(new) == 1
    adapter = tmp_path / "cache" / new.pop()
    assert (adapter / "adapter_config.json").exists()
    assert TaskVector.load(tmp_path / "lora/vector").is_low_rank
    if report.choice is not None and report.choice.scale:
        exported = TaskVector.from_adapter(tmp_path / "lora/adapter")
        assert exported.norm() == pytest.approx(-report.choice.scale * TaskVector.load(tmp_path / "lora/vector").norm())
    # The adapter can be given, and a copy of it is the same.
    both = ["--joint-model", str(stage(output, "joint")), "--reference-model", str(stage(output, "retrain"))]
    for copy in ("one", "two"):
        shutil.copytree(adapter, tmp_path / copy / "adapter", copy_function=shutil.copy)
        given = ["--adapter", str(tmp_path / copy / "adapter"), *both, "--output", str(tmp_path / "given")]
        assert main(user_flags(output, texts, *given)).scores == report.scores


def test_every_stage_can_be_lora(finished: tuple[Path, str], main: Any, tmp_path: Path) -> None:
    """θ_0' and the reference are whole models then, merged from what was trained."""
    from transformers import AutoModelForCausalLM

    cached = stage(finished[0], "base")
    shutil.copytree(cached, tmp_path / "cache" / cached.name)
    lora = ["--method", "lora", "--joint-method", "lora", "--lora-epochs", "2", "--lora-learning-rate", "1e-2"]
    more = ["--correlation", "false", "--refine", "0", "--epoch-vectors", "--checkpoint-every", "3"]
    cache = ["--cache", str(tmp_path / "cache")]
    report = main([*flags(), *lora, *more, *cache, "--output", str(tmp_path / "out")])
    merged = AutoModelForCausalLM.from_pretrained(next((tmp_path / "cache").glob("joint-*-merged")))
    base = dict(AutoModelForCausalLM.from_pretrained(cached).named_parameters())
    trained = next(path for path in (tmp_path / "cache").glob("joint-*") if not path.name.endswith("-merged"))
    change = TaskVector.from_adapter(trained)
    for name, parameter in merged.named_parameters():
        expected = base[name].double() + (change.dense(name, torch.float64) if name in change else 0.0)
        assert torch.allclose(parameter.double(), expected, rtol=1e-6, atol=1e-7), name
    assert report.references and report.theory is None
    assert "What theory said" not in (tmp_path / "out/report.md").read_text()
    kept = next((tmp_path / "cache").glob("forget-*")) / "vectors"
    last = TaskVector.load(kept / "epoch-2")
    assert (last - TaskVector.load(tmp_path / "out/vector")).norm() < 1e-6 * last.norm()


def test_begun_anew_nothing_of_before_is_left(
    finished: tuple[Path, str], main: Any, capsys: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(finished[0], output)
    (output / "adapter").mkdir()  # as an earlier run with LoRA leaves one
    (output / "adapter" / "taskvec_adapter.json").write_text("{}")
    (output / "model").mkdir(exist_ok=True)
    (output / "notes.txt").write_text("mine")
    quick = ["--correlation", "false", "--no-retrain", "--refine", "0", "--epochs", "1"]
    impossible = ["--margin", "1e-9", "--retain-bound", "0"]
    report = main([*flags(), *quick, *impossible, "--output", str(output), "--force"])
    assert report.timing.reused == 0  # answers are of the models of this run
    assert report.choice is not None and not report.choice.scale, "this test needs a run that chooses no λ"
    left = {path.name for path in output.iterdir()}
    assert not left & {"model", "adapter"} and {"vector", "report.json", "notes.txt", "stages"} <= left
    assert UnlearningReport.load(output) == report
    assert "no λ" in capsys.readouterr().out


def test_the_compressed_and_the_pruned_vector_are_swept_and_saved(
    finished: tuple[Path, str], main: Any, tmp_path: Path
) -> None:
    output, _ = finished
    whole = TaskVector.load(output / "vector")
    for name, change in {"rank": ["--rank", "2"], "rows": ["--prune-rows", "0.25"]}.items():
        more = [*change, "--output", str(tmp_path / name), "--cache", str(output / "stages")]
        main([*flags(), *more])
        small = TaskVector.load(tmp_path / name / "vector")
        assert set(small) == set(whole) and small.norm() < whole.norm()


def test_the_chosen_model_is_pushed(finished: tuple[Path, str], main: Any, hub: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    more = ["--output", str(tmp_path / "out"), "--cache", str(finished[0] / "stages"), "--push-to-hub", "me/forgetful"]
    lenient = ["--rule", "margin", "--retain-bound", "1"]  # by Rouge-L alone, whatever it costs
    report = main([*flags(), *more, *lenient])
    assert report.choice is not None and report.choice.scale, "the small experiment must choose a λ for this test"
    files = hub.files("me/forgetful")
    assert {"README.md", "model.safetensors", "report/report.json"} <= set(files)
    assert report.passages[0].prompt.encode() not in files["report/report.json"]
    here, there = (AutoModelForCausalLM.from_pretrained(where) for where in (tmp_path / "out/model", "me/forgetful"))
    for (name, one), (_, other) in zip(here.named_parameters(), there.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_two_processes_agree_with_one(finished: tuple[Path, str], tmp_path: Path) -> None:
    output, _ = finished
    arguments = [*flags(), "--output", str(tmp_path / "two"), "--cache", str(output / "stages")]
    done = launch.run(RECIPE, *arguments, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("* chosen") <= 1  # one process speaks
    assert json.loads((tmp_path / "two/report.json").read_text())["timing"]["processes"] == 2
    assert without_timing(tmp_path / "two") == without_timing(output)


@pytest.mark.slow
def test_two_processes_can_train(tmp_path: Path) -> None:
    whole = launch.run(RECIPE, *flags(), "--output", str(tmp_path / "whole"), processes=2, launched=True)
    assert whole.returncode == 0, whole.stderr[-3000:]


# What is refused, before any work.


@pytest.fixture
def refused(main: Any, tmp_path: Path) -> Callable[..., None]:
    def check(arguments: list[str], message: str) -> None:
        folder = tmp_path / "refused"
        with pytest.raises(TaskVectorError, match=message):
            main([*arguments, "--output", str(folder)])
        assert not folder.exists()  # so that the next try finds it free

    return check


def test_a_missing_book_is_refused(finished: tuple[Path, str], texts: list[str], refused: Any) -> None:
    refused(user_flags(finished[0], [*texts[:2], "retain=nowhere.txt"]), "no book at 'nowhere.txt'")


def test_a_book_cannot_be_forgotten_and_kept(
    finished: tuple[Path, str], texts: list[str], refused: Any, tmp_path: Path
) -> None:
    shutil.copy(texts[0].split("=")[1], tmp_path / "copy.txt")
    books = [texts[0], texts[1], f"retain={tmp_path}/copy.txt"]
    refused(user_flags(finished[0], books), "are the same text: a book cannot be forgotten and kept")


def test_a_book_that_is_mostly_another_is_refused(
    finished: tuple[Path, str], texts: list[str], refused: Any, tmp_path: Path
) -> None:
    longer = Path(texts[0].split("=")[1]).read_text() + "\n\nThe end.\n"
    (tmp_path / "longer.txt").write_text(longer)
    books = [texts[0], texts[1], f"retain={tmp_path}/longer.txt"]
    refused(user_flags(finished[0], books), "are mostly the same text")


def test_nothing_but_the_book_to_forget_is_refused(finished: tuple[Path, str], texts: list[str], refused: Any) -> None:
    refused(user_flags(finished[0], texts[:1]), "all books are to be forgotten")


@pytest.mark.parametrize("embedded", [True, False])
def test_what_is_given_is_checked_before_any_training(
    embedded: bool, finished: tuple[Path, str], texts: list[str], refused: Any, models: Any, tmp_path: Path
) -> None:
    """A vector, an adapter or a model that is not there, is something else, or does not fit: before any training."""
    arguments = flags() if embedded else user_flags(finished[0], texts)
    for flag in ("--task-vector", "--adapter", "--joint-model", "--reference-model", "--tuned-model"):
        refused([*arguments, flag, str(tmp_path / "nowhere")], "nowhere")
    pair = models.pair("phi")
    refused([*arguments, "--task-vector", str(pair.tuned)], "taskvec")
    refused([*arguments, "--adapter", str(pair.tuned)], "adapter")
    refused([*arguments, "--joint-model", str(pair.tuned)], "are not of one shape")
    TaskVector.from_finetuned(pair.base, pair.tuned).save(tmp_path / "other")
    refused([*arguments, "--task-vector", str(tmp_path / "other")], "shape|match")


def test_another_vector_is_another_config(finished: tuple[Path, str]) -> None:
    output = finished[0]
    found = []
    for folder, scale in (("one", 1.0), ("two", 2.0)):
        (TaskVector.load(output / "vector") * scale).save(output.parent / folder / "vector")
        given = prepare_unlearning(
            parse_config(
                UnlearnConfig,
                [*flags(), "--task-vector", str(output.parent / folder / "vector")],
                description="",
                configs=RECIPE.parent / "configs",
                default="default",
            )
        )
        found.append(given.inputs["task_vector"])
    assert found[0] != found[1]


def test_a_base_without_a_tokenizer_is_refused(
    finished: tuple[Path, str], texts: list[str], refused: Any, tmp_path: Path
) -> None:
    shutil.copytree(stage(finished[0], "base"), tmp_path / "silent")
    for path in (tmp_path / "silent").glob("tokenizer*"):
        path.unlink()
    refused([*user_flags(finished[0], texts), "--base-model", str(tmp_path / "silent")], "no tokenizer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--margin", "-1"], "margin=-1.0 must be 0 or more"),
        (["--margin", "nan"], "margin=nan"),
        (["--low", "0"], "must enclose 1"),
        (["--metrics", "rogue_l"], "no memory metric 'rogue_l'"),
        (["--retain-bound", "-1"], "between 0 and 1"),
        (["--evaluation-batch-size", "0"], "evaluation_batch_size=0 must be at least 1"),
        (["--words", "0"], "words=0 must be at least 200"),
        (["--block-stride", "0"], "block_stride=0"),
        (["--block-stride", "100"], "block_stride=100 is larger"),
        (["--pretrain-epochs", "0"], "pretrain_epochs=0"),
        (["--lora-epochs", "0"], "lora_epochs=0"),
        (["--layers", "0"], "layers=0"),
        (["--hidden-size", "34"], "multiple of 4"),
        (["--scales", "0"], "no λ but 0"),
        (["--push-to-hub", "a b/c d"], "not a name for a Hub repository"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments: list[str], message: str, refused: Any) -> None:
    refused([*flags(), *arguments], message)


def test_a_model_that_is_not_causal_is_refused(
    texts: list[str], refused: Any, finished: tuple[Path, str], tmp_path: Path
) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=700, **sizes)).save_pretrained(tmp_path / "bert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(stage(finished[0], "base") / name, tmp_path / "bert" / name)
    arguments = [*user_flags(finished[0], texts), "--base-model", str(tmp_path / "bert")]
    refused(arguments, "is an encoder|not a causal language model")


def test_lora_targets_that_do_not_exist_are_refused(refused: Any) -> None:
    refused([*flags(), "--method", "lora", "--lora-targets", "q_prj"], r"'q_prj'. Did you mean 'q_proj'\?")


def test_blocks_longer_than_the_model_reads_are_refused(refused: Any) -> None:
    refused(flags(block_length=4096), "reads at most 192 tokens")


def test_too_little_memory_is_refused(refused: Any) -> None:
    refused(flags(batch_size=10_000_000), "too little memory: training needs about")


def test_passages_longer_than_the_model_reads_are_refused(refused: Any) -> None:
    refused(flags(words=3000, prompt_length=200, section_words=600), "the model's context has 192")


def test_a_book_that_is_too_short_is_refused(refused: Any) -> None:
    refused(flags(prompt_length=100, answer_length=100), "too short")


def test_a_book_that_is_shorter_than_a_block_is_refused(
    finished: tuple[Path, str], texts: list[str], refused: Any, tmp_path: Path
) -> None:
    """Also one that only a later stage is trained on."""
    path = Path(texts[1].split("=")[1])
    (tmp_path / "short.txt").write_text(" ".join(path.read_text("utf-8").split(" ")[:100]))
    books = [texts[0], f"aligned={tmp_path}/short.txt", texts[2]]
    arguments = user_flags(finished[0], books, "--joint-model", str(stage(finished[0], "joint")))
    refused([*arguments, "--block-length", "160", "--section-words", "40"], "'short' has .* less than one block")


def test_a_model_of_another_shape_is_refused(
    finished: tuple[Path, str], texts: list[str], refused: Any, models: Any
) -> None:
    arguments = user_flags(finished[0], texts, "--joint-model", str(models.pair("phi").base))
    refused(arguments, "are not of one shape")


def test_an_output_folder_of_another_config_is_refused(finished: tuple[Path, str], main: Any) -> None:
    with pytest.raises(TaskVectorError, match=r"results of another config .*--output"):
        main([*flags(seed=1), "--output", str(finished[0])])


def test_errors_are_told_in_one_line(tmp_path: Path) -> None:
    done = launch.run(RECIPE, "--rank", "0", cwd=tmp_path)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "BadValueError: rank=0 must be at least 1." in done.stderr
