"""Reading what was typed: expressions, lists of λ, names of vectors."""

import pytest

from hf_taskvec.cli.arguments import named_paths, parse_scales, protect_expression
from hf_taskvec.errors import BadValueError


@pytest.mark.parametrize(
    "expression", ["-0.6*hp1 + 0.2*hp2", "-hp1+hp2", "-(hp1 - hp2)", "-.5*hp1", "- hp1 + hp2", "-hp1"]
)
def test_an_expression_with_a_leading_minus_is_no_option(expression: str) -> None:
    assert protect_expression(["combine", expression, "hp1=a", "-o", "x"]) == [
        "combine",
        f" {expression}",
        "hp1=a",
        "-o",
        "x",
    ]


def test_options_are_no_expressions() -> None:
    given = ["combine", "hp1", "-o", "x", "--json", "-h"]
    assert protect_expression(given) == given
    assert protect_expression(["apply", "--scale", "-0.5"]) == ["apply", "--scale", "-0.5"]


def test_lists_and_ranges_of_scales() -> None:
    assert parse_scales("0:-1:-0.2") == pytest.approx([0, -0.2, -0.4, -0.6, -0.8, -1])
    assert parse_scales("0, -0.5,1") == [0, -0.5, 1]


@pytest.mark.parametrize("text", ["a,b", "0:1", "0:1:0", "0:1:-0.1", "0:1:0.0001"])
def test_what_is_no_list_of_scales_is_refused(text: str) -> None:
    with pytest.raises(BadValueError, match="is no list of λ"):
        parse_scales(text)


def test_a_path_alone_is_named_by_its_last_part() -> None:
    assert named_paths(["a=x/y", "vectors/hp1", "me/hp2@main"]) == {
        "a": "x/y",
        "hp1": "vectors/hp1",
        "hp2": "me/hp2@main",
    }
