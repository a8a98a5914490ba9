"""Unlearning depth against a patched model that runs every layer, one passage at a time, in fp64."""

import copy

import numpy as np
import pytest
import torch
from support.tiny_models import make, shake, tuned_copy
from support.token_rows import token_passages

from hf_taskvec.auditing.attacks import answer_batches
from hf_taskvec.auditing.attacks.unlearning_depth import unlearning_depth
from hf_taskvec.errors import BadValueError, MismatchError

LAYERS = {
    "phi": "model.layers",
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "gpt_neo": "transformer.h",  # its layers give tuples
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
}
PASSAGES = token_passages(3)


def three(architecture):
    untouched = shake(make(architecture), 0.3, seed=7)
    return {
        "untouched": untouched,
        "edited": tuned_copy(untouched, 0.1, seed=8),
        "reference": tuned_copy(untouched, 0.6, seed=9),
    }


def drops_by_hand(untouched, source, passage, layers):
    """Of each layer, in fp64: the answer's mean log-probability without and with the source's states there."""
    untouched, source = copy.deepcopy(untouched).double(), copy.deepcopy(source).double()
    ids = torch.tensor([passage.prompt_ids + passage.answer_ids])
    span = slice(len(passage.prompt_ids) - 1, ids.shape[1] - 1)

    def score():
        with torch.no_grad():
            lines = untouched(ids, use_cache=False).logits[0, span].log_softmax(-1)
        return float(np.mean([float(line[token]) for line, token in zip(lines, passage.answer_ids, strict=True)]))

    before, drops = score(), []
    for own, other in zip(untouched.get_submodule(layers), source.get_submodule(layers), strict=True):
        kept = []
        handle = other.register_forward_hook(
            lambda m, a, out, kept=kept: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            source(ids, use_cache=False)
        handle.remove()

        def patch(module, args, out, kept=kept):
            hidden = (out[0] if isinstance(out, tuple) else out).clone()
            hidden[:, span] = kept[0][:, span]
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        handle = own.register_forward_hook(patch)
        drops.append(before - score())
        handle.remove()
    return drops


@pytest.mark.parametrize("architecture", LAYERS)
def test_drops_and_score_are_those_of_a_patched_model(architecture):
    models = three(architecture)
    found = unlearning_depth(**models, passages=PASSAGES, batch_size=2)
    untouched, layers = models["untouched"], LAYERS[architecture]
    d1 = [drops_by_hand(untouched, models["reference"], passage, layers) for passage in PASSAGES]
    d2 = [drops_by_hand(untouched, models["edited"], passage, layers) for passage in PASSAGES]
    np.testing.assert_allclose(found.reference_drops, d1, atol=1e-4)
    np.testing.assert_allclose(found.edited_drops, d2, atol=1e-4)
    np.testing.assert_allclose(found.layer_reference_drops, np.mean(d1, axis=0), atol=1e-4)
    np.testing.assert_allclose(found.layer_edited_drops, np.mean(d2, axis=0), atol=1e-4)

    scores = []
    for one, other in zip(d1, d2, strict=True):  # the definition, as it is written
        terms = [(a, a * min(max(b / a, 0), 1)) for a, b in zip(one, other, strict=True) if a > 0.05]
        scores.append(sum(b for _, b in terms) / sum(a for a, _ in terms) if terms else np.nan)
    np.testing.assert_allclose(found.passage_scores, scores, atol=1e-3)
    assert np.isfinite(scores).sum() >= 2
    assert found.score == pytest.approx(np.nanmean(scores), abs=1e-3)
    assert found.reason is None
    assert found.checks is not None
    assert found.checks.untouched == pytest.approx(0, abs=1e-4)
    assert found.checks.reference == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("architecture", LAYERS)
def test_the_untouched_model_scores_0_and_the_reference_1(architecture):
    models = three(architecture)
    for edited, score in (("untouched", 0), ("reference", 1)):
        found = unlearning_depth(**{**models, "edited": models[edited]}, passages=PASSAGES)
        assert found.score == pytest.approx(score, abs=1e-4)
        np.testing.assert_allclose(found.numerators, score * found.denominators, atol=1e-4)


def test_a_model_that_learned_half_way_lies_between(memorised):
    found = unlearning_depth(
        edited=memorised.halfway,
        untouched=memorised.untouched,
        reference=memorised.reference,
        passages=memorised.seen,
    )
    assert (found.denominators > 0).all() and 0.05 < found.score < 0.99
    assert found.layer_reference_drops.min() > 0.5
    d1, d2 = found.layer_reference_drops, found.layer_edited_drops
    assert found.score_of_means == pytest.approx(np.clip(d2, 0, d1).sum() / d1.sum(), abs=1e-9)


def test_passages_that_nobody_knows_have_no_score_but_a_reason():
    models = three("phi")
    found = unlearning_depth(**{**models, "reference": models["untouched"]}, passages=PASSAGES)
    assert found.score is None and found.score_of_means is None and found.checks is None
    assert "not above 0.05" in found.reason and "does not know these passages better" in found.reason
    assert np.isnan(found.passage_scores).all() and not found.numerators.any() and not found.denominators.any()


def test_a_threshold_leaves_out_layers():
    models = three("llama")
    low, high = (unlearning_depth(**models, passages=PASSAGES, threshold=each) for each in (0, 0.3))
    np.testing.assert_array_equal(low.reference_drops, high.reference_drops)
    np.testing.assert_allclose(low.denominators, np.clip(low.reference_drops, 0, None).sum(axis=1))
    assert (high.denominators < low.denominators).any()
    for wrong in (-0.1, float("nan"), "0.05"):
        with pytest.raises(BadValueError, match="threshold="):
            unlearning_depth(**models, passages=PASSAGES, threshold=wrong)


def test_batches_and_bounds_of_memory_change_nothing(monkeypatch):
    models = three("gpt2")
    whole = unlearning_depth(**models, passages=PASSAGES, batch_size=5)
    rows = []
    handle = models["edited"].transformer.register_forward_hook(lambda m, args, out: rows.append(len(out[0])))
    assert unlearning_depth(**models, passages=PASSAGES, batch_size=5) and rows == [5]
    monkeypatch.setattr(answer_batches, "_STATES_BYTES", 1)
    bounded = unlearning_depth(**models, passages=PASSAGES, batch_size=5)
    handle.remove()
    assert rows == [5, 1, 1, 1, 1, 1]
    np.testing.assert_allclose(bounded.edited_drops, whole.edited_drops, atol=1e-5)
    np.testing.assert_allclose(bounded.reference_drops, whole.reference_drops, atol=1e-5)


def test_models_in_different_dtypes_and_modes_are_compared_and_left_alone():
    models = three("gpt2")  # it has dropout
    expected = unlearning_depth(**models, passages=PASSAGES)
    models["edited"].train()
    models["reference"].to(torch.float64)
    found = unlearning_depth(**models, passages=PASSAGES)
    np.testing.assert_allclose(found.reference_drops, expected.reference_drops, atol=1e-4)
    np.testing.assert_allclose(found.edited_drops, expected.edited_drops, atol=1e-4)
    assert found.score == pytest.approx(expected.score, abs=1e-3)
    assert models["edited"].training and not models["untouched"].training
    for model in models.values():
        assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_models_of_other_shapes_are_refused():
    models = three("phi")
    for role, other, message in (
        ("edited", make("llama"), "edited model's architecture is LlamaForCausalLM, the untouched model's Phi"),
        (
            "reference",
            make("phi", num_hidden_layers=3),
            "reference model's number of layers is 3, the untouched model's 2",
        ),
        ("reference", make("phi", hidden_size=32), "hidden size is 32"),
        ("edited", make("phi", vocab_size=24), "vocabulary size is 24"),
    ):
        with pytest.raises(MismatchError, match=message):
            unlearning_depth(**{**models, role: other}, passages=PASSAGES)
    with pytest.raises(BadValueError, match="needs a live model, not str"):
        unlearning_depth(**{**models, "edited": "me/model"}, passages=PASSAGES)


def test_broken_weights_are_refused_by_the_passage():
    models = three("opt")
    with torch.no_grad():
        models["edited"].model.decoder.layers[0].fc2.bias[0] = float("nan")
    with pytest.raises(BadValueError, match="passage book/seen/0"):
        unlearning_depth(**models, passages=PASSAGES)
