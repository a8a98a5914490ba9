"""Configs, output folders, the refined sweep and the closing words: what the recipes share."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_taskvec import TaskVectorError
from hf_taskvec.analysis import recommend_scales
from hf_taskvec.evaluation import UnlearningReport
from hf_taskvec.evaluation.scoring.scale_choice import Candidate
from hf_taskvec.experiments.config_options import parse, read_config
from hf_taskvec.experiments.results_folder import claim
from hf_taskvec.experiments.training_stages import Stages
from hf_taskvec.experiments.unlearning import scale_refinement
from hf_taskvec.experiments.unlearning.book_similarity import Alignment
from hf_taskvec.experiments.unlearning.closing_words import closing
from hf_taskvec.experiments.unlearning.config import UnlearnConfig
from hf_taskvec.experiments.unlearning.scale_refinement import _middle
from hf_taskvec.training import TrainingSettings

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
BOOKS = ["--books", "forget=one.txt", "aligned=two.txt", "retain=three.txt"]


def config(*arguments: str, configs: Path = CONFIGS) -> UnlearnConfig:
    return parse(
        UnlearnConfig,
        list(arguments),
        description="The experiment.",
        configs=configs,
        default="default",
        unless=["base_model"],
    )


# Flags, files, defaults.


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("epochs: 7\nbatch-size: 5\nlearning_rate: 1e-3\n")
    found = config("--config", str(tmp_path / "mine.yaml"), "--epochs", "9")
    assert (found.epochs, found.batch_size, found.learning_rate, found.seed) == (9, 5, 0.001, 0)


def test_the_default_file_is_for_the_embedded_model() -> None:
    assert config().embedded and config().config == "default"
    assert config("--seed", "3").block_length == read_config(UnlearnConfig, "default", CONFIGS)["block_length"]
    other = config("--base-model", "gpt2", *BOOKS)
    assert other.config is None and other.block_length == UnlearnConfig().block_length


def test_every_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config("--help")
    shown = capsys.readouterr().out
    for field in dataclasses.fields(UnlearnConfig):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert len(field.metadata["help"]) > 10
    assert "The values of λ." in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "no setting 'epoch'. Did you mean 'epochs'?"),
        ("- a list", "must hold `key: value` lines"),
        ("a: [", "is not valid YAML"),
        ("scales: 0.5", r"mine.yaml: scales=0.5 must be a list, as in \[a, b\]"),
        ("scales: [0, half]", "must be a number"),
        ("retain_bound: null", "retain_bound=None must be a number"),
        ("refine: 1.5", "refine=1.5 must be a whole number"),
        ("rank: 2.5", "rank=2.5 must be a whole number"),
        ("samples: 10.5", "samples=10.5 must be a whole number"),
        ("epochs: true", "epochs=True must be a whole number"),
        ("lora_targets: q_proj", "lora_targets='q_proj' must be a list"),
        ("retrain: 1", "retrain=1 must be true or false"),
        ("output: 7", "output=7 must be a text"),
        ("method: lore", "method='lore' must be one of full, lora"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(TaskVectorError, match=message.replace("?", r"\?")):
        config("--config", str(tmp_path / "mine.yaml"))


def test_numbers_that_yaml_takes_for_texts(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("scales: [0, -1e-1, -1]\nmargin: 5e-2\nlora_targets: [q_proj]\nrank: null\n")
    found = config("--config", str(tmp_path / "mine.yaml"))
    assert (found.scales, found.margin, found.lora_targets, found.rank) == ([0.0, -0.1, -1.0], 0.05, ["q_proj"], None)


def test_a_file_that_is_missing() -> None:
    with pytest.raises(TaskVectorError, match=r"no config 'phi-1_5-ful'. Did you mean 'phi-1_5-full'\?"):
        config("--config", "phi-1_5-ful")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--books", "forget=a.txt"], "brings its own books"),
        (["--config", "gpt2"], "no books are given"),
        (["--base-model", "gpt2", "--books", "one.txt"], "write role=file"),
        (["--base-model", "gpt2", "--books", "keep=one.txt"], "the role is one of forget, aligned, retain"),
        (["--base-model", "gpt2", "--books", "retain=one.txt"], "no book is to be forgotten"),
        (["--task-vector", "a", "--adapter", "b"], "--adapter and --task-vector both give the task vector"),
        (["--prune-rows", "0"], "prune_rows=0.0 must be above 0"),
        (["--rank", "0"], "rank=0"),
        (["--scales", "nan"], "finite"),
        (["--protocol", "taskvec"], "Did you mean 'taskvec-v1'"),
        (["--learning-rate", "-1"], "learning_rate"),
        (["--prompt-length", "0"], "prompt_length=0"),
        (["--block-length", "48", "--block-stride", "100"], "block_stride=100 is larger than block_length=48"),
        (["--pretrain-epochs", "0"], "pretrain_epochs=0"),
        (["--checkpoint-every", "-1"], "checkpoint_every=-1"),
        (["--max-grad-norm", "0"], "max_grad_norm=0"),
        (["--epoch-vectors", "--task-vector", "a"], "the task vector is given"),
    ],
)
def test_settings_that_make_no_sense(arguments: list[str], message: str) -> None:
    with pytest.raises(TaskVectorError, match=message):
        config(*arguments)


def test_a_full_fine_tune_does_not_depend_on_the_settings_of_lora() -> None:
    """Its stage is shared by runs that differ in those only."""
    one, two = config("--lora-rank", "4"), config("--lora-rank", "8", "--method", "lora")
    assert one.training("full") == two.training("full") and one.training("lora") != two.training("lora")


# The ready files.

# Where the shared data is missing, the documented sizes stand in for the real configs.
_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "microsoft/phi-1_5": (
        "phi-1_5-native",
        "phi",
        {"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "max_position_embeddings": 2048},
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        "Phi-3-mini-4k-instruct",
        "phi3",
        {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096},
    ),
    "gpt2": ("gpt2", "gpt2", {}),
    "smollm2-135m": (
        "",
        "llama",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    ),
    "": (
        "",
        "llama",
        {"vocab_size": 32000, "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6, "max_position_embeddings": 256, "tie_word_embeddings": True},
    ),
}  # fmt: skip
SIZES = {"phi-1_5": 1.42e9, "phi-3-mini": 3.82e9, "gpt2": 124e6, "smollm2": 135e6, "stories15m": 15e6, "default": 1.3e6}


def on_meta(base: str) -> Any:
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    folder, kind, sizes = _ARCHITECTURES[base]
    beside = Path(__file__).resolve().parents[3] / "shared"
    real = Path(os.environ.get("HF_TASKVEC_SHARED", beside)) / "data" / "configs" / folder
    known = AutoConfig.from_pretrained(real) if folder and real.is_dir() else CONFIG_MAPPING[kind](**sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(known)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_file_fits_its_model(path: Path) -> None:
    from hf_taskvec.experiments.synthetic.tiny_phi import make_phi
    from hf_taskvec.training.lora import add_lora, check_targets

    values = yaml.safe_load(path.read_text("utf-8"))
    base = values.get("base_model", "")
    extra = [] if base == "embedded" else BOOKS
    found = config("--config", path.stem, *extra, *([] if base else ["--base-model", "stories"]))
    if base == "embedded":
        model = make_phi(found.vocabulary, hidden=found.hidden_size, layers=found.layers)
    else:
        model = on_meta(base)
    size = next(size for name, size in SIZES.items() if path.stem.startswith(name))
    assert model.num_parameters() == pytest.approx(size, rel=0.05)
    assert found.block_length <= model.config.max_position_embeddings
    words = found.asking.prompt_length + found.asking.answer_length
    assert 1.3 * words < model.config.max_position_embeddings
    settings = found.training("lora")
    check_targets(model, settings.targets)
    import torch

    with torch.device("meta"):
        adapted = add_lora(model, settings)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert 0 < trained < 0.25 * size
    assert 0.0 in found.scales and min(found.scales) == -1.0


def test_what_the_paper_states_is_used() -> None:
    full, lora = config("--config", "phi-1_5-full", *BOOKS), config("--config", "phi-1_5-lora", *BOOKS)
    assert full.base_model == lora.base_model == "microsoft/phi-1_5"
    assert (full.method, lora.method, lora.lora_rank) == ("full", "lora", 32)
    assert full.scales == lora.scales == [0.0, -0.2, -0.4, -0.6, -0.8, -1.0]
    for path in CONFIGS.glob("phi-*.yaml"):
        assert "What the paper states." in path.read_text() and "our choices." in path.read_text()


# The output folder.


def test_a_folder_belongs_to_one_config(tmp_path: Path) -> None:
    folder = claim(tmp_path / "out", {"seed": 0, "scales": (0.0, -1.0)})
    assert json.loads((folder / "config.json").read_text()) == {"seed": 0, "scales": [0.0, -1.0]}
    (folder / "stages").mkdir()
    claim(folder, {"seed": 0, "scales": [0.0, -1.0]})  # the same again
    with pytest.raises(TaskVectorError, match=r"another config \(seed: 0 → 1\). Choose another --output"):
        claim(folder, {"seed": 1, "scales": [0.0, -1.0]})
    claim(folder, {"seed": 1, "scales": [0.0, -1.0]}, force=True)
    assert json.loads((folder / "config.json").read_text())["seed"] == 1


def test_what_was_there_goes_when_a_folder_is_taken_over(tmp_path: Path) -> None:
    """Nothing of two runs lies side by side: neither models and tables, nor the answers of the earlier models."""
    folder = claim(tmp_path / "out", {"seed": 0})
    for name in ("model", "adapter", "vector", "store", "stages", "mine"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    for name in ("report.json", "report.md", "scores.png", "notes.txt"):
        (folder / name).touch()
    claim(folder, {"seed": 0})
    assert (folder / "report.json").exists()
    claim(folder, {"seed": 1}, force=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "mine", "notes.txt", "stages"]


def test_a_folder_without_results_is_free(tmp_path: Path) -> None:
    """A run that failed before its first stage, or was killed while it wrote its config, keeps nobody out."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".config.json.partial").write_text('{"se')
    claim(folder, {"seed": 0})
    claim(folder, {"seed": 1})
    assert json.loads((folder / "config.json").read_text())["seed"] == 1
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(TaskVectorError, match="holds other files"):
        claim(tmp_path, {"seed": 0})
    with pytest.raises(TaskVectorError, match="is a file"):
        claim(tmp_path / "thesis.tex", {"seed": 0})


# Stages.


@pytest.fixture
def bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `accelerate config` says it."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def quick(models: Any) -> tuple[Path, Any, TrainingSettings]:
    from support.launched_training import make_blocks

    return models.pair("phi").base, make_blocks(4), TrainingSettings(epochs=2, batch_size=4)


@pytest.fixture
def trained(quick: tuple[Path, Any, TrainingSettings], tmp_path: Path) -> Path:
    return Stages(tmp_path / "stages").train("one", *quick)


def test_a_stage_of_another_precision_is_another(
    trained: Path, bf16: None, quick: tuple[Path, Any, TrainingSettings]
) -> None:
    again = Stages(trained.parent).train("one", *quick)
    assert again != trained
    assert [json.loads((each / "training.json").read_text())["precision"] for each in (trained, again)] == [
        "fp32",
        "bf16",
    ]


def test_a_stage_keeps_vectors_and_checkpoints_on_request(
    trained: Path, quick: tuple[Path, Any, TrainingSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_taskvec.training import finetuning

    saved = []
    keep = finetuning.save_state
    monkeypatch.setattr(finetuning, "save_state", lambda *a, **k: (saved.append(len(a[2])), keep(*a, **k)))
    base, blocks, settings = quick
    each = dataclasses.replace(settings, batch_size=2)
    with_vectors = Stages(trained.parent, checkpoint_every=1).train("one", base, blocks, each, vectors=True)
    assert saved == [1, 2, 3]
    assert sorted(path.name for path in (with_vectors / "vectors").iterdir()) == ["epoch-1", "epoch-2"]
    again = Stages(trained.parent).train("one", *quick, vectors=True)  # the same training, but it has its vectors too
    assert again != trained and (again / "vectors/epoch-2/taskvec.json").exists()
    assert (again / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


# Memory.


def test_the_sweep_holds_two_models_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training is sharded or LoRA, what is evaluated may still be too large."""
    from transformers import PhiConfig

    from hf_taskvec.experiments.unlearning import memory_check

    model = PhiConfig()  # 1.4 billion parameters
    given = ["--joint-model", "a", "--task-vector", "b"]
    sweep_only = config("--config", "phi-1_5-full", *BOOKS, *given, "--reference-model", "c")
    monkeypatch.setattr(memory_check, "free_memory", lambda device: 8 * 2**30)
    with pytest.raises(
        TaskVectorError, match=r"sweep holds two models.* 10\.\d GiB, and 8.0 GiB are free.*--no-retrain"
    ):
        memory_check.check_experiment(sweep_only, model)
    memory_check.check_experiment(config("--config", "phi-1_5-full", *BOOKS, *given, "--no-retrain"), model)


# The sweep and the closing words.


def candidates(report: UnlearningReport, forget: dict[float, float], target: float) -> UnlearningReport:
    """The report as it would be if the forget book had these scores on the choosing half."""
    assert report.choice is not None
    made = tuple(Candidate(scale, score, target, score <= target, 0.0, False) for scale, score in forget.items())
    choice = dataclasses.replace(report.choice, scale=None, reason="no λ qualifies", candidates=made, confirmation=None)
    return dataclasses.replace(report, choice=choice)


@pytest.mark.parametrize(
    ("forget", "middle"),
    [
        ({0.0: 0.5, -0.5: 0.4, -1.0: 0.1}, -0.75),
        ({0.0: 0.5, -1.0: 0.1, -0.5: 0.2}, -0.25),
        ({0.0: 0.5, 0.3: 0.2, -0.5: 0.1}, 0.15),
        ({0.0: 0.5, -0.5: 0.4}, None),  # none forgets enough
        ({0.0: 0.2, -0.5: 0.1}, None),  # there was nothing to forget
        ({}, None),
    ],
)
def test_where_the_sweep_looks_closer(edited: Any, forget: dict[float, float], middle: float | None) -> None:
    assert _middle(candidates(edited.report, forget, 0.3)) == middle


def test_without_a_book_to_forget_it_does_not_look_closer(edited: Any) -> None:
    assert _middle(dataclasses.replace(edited.report, choice=None)) is None


def test_the_search_halves_the_interval(monkeypatch: pytest.MonkeyPatch, edited: Any, tmp_path: Path) -> None:
    """The forget score is 0.5 + λ/2 here, and 0.3 is the never-seen level: λ = −0.4."""
    asked: list[tuple[list[float], Any]] = []

    def swept(model: Any, edit: Any, scales: list[float], books: Any, **options: Any) -> UnlearningReport:
        asked.append((list(scales), options.get("output")))
        return candidates(edited.report, {scale: 0.5 + scale / 2 for scale in scales}, 0.3)

    monkeypatch.setattr(scale_refinement, "sweep", swept)
    scale_refinement.search(None, None, [0.0, -1.0], (), refine=3, output=tmp_path, seed=0)
    assert asked[-1] == ([0.0, -1.0, -0.5, -0.25, -0.375], tmp_path)
    assert all(output is None for _, output in asked[:-1])  # only the last is a report


def test_the_closing_words_without_a_chosen_scale(edited: Any) -> None:
    scales = list(edited.report.scales)
    none = candidates(edited.report, {0.0: 0.5, -0.5: 0.4, -1.0: 0.1}, 0.15)
    said = closing(none, {}, scales, "vector", {"the report": Path("report.md")})
    assert "No λ was chosen: no λ qualifies." in said and " *" not in said
    assert "before and after (λ = -1, where the book is nearest to its never-seen level)" in said
    nothing = closing(dataclasses.replace(none, choice=None), {}, scales, "vector", {})
    assert "No λ was chosen: no book is to be forgotten." in nothing and "(λ = -1):" in nothing


def test_what_theory_said_is_in_report_table_and_closing_words(edited: Any, tmp_path: Path) -> None:
    report = edited.report
    alike = Alignment("lamps", {"boats": 0.4}, recommend_scales(0.4))  # λ = −1 of a sweep, if it is near 0.4
    judged = dataclasses.replace(report, theory=alike.judged(report))
    assert judged.theory.scale == -1.0 and judged.theory.verdict == "hard"
    assert judged.theory.judged.sentence == str(report.judge(alike.recommendation.sweep_scale))
    judged.save(tmp_path, plots=False)
    assert UnlearningReport.load(tmp_path) == judged
    for text in (judged.to_markdown(), closing(judged, {}, list(report.scales), "vector", {})):
        for words in ("lamps and boats: +0.400", "The tasks are aligned", "Theory recommended λ=-1"):
            assert words in text
    assert "What theory said" not in report.to_markdown()


def test_a_theory_that_recommends_nothing(edited: Any) -> None:
    theory = Alignment("lamps", {"boats": 0.99}, recommend_scales(0.99)).judged(edited.report)
    assert (theory.verdict, theory.scale, theory.judged) == ("impossible", None, None)
    assert "nearly the same" in theory.verdicts[0] and len(theory.verdicts) == 1


def test_a_report_from_before_theory_is_read(edited: Any, tmp_path: Path) -> None:
    content = edited.report.to_dict()
    del content["theory"]
    assert UnlearningReport.from_dict(json.loads(json.dumps(content))) == edited.report


def test_no_path_is_recorded() -> None:
    found = config("--base-model", "/home/me/gpt2", "--books", "forget=/home/me/a.txt", "retain=/home/me/b.txt")
    assert "/home" not in json.dumps(found.resolved({"base_model": "gpt2 0123"}))
