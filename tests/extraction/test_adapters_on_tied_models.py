"""Adapters on models whose head is tied to the embedding: what PEFT computes before merging, or a refusal by name."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.tiny_adapters import Adapter, adapter
from support.tiny_models import TinyModels
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector, TaskVectorError

warnings.filterwarnings("ignore", module="peft")
pytestmark = pytest.mark.filterwarnings("ignore")

EMBEDDING = {"llama": "embed_tokens", "gpt2": "wte"}
STORED = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
TARGET = {"llama": "q_proj", "gpt2": "c_attn"}
TOKENS = torch.arange(20)[None]


def tied(models: TinyModels, architecture: str) -> Path:
    return models.pair(architecture, tie_word_embeddings=True).base


def untied(base: Path, folder: Path) -> Path:
    """A copy of the base, made as the refusals say."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    return folder


def made_with(models: TinyModels, folder: Path, architecture: str, **config: Any) -> Adapter:
    options = {"target_modules": [TARGET[architecture]], **config}
    return adapter(tied(models, architecture), folder / "adapter", **options)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def in_peft(made: Adapter) -> torch.Tensor:
    """What PEFT computes with the stored adapter, not merged."""
    base = AutoModelForCausalLM.from_pretrained(made.base, dtype=torch.float64)
    return logits(PeftModel.from_pretrained(base, made.folder))


def applied(vector: TaskVector, base: Path, output: Path) -> torch.Tensor:
    vector.apply(base, output, overwrite=True)
    return logits(AutoModelForCausalLM.from_pretrained(output, dtype=torch.float64))


def assert_exact(vector: TaskVector, made: Adapter, base: Path, folder: Path) -> None:
    reference = in_peft(made)
    plain = logits(AutoModelForCausalLM.from_pretrained(made.base, dtype=torch.float64))
    assert (reference - plain).abs().max() > 1e-2  # the adapter does something
    torch.testing.assert_close(applied(vector, base, folder / "out"), reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["modules_to_save", "LoRA", "DoRA"])
def test_a_change_of_the_embedding_alone_takes_an_untied_base(
    how: str, architecture: str, models: TinyModels, tmp_path: Path
) -> None:
    embedding, targets = EMBEDDING[architecture], [TARGET[architecture]]
    config: dict[str, Any] = (
        {"modules_to_save": [embedding]}
        if how == "modules_to_save"
        else {"target_modules": [*targets, embedding], "use_dora": how == "DoRA"}
    )
    made = made_with(models, tmp_path, architecture, **config)
    for given in (made.folder, made.live):
        with pytest.raises(
            TaskVectorError,
            match=rf"changes {STORED[architecture]} alone.*ties lm_head\.weight.*base=.*tie_word_embeddings = False",
        ):
            TaskVector.from_adapter(given)
    base = untied(made.base, tmp_path / "untied")
    assert_exact(made.vector(base=base), made, base, tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["modules_to_save", "LoRA", "tokens"])
def test_a_change_of_the_head_alone_stays_one(how: str, architecture: str, models: TinyModels, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "modules_to_save": {"modules_to_save": ["lm_head"]},
        "LoRA": {"target_modules": [TARGET[architecture], "lm_head"]},
        "tokens": {"trainable_token_indices": {"lm_head": [7, 3]}},
    }[how]
    made = made_with(models, tmp_path, architecture, **config)
    base = untied(made.base, tmp_path / "untied")
    for vector in (made.vector(), TaskVector.from_adapter(made.live)):
        assert "lm_head.weight" in vector and STORED[architecture] not in vector
        with pytest.raises(TaskVectorError, match=r"changes lm_head\.weight alone.*untie"):
            vector.apply(made.base, tmp_path / "out")
        assert_exact(vector, made, base, tmp_path)


@pytest.mark.parametrize("how", ["modules_to_save", "LoRA", "DoRA", "tokens"])
def test_different_changes_of_both_stay_two(how: str, models: TinyModels, tmp_path: Path) -> None:
    both = ["embed_tokens", "lm_head"]
    config: dict[str, Any] = {
        "modules_to_save": {"modules_to_save": both},
        "LoRA": {"target_modules": both},
        "DoRA": {"target_modules": both, "use_dora": True},
        "tokens": {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [2, 5]}},
    }[how]
    made = made_with(models, tmp_path, "llama", **config)
    base = untied(made.base, tmp_path / "untied")
    with pytest.raises(TaskVectorError, match=r"lm_head\.weight alone.*untie"):
        made.vector().apply(made.base, tmp_path / "out")
    assert_exact(made.vector(), made, base, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
        {"trainable_token_indices": [1, 5]},
        {"trainable_token_indices": {"embed_tokens": [1, 5]}},
        {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [1, 5]}},
    ],
    ids=str,
)
def test_what_peft_ties_is_one_change(config: dict[str, Any], models: TinyModels, tmp_path: Path) -> None:
    made = made_with(models, tmp_path, "llama", **config)
    for vector in (made.vector(), TaskVector.from_adapter(made.live)):
        assert STORED["llama"] in vector and "lm_head.weight" not in vector
        assert_exact(vector, made, made.base, tmp_path)


def test_tokens_beside_another_change_of_the_head_are_refused(models: TinyModels, tmp_path: Path) -> None:
    made = made_with(
        models, tmp_path, "llama", target_modules=["q_proj", "lm_head"], trainable_token_indices={"embed_tokens": [1]}
    )
    with pytest.raises(TaskVectorError, match=r"trains tokens of model\.embed_tokens\.weight.*on an untied base"):
        made.vector()


def test_whether_an_embedding_is_tied_is_not_guessed(models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("llama").base  # untied
    made = adapter(base, tmp_path / "adapter", target_modules=["embed_tokens"])
    config = made.folder / "adapter_config.json"
    config.write_text(config.read_text().replace(str(base), str(tmp_path / "gone")))
    with pytest.raises(TaskVectorError, match=r"whether model\.embed_tokens\.weight is also the.*head.*Pass base="):
        made.vector()
    assert set(made.vector(base=base)) == {STORED["llama"]}
