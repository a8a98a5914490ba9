"""Stitched models against features that are mixed by hand."""

import pytest
import torch
from support.tiny_models import DENSE, make, tuned_copy
from support.token_rows import rows

from hf_taskvec import TaskVector
from hf_taskvec.analysis import stitch
from hf_taskvec.errors import BadValueError


@pytest.mark.parametrize("architecture", DENSE)
def test_a_model_stitched_with_its_own_features_is_itself(architecture: str) -> None:
    """Of θ_0's own features it is θ_0; of a fine-tune's it is another model."""
    base = make(architecture)
    tuned = tuned_copy(base, 0.1)
    vector = TaskVector.from_finetuned(base, tuned)
    inputs = torch.tensor([rows(0)[0]])
    with torch.no_grad():
        plain = base(inputs).logits
    for layer in (0, 1):
        same = stitch(base, layer, [(0.25, None), (0.75, None)])(input_ids=inputs)
        torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-5)
    mixed = stitch(base, 0, [(1.0, vector), (0.0, None)])(input_ids=inputs)
    assert not torch.allclose(mixed, plain, atol=1e-3)
    assert torch.isfinite(mixed).all() and mixed.shape == plain.shape


def test_a_stitched_model_takes_what_the_model_takes(trio) -> None:
    base, inputs = trio[0], torch.tensor(rows(0, 1))
    call = stitch(base, 0, [(1.0, None)])
    expected = call(input_ids=inputs)
    assert torch.equal(call(inputs), expected)
    assert torch.equal(call(inputs, attention_mask=torch.ones_like(inputs), use_cache=False), expected)
    with pytest.raises(BadValueError, match="no cache"):
        call(inputs, use_cache=True)


def test_stitching_replaces_one_layers_features(trio) -> None:
    base, one, other = trio
    a, b = TaskVector.from_finetuned(base, one), TaskVector.from_finetuned(base, other)
    inputs = torch.tensor([rows(0)[0]])
    found = stitch(base, -1, [(0.5, a), (0.5, b)])(input_ids=inputs)
    features = sum(0.5 * hidden_all(model, inputs) for model in (one, other))
    with torch.no_grad():
        expected = base.lm_head(base.model.final_layernorm(features))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def hidden_all(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    kept = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda m, a, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(inputs)
    handle.remove()
    return kept[0]


def test_bad_parts_and_layers_are_refused(trio) -> None:
    base, one, _ = trio
    vector = TaskVector.from_finetuned(base, one)
    with pytest.raises(BadValueError, match="needs a live model, not str"):
        stitch("me/model", 0, [(1.0, None)])  # type: ignore[arg-type]
    for part in (vector, (float("nan"), None), (1.0,)):
        with pytest.raises(BadValueError, match=r"is \(weight, vector\)"):
            stitch(base, 0, [part])  # type: ignore[list-item]
    with pytest.raises(BadValueError, match="'me/vector' is not a task vector"):
        stitch(base, 0, [(1.0, "me/vector")])  # type: ignore[list-item]
    with pytest.raises(BadValueError, match="layer=2"):
        stitch(base, 2, [(1.0, None)])
    with pytest.raises(BadValueError, match="one part"):
        stitch(base, 0, [])


def test_forgetting_in_feature_space_needs_no_negated_model(trio) -> None:
    """Eq. (4): where a layer's features are linear in what changes, `2 f(θ_0) − f(θ_0 + λτ)` is `f(θ_0 − λτ)`."""
    base, one, _ = trio
    vector = 0.7 * TaskVector.from_finetuned(base, one).filter("*.layers.1.mlp.fc2.*")
    inputs = torch.tensor([rows(0)[0]])
    found = stitch(base, 1, [(2.0, None), (-1.0, vector)])(input_ids=inputs)
    with (-vector).applied_to(base), torch.no_grad():
        negated = base(inputs).logits
    with torch.no_grad():
        plain = base(inputs).logits
    torch.testing.assert_close(found, negated, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain, negated, atol=1e-3)
