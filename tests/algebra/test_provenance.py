"""Where a vector comes from, and its expression: what it says is what the vector is."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector, combine
from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.provenance import Origin, Provenance
from hf_taskvec.publishing.notation import as_code, evaluate_expression, names_in

# Larger than what a fingerprint samples of a tensor, changed where it does not look.
LARGE, UNSEEN = 100_000, 10_000


def unseen(value: float, name: str = "g") -> TaskVector:
    tensor = torch.ones(LARGE)
    tensor[UNSEEN] = value
    return TaskVector.from_tensors({"w": tensor}, name=name)


def test_vectors_that_differ_outside_the_samples_stay_apart() -> None:
    one, other = unseen(1.0), unseen(1.5)
    assert [each.tuned for each in one.provenance.origins] == [each.tuned for each in other.provenance.origins]
    assert (one - other).norm() == 0.5
    assert (one - other).expression == "g - g_2"
    assert combine([one, other], "ties").expression == "combine([g, g_2], 'ties')"
    assert (one - one).expression == (one.filter() - one.filter()).expression == "0"


def test_fine_tunes_that_differ_outside_the_samples_stay_apart(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("llama", vocab_size=600, hidden_size=64)
    folders = [tmp_path / number / "tuned" for number in "12"]
    for folder in folders:
        shutil.copytree(pair.tuned, folder)
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    flat = tensors["model.embed_tokens.weight"].view(-1)
    flat[flat.numel() // 4] += 1.0
    save_file(tensors, file, {"format": "pt"})
    one, other = (TaskVector.from_finetuned(pair.base, folder) for folder in folders)
    assert one.provenance == other.provenance
    assert (one - other).norm() > 0 and (one - other).expression == "tuned - tuned_2"
    again = TaskVector.from_finetuned(pair.base, folders[0])
    assert (one - again).expression == "0" and not len(one - again)


def test_a_saved_vector_is_itself_and_not_what_was_rounded(tmp_path: Path) -> None:
    vector = TaskVector.from_tensors({"w": torch.tensor([1 / 3, 2.0])}, name="v")
    (vector - 0.5 * TaskVector.from_tensors({"w": torch.ones(2)}, name="w")).save(tmp_path / "whole")
    vector.save(tmp_path / "rounded", dtype="bfloat16")
    one, other = (TaskVector.load(tmp_path / "whole") for _ in range(2))
    assert (one - other).expression == "0" and not len(one - other)
    assert (one.compress(rank=1) - other.compress(rank=1)).expression == "0"
    rounded = vector - TaskVector.load(tmp_path / "rounded")
    assert rounded.norm() > 0 and rounded.expression == "v - v_2"


def test_vectors_of_one_name_may_meet_in_any_order() -> None:
    one, other = unseen(1.0), unseen(2.0)
    assert ((one - other) + (other - one)).expression == "0"
    assert ((one - other) + (other + one)).expression == "2*g"
    assert combine([one - other, other - one], "ties").expression == "combine([g - g_2, g_2 - g], 'ties')"


def test_what_a_named_vector_is_made_of_is_told_under_the_right_names() -> None:
    one, other, third = unseen(1.0), unseen(2.0), unseen(3.0)
    both = (one - third).named("x") + (other + third).named("x")
    told = {origin.label: origin.how for origin in both.provenance.origins}
    assert both.expression == "x + x_2"
    assert told["x"] == "g - g_2" and told["x_2"] == "g_3 + g_2"


def test_another_label_leaves_patterns_options_and_functions_alone() -> None:
    one, other = (
        TaskVector.from_tensors({"h.rank.weight": torch.full((2, 2), value)}, name="rank") for value in (1.0, 2.0)
    )
    assert (one + other.filter(include="*.rank.*").compress(rank=1)).expression == (
        "rank + compress(filter(rank_2, include=['*.rank.*']), rank=1)"
    )


PATTERN = re.compile(r"MLP\.fc1 | it's", re.IGNORECASE | re.VERBOSE)


@pytest.mark.parametrize(
    "build",
    [
        lambda v: v.filter(include=[]),
        lambda v: v.filter(exclude=[]),
        lambda v: v.filter(include=(name for name in ["h.0.mlp.*"])),
        lambda v: v.filter(include=re.compile("^h.*fc1")),
        lambda v: v.filter(include=[PATTERN, "bias"], exclude=re.compile("a{2}" * 100 + "|bias")),
        lambda v: v.scale({PATTERN: 0.5, "bias": 2}, default=0.25),
        lambda v: v.prune_rows(0.5, re.compile("attn")),
        lambda v: v.compress(rank=1, dtype=torch.bfloat16),
        lambda v: v / 3,
        lambda v: (0.1 + 0.2) * v.filter(include="bias"),
        lambda v: combine([v, v], "magnitude", [0.5, 1 / 3], density=(0.5, 0.25)),
    ],
)
def test_the_recorded_code_makes_the_same_vector(build: Callable[[TaskVector], TaskVector]) -> None:
    torch.manual_seed(0)
    names = ("h.0.mlp.fc1.weight", "h.0.attn.fc1.weight", "bias")
    vector = TaskVector.from_tensors({name: torch.randn(4, 4) for name in names}, name="v")
    made = build(vector)
    assert names_in(made.expression) == ["v"]
    code = as_code(made.provenance).replace("v = TaskVector.from_tensors(...)", "v = given")
    found: dict[str, TaskVector] = {}
    exec(code, {"TaskVector": TaskVector, "given": vector}, found)
    for again in (evaluate_expression(made.expression, {"v": vector}), found["vector"]):
        assert list(again) == list(made) and again.expression == made.expression
        for name in made:
            assert torch.equal(again.dense(name, "float64"), made.dense(name, "float64"))


def test_origins_that_do_not_know_what_they_stand_for_go_by_their_record() -> None:
    one, other = (Provenance.of(Origin("a", how)) for how in ("given", "made"))
    assert one.plus(one.scaled(-1.0)).expression == "0"
    assert one.plus(other).expression == "a + a_2"


@pytest.mark.parametrize(("name", "label"), [("me/lambda", "v_lambda"), ("me/7b", "v_7b"), ("./a.b", "a_b")])
def test_a_label_is_an_identifier(name: str, label: str) -> None:
    assert label_for(name) == label
