"""What is tried next, and what the kinds of edits are made of."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.evaluation import Criteria
from hf_taskvec.evaluation.scoring.scale_choice import Candidate
from hf_taskvec.forgetting.edit_kinds import ForgetCase, TriedEdit, adjusted, check_kinds, direction, next_try

CRITERIA = Criteria(membership=0.1, retain_bound=0.1)


def candidate(relative: dict[str, float], membership: float | None = 0.0, lost: float = 0.0) -> Candidate:
    return Candidate(1.0, 0.0, 0.0, relative, {"loss": lost}, membership, False, lost, 1.0, False)


@pytest.mark.parametrize(
    ("reached", "stronger", "longer"),
    [
        (candidate({"rouge_l": 1.0, "loss": 0.7}), 1, 0),
        (candidate({"rouge_l": 1.0, "loss": 1.0}, membership=0.2), 1, 0),
        (candidate({"rouge_l": 1.0, "loss": 1.3}), -1, 0),
        (candidate({"rouge_l": 1.0, "loss": 1.0}, membership=-0.2), -1, 0),
        (candidate({"rouge_l": 0.7, "loss": 1.3}), 1, 0),  # still known is worse than beyond never seen
        (candidate({"rouge_l": 1.0, "loss": 1.0}, lost=0.2), 0, 1),
        (candidate({"rouge_l": 0.5, "loss": 0.5}, lost=0.2), 1, 1),
        (candidate({"rouge_l": 1.0, "loss": 1.0}, membership=0.2, lost=0.2), 0, 1),  # the kept books first
        (candidate({"rouge_l": 1.0}, membership=None), 0, 0),
    ],
)
def test_the_verdict_says_where_to_go(reached: Candidate, stronger: int, longer: int) -> None:
    strength, epochs = next_try(reached, CRITERIA, 1.5, 4)
    assert (strength > 1.5) - (strength < 1.5) == stronger
    assert (epochs > 4) == bool(longer) and epochs >= 4


def test_one_epoch_becomes_two() -> None:
    assert next_try(candidate({}, lost=0.9), CRITERIA, 1.0, 1) == (1.0, 2)


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (candidate({"rouge_l": 1.0, "loss": 1.0}), 0),
        (candidate({"rouge_l": 1.0, "loss": 0.7}, membership=-0.3), 1),  # still known is worst
        (candidate({"rouge_l": 1.3, "loss": 1.0}, membership=0.3), -1),
        (candidate({"rouge_l": 1.0, "loss": 1.0}, membership=0.2), 1),
        (candidate({"rouge_l": 1.0, "loss": 1.0}, membership=-0.2), -1),
        (candidate({"rouge_l": 1.0, "loss": 1.0}, membership=0.1), 0),  # on the bound is within it
        (candidate({"rouge_l": 1.0}, membership=None), 0),
    ],
)
def test_more_or_less(reached: Candidate, expected: int) -> None:
    assert direction(reached, CRITERIA) == expected


KNOWN, BEYOND = candidate({"loss": 0.7}), candidate({"loss": 1.3})


def test_a_repair_is_adjusted_without_training() -> None:
    vector = TaskVector.from_tensors({"w": torch.ones(2)}, name="forget")
    repaired = -1.6 * vector + TaskVector.from_tensors({"w": torch.tensor([0.5, 2.0])}, name="repair")
    first = TriedEdit("-1.6*forget, repaired (4 epochs)", "repair", repaired, 1.6, 4, steps=9, tokens=99, seconds=1.0)
    mine = case(vector=vector, criteria=CRITERIA)
    more = adjusted(mine, first, KNOWN)
    assert more is not None and more.name == "-1.6*forget, repaired (4 epochs), then -0.08*forget"
    assert (more.after, more.tokens, more.steps) == (0.08, 99, 9)
    torch.testing.assert_close(more.vector.dense("w"), torch.tensor([0.5, 2.0]) - 1.68)
    assert re.fullmatch(r"-1\.6[78]\d*\*forget \+ repair", more.vector.expression)  # one term, not two of one vector
    # Once more in the same direction, then half of the way back, then the steps become too small.
    farther = adjusted(mine, more, KNOWN)
    assert farther is not None and farther.after == 0.16
    back = adjusted(mine, farther, BEYOND)
    assert back is not None and back.after == 0.12 and back.name.endswith("then -0.12*forget")
    again = adjusted(mine, back, KNOWN)
    assert again is not None and again.after == 0.14
    assert adjusted(mine, again, BEYOND) is None
    less = adjusted(mine, first, BEYOND)
    assert less is not None and less.after == -0.08 and less.name.endswith("then +0.08*forget")
    torch.testing.assert_close(less.vector.dense("w"), torch.tensor([0.5, 2.0]) - 1.52)


def test_an_adjustment_ends() -> None:
    vector = TaskVector.from_tensors({"w": torch.ones(2)}, name="forget")
    edit: TriedEdit | None = TriedEdit("repaired", "repair", -1.0 * vector, 1.0, 4)
    mine, afters = case(vector=vector, criteria=CRITERIA), []
    while (edit := adjusted(mine, edit, KNOWN)) is not None:
        afters.append(edit.after)
    assert afters == [0.05, 0.1, 0.15, 0.2]  # never far from what was trained


def test_a_repair_that_cost_too_much_is_not_made_stronger() -> None:
    vector = TaskVector.from_tensors({"w": torch.ones(2)}, name="forget")
    edit, mine = TriedEdit("repaired", "repair", -1.0 * vector, 1.0, 4), case(vector=vector, criteria=CRITERIA)
    assert adjusted(mine, edit, candidate({"loss": 0.7}, lost=0.2)) is None
    assert adjusted(mine, edit, candidate({"loss": 1.3}, lost=0.2)) is not None  # weaker gives some of it back
    assert adjusted(mine, edit, candidate({"loss": 1.0})) is None  # nothing says where to go
    assert adjusted(mine, edit, None) is None


def test_kinds_are_checked() -> None:
    vector = TaskVector.from_tensors({"w": torch.ones(2)})
    assert check_kinds("repair", {}) == ("repair",)
    assert check_kinds(["negate", "repair", "negate"], {}) == ("negate", "repair")
    assert check_kinds(["project"], {"kept": vector}) == ("project",)
    with pytest.raises(MissingNameError, match=r"no kind of edit 'repare'\. Did you mean 'repair'"):
        check_kinds(["repare"], {})
    with pytest.raises(BadValueError, match="give keep_vectors"):
        check_kinds(["project"], {})
    with pytest.raises(BadValueError, match="no kind of edit is to be tried"):
        check_kinds([], {})


def case(**changes: Any) -> ForgetCase:
    names = ("address", "model", "vector", "keep_vectors", "forget_blocks", "keep_blocks", "reference")
    given: dict[str, Any] = dict.fromkeys((*names, "criteria", "repairing", "repairs"))
    return ForgetCase(**given | {"keep_vectors": {}} | changes)


def test_the_projected_edit_leaves_the_kept_ones_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    forget, *kept = (TaskVector.from_tensors({"w": torch.randn(4, 5, generator=draw)}) for _ in range(3))
    mine = case(vector=forget, keep_vectors=dict(zip("ab", kept, strict=True)))
    found = mine.projected(1.5).dense("w", torch.float64)
    span = torch.stack([vector.dense("w", torch.float64).flatten() for vector in kept], dim=1)
    flat = forget.dense("w", torch.float64).flatten()
    rest = flat - span @ torch.linalg.lstsq(span, flat[:, None]).solution[:, 0]
    expected = (-1.5 * rest + 0.5 * span.sum(dim=1)).view(4, 5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert mine.start_of_repair(1.5) == mine.projected(1.5)


def test_without_kept_vectors_the_book_s_own_is_negated() -> None:
    vector = TaskVector.from_tensors({"w": torch.ones(2)})
    assert case(vector=vector).start_of_repair(2.0) == -2.0 * vector
