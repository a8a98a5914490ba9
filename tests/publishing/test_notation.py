"""The algebra's notation: read safely, and written as code that makes the vector again."""

from pathlib import Path

import pytest
import torch
from support.edited_model import Edited

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.publishing.notation import as_code, evaluate_expression, names_in


def vectors() -> dict[str, TaskVector]:
    torch.manual_seed(0)
    return {name: TaskVector.from_tensors({"w": torch.randn(4, 4)}, name=name) for name in ("a", "b")}


def test_an_expression_is_the_operators_result() -> None:
    given = vectors()
    a, b = given["a"], given["b"]
    for expression, expected in (
        ("-0.6*a + 0.2*b", -0.6 * a + 0.2 * b),
        ("+a/2 - (b - a)", a / 2 - (b - a)),
        ("compress(a - b, rank=2)", (a - b).compress(rank=2)),
        ("scale(a, by={'*': 0.5})", a.scale({"*": 0.5})),
    ):
        assert torch.equal(evaluate_expression(expression, given).dense("w"), expected.dense("w")), expression
        assert set(names_in(expression)) <= {"a", "b"}


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 + 1", "is a number, not a task vector"),
        ("a / 0", "divides by 0"),
        ("a * b", "all that vectors do"),
        ("a + 1", "all that vectors do"),
        ("a.save('x')", "no place in an expression"),
        ("compress(1, rank=2)", "takes a task vector first"),
        ("compress(a, rank=b)", "takes a plain value"),
        ("scale(a)", "takes by="),
        ("1" + "0" * 400 + " * a", "too large"),
        ("-" * 200_000 + "a", "more than 100000 characters"),
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_expression_is_refused(expression: str, message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        evaluate_expression(expression, vectors())


def test_a_wrong_name_or_option_is_told_with_what_was_meant() -> None:
    with pytest.raises(MissingNameError, match=r"no vector is called 'c'.*given names are: a, b"):
        evaluate_expression("a + c", vectors())
    with pytest.raises(MissingNameError, match="Did you mean 'rank'"):
        evaluate_expression("compress(a, rang=2)", vectors())


def test_the_code_of_an_adapters_vector_makes_it_again(
    edited: Edited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = edited.vector.filter(include="*proj*").compress(rank=2)
    small.to_adapter(tmp_path / "adapter", base=edited.pair.base)
    (tmp_path / "base").symlink_to(edited.pair.base)
    monkeypatch.chdir(tmp_path)
    for base in (None, "base"):
        vector = 0.5 * TaskVector.from_adapter("adapter", base=base, name="hp1")
        made: dict[str, TaskVector] = {}
        exec(as_code(vector.provenance), {"TaskVector": TaskVector}, made)
        assert made["vector"].expression == vector.expression
        for name in vector:
            assert torch.equal(made["vector"].dense(name), vector.dense(name))


def test_what_the_methods_write_can_be_read_again() -> None:
    torch.manual_seed(0)
    m = TaskVector.from_tensors({"h.0.mlp.fc1.weight": torch.randn(6, 4)}, name="m")
    for made in (
        m.compress(rank=2, exact=True),
        m.compress(rank=2, dtype="bfloat16"),
        m.prune_rows(0.5),
        m.filter(include="h.*"),
        m.scale({"h.*": 0.5}),
    ):
        again = evaluate_expression(made.expression, {"m": m})
        assert again.expression == made.expression
        assert torch.equal(again.dense("h.0.mlp.fc1.weight"), made.dense("h.0.mlp.fc1.weight"))
    with pytest.raises(BadValueError, match="takes fraction="):
        evaluate_expression("prune_rows(m)", {"m": m})
