"""A text model's vector on the model of pictures and text that contains it, and back; by a stated map."""

from pathlib import Path

import pytest
import torch
from support.tiny_classes import CLASSES
from support.tiny_models import tuned_copy
from transformers import LlamaForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import MismatchError, MissingNameError
from hf_taskvec.models.checkpoint import open_checkpoint

NAMES = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
BACK = {new: old for old, new in NAMES.items()}


def test_a_text_tower_s_vector_fits_the_model_that_contains_it_and_back(tmp_path: Path) -> None:
    whole = CLASSES["LlavaForConditionalGeneration"].make()
    text = LlamaForCausalLM(whole.config.text_config).eval()
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    tuned = tuned_copy(text)
    whole.save_pretrained(tmp_path / "whole")
    vector = TaskVector.from_finetuned(text, tuned)
    with pytest.raises(MismatchError, match=r"0 of .* names match"):
        vector.apply(tmp_path / "whole", tmp_path / "refused")
    moved = vector.moved(NAMES)
    moved.save(tmp_path / "vector")
    moved = TaskVector.load(tmp_path / "vector")
    assert "moved(" in moved.expression
    found = open_checkpoint(moved.apply(tmp_path / "whole", tmp_path / "edited")).tensors
    before = open_checkpoint(tmp_path / "whole").tensors
    expected = {f"language_model.{name}": each for name, each in tuned.state_dict().items()}
    for name, source in found.items():
        assert torch.equal(source.read(), expected[name] if name in expected else before[name].read()), name
    with moved.applied_to(whole):
        assert all(torch.equal(each, tuned.lm_head.weight) for each in whole.lm_head.parameters())
    with moved.moved(BACK).applied_to(text):
        assert all(torch.equal(a, b) for a, b in zip(text.parameters(), tuned.parameters(), strict=True))


def test_a_tied_embedding_is_not_moved_to_a_model_that_has_a_head_of_its_own() -> None:
    """It would get half of the change."""
    whole = CLASSES["LlavaForConditionalGeneration"].make()
    settings = {**whole.config.text_config.to_dict(), "tie_word_embeddings": True}
    text = LlamaForCausalLM(type(whole.config.text_config)(**settings))
    vector = TaskVector.from_finetuned(text, tuned_copy(text))
    with pytest.raises(MissingNameError, match=r"lm_head\.weight: names= does not say"):
        vector.moved({"model.": "language_model.model."})
    moved = vector.moved(NAMES)
    with pytest.raises(MismatchError, match=r"embed_tokens.weight, which is language_model\.lm_head\.weight as well"):
        moved.edit(whole)


def test_every_parameter_and_every_beginning_must_be_met() -> None:
    vector = TaskVector.from_tensors({"a.x": torch.ones(2), "b.x": torch.ones(2)})
    with pytest.raises(MissingNameError, match=r"b\.x: names= does not say .*filter"):
        vector.moved({"a.": "c."})
    with pytest.raises(MissingNameError, match=r"no parameter starts with 'd\.'"):
        vector.moved({"a.": "c.", "b.": "e.", "d.": "f."})
    with pytest.raises(MismatchError, match=r"both be called c\.x"):
        vector.moved({"a.": "c.", "b.": "c."})
    assert list(vector.moved({"": "model.", "b.": "head."})) == ["model.a.x", "head.x"]
