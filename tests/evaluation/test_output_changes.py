"""The size of what an edit changes in the output, against brute force in fp64."""

import math

import pytest
import torch
from support.tiny_books import HeadEdit, tiny_llama

from hf_taskvec.application.output_noise import OutputNoise
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking import output_changes
from hf_taskvec.evaluation.asking.batch_plan import tokenize_passages
from hf_taskvec.evaluation.asking.output_changes import output_change
from hf_taskvec.evaluation.asking.scalable_edits import NoEdit
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.passages import find_passages

SHORT = protocols.get(prompt_length=12, answer_length=6, samples=6)


def by_hand(model, edit, scale, passages, tokenizer) -> float:
    """Passage by passage, without padding."""
    squares = []
    for passage in tokenize_passages(passages, SHORT, tokenizer, model.config):
        ids = torch.tensor([passage.prompt_ids + passage.answer_ids])
        logits = []
        for each in (0.0, scale):
            edit.set_scale(each)
            with torch.no_grad():
                logits.append(model(input_ids=ids).logits[0, len(passage.prompt_ids) - 1 : -1].double())
        probabilities = [each.log_softmax(-1) for each in logits]  # the same, but for a constant at each position
        change = probabilities[1] - probabilities[0]
        squares.append((change - change.mean(-1, keepdim=True)).square().flatten())
    edit.set_scale(0.0)
    return torch.cat(squares).mean().sqrt().item()


@pytest.mark.parametrize("rows", [None, 2])
def test_it_is_the_root_mean_square_over_the_answers(monkeypatch, tokenizer, story, rows):
    model, passages = tiny_llama(), find_passages(story, SHORT)
    delta = 0.5 * torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    edit = HeadEdit(model, delta)
    if rows is not None:
        monkeypatch.setattr(output_changes, "rows_per_pass", lambda config, positions: rows)
    found = output_change(model, edit, -0.7, passages, protocol=SHORT, tokenizer=tokenizer)
    assert found == pytest.approx(by_hand(model, edit, -0.7, passages, tokenizer), rel=1e-4)
    assert torch.equal(model.lm_head.weight, edit.base)  # at λ=0 again


def test_noise_is_as_large_as_it_says(tokenizer, story):
    model, passages = tiny_llama(), find_passages(story, SHORT)
    with OutputNoise(model, 0.25) as noise:
        found = output_change(model, noise, 1.0, passages, protocol=SHORT, tokenizer=tokenizer)
    assert found == pytest.approx(0.25, rel=0.03)
    assert output_change(model, NoEdit(), 1.0, passages, protocol=SHORT, tokenizer=tokenizer) == 0.0


def test_what_has_no_size_is_refused(tokenizer, story):
    model, passages = tiny_llama(), find_passages(story, SHORT)
    with pytest.raises(BadValueError, match="no passage"):
        output_change(model, NoEdit(), 1.0, [], protocol=SHORT, tokenizer=tokenizer)
    edit = HeadEdit(model, torch.full_like(model.lm_head.weight, math.inf))
    with pytest.raises(BadValueError, match="NaN or infinite"):
        output_change(model, edit, 1.0, passages, protocol=SHORT, tokenizer=tokenizer)
