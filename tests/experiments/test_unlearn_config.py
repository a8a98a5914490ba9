"""The settings of the unlearning experiment: flags over files over defaults, and the ready files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.unlearn_experiment import BOOKS, CONFIGS, config

from hf_taskvec import TaskVectorError
from hf_taskvec.experiments.config_options import read_config
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig

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
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(TaskVectorError, match=message.replace("?", r"\?")):
        config("--config", str(tmp_path / "mine.yaml"))


def test_numbers_that_yaml_takes_for_texts_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("scales: [0, -1e-1, -1]\nmargin: 5e-2\nlora_targets: [q_proj]\nrank: null\n")
    found = config("--config", str(tmp_path / "mine.yaml"))
    assert (found.scales, found.margin, found.lora_targets, found.rank) == ([0.0, -0.1, -1.0], 0.05, ["q_proj"], None)


def test_a_missing_file_is_told_with_a_suggestion() -> None:
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
def test_settings_that_make_no_sense_are_refused(arguments: list[str], message: str) -> None:
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
        {
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        "Phi-3-mini-4k-instruct",
        "phi3",
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
        },
    ),
    "gpt2": ("gpt2", "gpt2", {}),
    "smollm2-135m": (
        "",
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "": (
        "",
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 288,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    ),
}
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
    from hf_taskvec.experiments.synthetic_library.tiny_phi import make_phi
    from hf_taskvec.training.trainable_parts import add_lora, check_targets

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
    check_targets(model, settings)
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


def test_no_choice_of_modules_trains_the_papers_share_of_parameters() -> None:
    """Rank 32 and 0.35 %: what docs/choices.md says of every choice of Phi-1.5's modules, counted by PEFT."""
    import itertools

    import torch
    from peft import LoraConfig, get_peft_model

    parts = {}
    for module in ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2", "lm_head", "embed_tokens"):
        model = on_meta("microsoft/phi-1_5")
        total = model.num_parameters()
        with torch.device("meta"):
            adapted = get_peft_model(model, LoraConfig(r=32, target_modules=[module]))
        parts[module] = adapted.get_nb_trainable_parameters()[0]
    chosen = [each for n in range(1, len(parts) + 1) for each in itertools.combinations(parts, n)]
    shares = {each: 100 * sum(parts[module] for module in each) / total for each in chosen}
    printed = [share for share in shares.values() if 0.345 <= share < 0.355]
    assert len(shares) == 255 and not printed
    near = sorted({round(share, 2) for share in shares.values() if 0.3 < share < 0.5})
    assert near == [0.34, 0.44, 0.46]  # one of attention with the head; two of attention; one with head and embedding
    assert shares["q_proj", "v_proj"] == pytest.approx(0.4436, abs=1e-4)


def test_no_path_is_recorded() -> None:
    found = config("--base-model", "/home/me/gpt2", "--books", "forget=/home/me/a.txt", "retain=/home/me/b.txt")
    assert "/home" not in json.dumps(found.resolved({"base_model": "gpt2 0123"}))


def test_an_audit_needs_a_model_that_never_saw_the_book() -> None:
    with pytest.raises(TaskVectorError, match=r"--audit needs a model that never saw the book: --reference-model"):
        config("--audit", "true", "--retrain", "false")
    assert config("--audit", "true", "--retrain", "false", "--reference-model", "never").audit
    with pytest.raises(TaskVectorError, match="'ssu-v1-authors' joins NLTK's tokens"):
        config("--config", "phi-1_5-ssu", *BOOKS, "--audit", "true")
    with pytest.raises(TaskVectorError, match=r"audit.passages"):
        config("--audit", "true", "--audit-passages", "0")
