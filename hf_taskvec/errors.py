"""One family of exceptions: whatever goes wrong in this library is a `TaskVectorError`.

Each subclass is also the built-in exception that a caller would expect, so `except ValueError` keeps working.
A message says what went wrong, with which parameter or file, and what to do about it.

>>> issubclass(MismatchError, TaskVectorError), issubclass(MismatchError, ValueError)
(True, True)
"""

from collections.abc import Iterable, Sized
from difflib import get_close_matches
from itertools import islice

from hf_taskvec.escaping import visible_lines


class TaskVectorError(Exception):
    """Anything that hf_taskvec refuses to do: `except TaskVectorError` catches all of the errors below."""

    def __str__(self) -> str:  # a message may quote a name from a stranger's file
        return visible_lines(super().__str__())


class MismatchError(TaskVectorError, ValueError):
    """Raised when two things that should fit do not: names, shapes, vocabulary or architecture.

    For example a vector with a parameter that the model lacks, or two vectors of models of different sizes.
    """


class UnsupportedError(TaskVectorError, ValueError):
    """Raised when something cannot be done with what was given, or with what is installed.

    For example quantised weights or a PEFT method other than LoRA, which no task vector can represent, or a plot
    without matplotlib.
    """


class BadValueError(TaskVectorError, ValueError):
    """Raised when an argument or a stored number makes no sense.

    For example weights that are NaN, a rank of 0, an unknown option, or a fine-tune that equals its base.
    """


class CorruptFileError(TaskVectorError, ValueError):
    """Raised when a file is damaged, cut off, unsafe to load, or of a format version that is not known."""


class ChangedSourceError(TaskVectorError, ValueError):
    """Raised when a base or a fine-tune is read that is no longer what it was when the vector was made."""


class DivergedError(TaskVectorError, ArithmeticError):
    """Raised when training went wrong: a loss or a gradient is not a finite number."""


class OutputError(TaskVectorError, OSError):
    """Raised when output cannot be written: a folder holds somebody else's files, no permission, a full disk."""


class MissingFileError(TaskVectorError, FileNotFoundError):
    """Raised when a folder, a file of a checkpoint or a Hub repository is not there."""


class HubError(TaskVectorError, OSError):
    """Raised when the Hub refuses a push or cannot be reached."""


class LeakError(TaskVectorError, ValueError):
    """Raised before a push that would publish a path of this machine, a token or the user's name."""


class MissingNameError(TaskVectorError, KeyError):
    """Raised when a parameter, an option or another name is asked for that does not exist."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return visible_lines(str(self.args[0]))


class TaskVectorWarning(UserWarning):
    """Given when something is done that looks like a mistake. The command line shows it as a line."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, or an empty string if nothing is close.

    >>> did_you_mean("tise", ["ties", "dare"])
    " Did you mean 'ties'?"
    """
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def some(names: Iterable[str], most: int = 3) -> str:
    """A short list for an error message: the first few names and how many more there are.

    >>> some(["a", "b", "c", "d", "e"]), some(str(number) for number in range(10**18))
    ('a, b, c and 2 more', '0, 1, 2 and more than 1000 more')
    """
    left = iter(names)
    first = ", ".join(islice(left, most))
    rest = len(names) - most if isinstance(names, Sized) else sum(1 for _ in islice(left, 1001))
    if isinstance(names, Sized) or rest <= 1000:
        return first + (f" and {rest} more" if rest > 0 else "")
    return f"{first} and more than 1000 more"
