"""Membership scores against plain Python in fp64, and AUCs by counting pairs."""

import copy
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny_models import make, shake
from support.token_rows import token_passages

from hf_taskvec.auditing.attacks.membership_tests import (
    MembershipScores,
    compare_membership,
    membership_aucs,
    membership_scores,
)
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.scoring.statistics import Draws

PASSAGES = token_passages(4, 6)
DRAWS = Draws(resamples=200)


def lively(architecture):
    return shake(make(architecture), 0.3, seed=7)


def by_hand(model, passage):
    """Loss, zlib, Min-K % and Min-K %++ of one passage without padding, token by token."""
    model = copy.deepcopy(model).double()
    ids = torch.tensor([passage.prompt_ids + passage.answer_ids])
    with torch.no_grad():
        logits = model(ids).logits[0].tolist()
    log_probs, z_scores = [], []
    for place, token in enumerate(passage.answer_ids, start=len(passage.prompt_ids) - 1):
        total = math.fsum(math.exp(each) for each in logits[place])
        every = [each - math.log(total) for each in logits[place]]
        mean = math.fsum(math.exp(each) * each for each in every)
        deviation = math.sqrt(math.fsum(math.exp(each) * (each - mean) ** 2 for each in every))
        log_probs.append(every[token])
        z_scores.append((every[token] - mean) / deviation)
    count = max(1, int(0.4 * len(log_probs)))
    return (
        math.fsum(log_probs) / len(log_probs),
        math.fsum(log_probs) / len(zlib.compress(passage.text.answer.encode("utf-8"))),
        math.fsum(sorted(log_probs)[:count]) / count,
        math.fsum(sorted(z_scores)[:count]) / count,
    )


@pytest.mark.parametrize("architecture", ["phi", "llama", "gpt2", "opt", "gpt_neox"])
def test_scores_are_those_of_plain_arithmetic(architecture):
    model = lively(architecture)
    found = membership_scores(model, PASSAGES, batch_size=4)
    expected = np.array([by_hand(model, passage) for passage in PASSAGES]).T
    for scores, values in zip(found.by_test.values(), expected, strict=True):
        np.testing.assert_allclose(scores, values, atol=1e-4)
    assert tuple(found.by_test) == ("loss", "zlib", "min_k", "min_k_plus_plus")
    one_by_one = membership_scores(model, PASSAGES, batch_size=1)
    np.testing.assert_allclose(found.min_k_plus_plus, one_by_one.min_k_plus_plus, atol=1e-4)


def test_the_reference_test_is_the_difference_of_losses():
    one, other = (membership_scores(lively(name), PASSAGES) for name in ("phi", "llama"))
    found = one.against(other)
    np.testing.assert_array_equal(found.reference, one.loss - other.loss)
    assert list(found.by_test)[-1] == "reference" and one.reference is None
    with pytest.raises(BadValueError, match="6 passages were scored with one model and 2 with the other"):
        one.against(membership_scores(lively("phi"), PASSAGES[:2]))


def test_a_model_that_is_certain_has_finite_scores():
    """All on one token: the variance is 0. And tokens that can never come have a log-probability of −∞."""
    model = make("llama")
    (passage,) = token_passages(0, 1)

    def certain(module, args, output):
        output = torch.full_like(output, -1e4)
        output[..., 3] = 1e4
        return output

    handle = model.lm_head.register_forward_hook(certain)
    found = membership_scores(model, [replace(passage, answer_ids=(3, 3, 3))])
    assert found.loss == found.min_k == found.min_k_plus_plus == [0.0]
    handle.remove()

    plain = membership_scores(model, [passage])
    allowed = torch.zeros(20).index_fill(0, torch.tensor([0, 1, 2]), -torch.inf)  # no passage has these tokens
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output + allowed)
    masked = membership_scores(model, [passage])
    handle.remove()
    assert np.isfinite([*masked.by_test.values()]).all() and masked.loss > plain.loss


def test_a_model_that_knows_the_seen_passages_is_told_from_one_that_does_not(memorised):
    known, unknown, half = (
        [membership_scores(model, passages) for passages in (memorised.seen, memorised.held_out)]
        for model in (memorised.untouched, memorised.reference, memorised.halfway)
    )
    known, half = ([own.against(base) for own, base in zip(each, unknown, strict=True)] for each in (known, half))
    unknown = [own.against(own) for own in unknown]
    found = compare_membership(*known, *unknown, DRAWS)
    assert set(found) == {"loss", "zlib", "min_k", "min_k_plus_plus", "reference"}
    for test, compared in found.items():
        above, below = known[0].by_test[test], known[1].by_test[test]
        pairs = np.mean([(a > b) + 0.5 * (a == b) for a in above for b in below])
        assert compared.auc.value == pytest.approx(pairs) and pairs > 0.95
        assert compared.difference.value == compared.auc.value - compared.reference_auc.value
        assert compared.difference.low > 0
        reference = compared.reference_auc.value
        assert compared.priv_leak == pytest.approx(100 * ((1 - pairs) - (1 - reference)) / (1 - reference))
        assert compared.priv_leak < -80
    assert found["reference"].reference_auc.value == 0.5
    same = compare_membership(*half, *half, DRAWS)
    assert all(each.difference.low == each.difference.high == 0 for each in same.values())
    assert all(each.priv_leak == (None if each.auc.value == 1 else 0) for each in same.values())


def test_text_that_is_avoided_shows_as_well():
    seen, held_out = MembershipScores(*np.full((4, 5), -9.0)), MembershipScores(*np.full((4, 5), -3.0))
    draw = np.random.default_rng(0)
    never = [MembershipScores(*draw.normal(size=(4, 5))) for _ in range(2)]
    assert all(each.value == 0 for each in membership_aucs(seen, held_out, DRAWS).values())
    found = compare_membership(seen, held_out, *never, DRAWS)
    assert all(each.difference.value < 0 < each.priv_leak for each in found.values())


def test_only_tests_that_all_have_are_compared():
    one = MembershipScores(*np.arange(12.0).reshape(4, 3))
    assert "reference" not in membership_aucs(one.against(one), one, DRAWS)
    assert "reference" not in compare_membership(one.against(one), one.against(one), one, one, DRAWS)
    with pytest.raises(BadValueError, match="3 scores of positive passages and the second 2"):
        compare_membership(one, one, MembershipScores(*np.zeros((4, 2))), one, DRAWS)


def test_broken_weights_and_no_passages_are_refused():
    model = lively("gpt2").train()
    with pytest.raises(BadValueError, match="no passages"):
        membership_scores(model, [])
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = float("inf")
    with pytest.raises(BadValueError, match="NaN or infinite at passage book/seen/0"):
        membership_scores(model, PASSAGES)
    assert model.training
