"""One family of exceptions: whatever goes wrong in this library is a `TaskVectorError`.

Each subclass is also the built-in exception that a caller would expect, so `except ValueError` keeps working.
A message says what went wrong, with which parameter or file, and what to do about it.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TaskVectorError(Exception):
    """Anything that hf_taskvec refuses to do."""


class MismatchError(TaskVectorError, ValueError):
    """Two things that should fit do not: names, shapes, vocabulary, architecture."""


class UnsupportedError(TaskVectorError, ValueError):
    """Something that cannot be represented as a task vector: quantised weights, another PEFT method, ..."""


class BadValueError(TaskVectorError, ValueError):
    """An argument or a stored number that makes no sense: NaN weights, a rank of 0, an identical fine-tune."""


class CorruptFileError(TaskVectorError, ValueError):
    """A file that is damaged, truncated, unsafe, or of an unknown format version."""


class ChangedSourceError(TaskVectorError, ValueError):
    """A base or fine-tune is no longer what it was when the vector was made."""


class DivergedError(TaskVectorError, ArithmeticError):
    """Training that went wrong: a loss or a gradient that is not a finite number."""


class OutputError(TaskVectorError, OSError):
    """Output that cannot be written: a folder that is not ours, no permission, a full disk."""


class MissingFileError(TaskVectorError, FileNotFoundError):
    """A folder, a shard or a Hub repository that is not there."""


class HubError(TaskVectorError, OSError):
    """The Hub refused a push or could not be reached."""


class LeakError(TaskVectorError, ValueError):
    """A path of this machine, a token or the user's name would have been published."""


class MissingNameError(TaskVectorError, KeyError):
    """A parameter or option that does not exist."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, or an empty string if nothing is close.

    >>> did_you_mean("tise", ["ties", "dare"])
    " Did you mean 'ties'?"
    """
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def some(names: Iterable[str], most: int = 3) -> str:
    """A short list for an error message: the first few names and how many more there are.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
