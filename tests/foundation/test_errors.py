"""One family of errors, each also the built-in that a caller expects, and messages that help."""

import pytest

from hf_taskvec import errors
from hf_taskvec.errors import MissingNameError, TaskVectorError, did_you_mean, some

BUILT_IN = {
    "BadValueError": ValueError,
    "ChangedSourceError": ValueError,
    "CorruptFileError": ValueError,
    "DivergedError": ArithmeticError,
    "HubError": OSError,
    "LeakError": ValueError,
    "MismatchError": ValueError,
    "MissingFileError": FileNotFoundError,
    "MissingNameError": KeyError,
    "OutputError": OSError,
    "UnsupportedError": ValueError,
}


def test_every_error_is_of_the_family_and_the_built_in_that_fits() -> None:
    found = {
        name: each for name, each in vars(errors).items() if isinstance(each, type) and each is not TaskVectorError
    }
    assert {name for name, each in found.items() if issubclass(each, TaskVectorError)} == set(BUILT_IN)
    for name, expected in BUILT_IN.items():
        with pytest.raises(expected, match="what went wrong"):
            raise found[name]("what went wrong")


def test_every_error_says_when_it_is_raised() -> None:
    for name in BUILT_IN:
        assert getattr(errors, name).__doc__.startswith("Raised ")


def test_a_missing_name_is_shown_without_the_quotes_of_a_key_error() -> None:
    assert str(MissingNameError("there is no 'x'.")) == "there is no 'x'."


def test_a_close_name_is_suggested_and_a_distant_one_is_not() -> None:
    assert did_you_mean("additon", ["addition", "negation"]) == " Did you mean 'addition'?"
    assert did_you_mean("xyz", ["addition", "negation"]) == ""


def test_a_long_list_is_cut() -> None:
    assert some(["a"]) == "a" and some([]) == ""
    assert some("abc") == "a, b, c"
    assert some(iter("abcd"), most=2) == "a, b and 2 more"
