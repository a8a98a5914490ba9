"""Does a vector fit a model? What every way of applying one refuses first."""

import pytest
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import MismatchError


def test_a_change_of_a_tied_embedding_is_not_half_applied_to_an_untied_model(models, tmp_path):
    """In its own base the change is one of the head, too; an untied model would get half of it."""
    vector, untied = models.pair("llama", tie_word_embeddings=True).vector(), models.pair("llama").base
    for each in (vector, -0.5 * vector.compress(rank=2), TaskVector.load(vector.save(tmp_path / "saved"))):
        with pytest.raises(MismatchError, match=r"embed_tokens\.weight, which is lm_head\.weight as well.*exclude="):
            each.apply(untied, tmp_path / "out")
    live = AutoModelForCausalLM.from_pretrained(untied)
    with pytest.raises(MismatchError, match="has them apart"):
        vector.edit(live)
    vector.filter(exclude="*embed_tokens*").edit(live).restore()
