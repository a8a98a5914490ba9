"""What a check of the matrix comes to, and how a refusal is told in one line that does not depend on the model."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hf_taskvec import TaskVectorError

EXACT = "exact"
PARTLY = "exact in part"  # the rest is refused, each parameter by name
REFUSED = "refused"
IMPOSSIBLE = "not possible"  # transformers or PEFT itself cannot do what the check needs
NOT_BUILT = "not built"
WRONG = "wrong"
CRASHED = "crashed"
#: in the order of the table; the last two are defects
KINDS = [EXACT, PARTLY, REFUSED, IMPOSSIBLE, NOT_BUILT, WRONG, CRASHED]


class WrongError(AssertionError):
    """A result that is not the reference's."""


class ImpossibleError(Exception):
    """Another library cannot do what the check needs."""


@dataclass
class Tally:
    """What came of the parts of a check: of single parameters, or of single adapters."""

    exact: int = 0
    #: changes that no output shows, so that nothing is known of them
    unseen: int = 0
    refused: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)

    @contextmanager
    def part(self, what: str, names: Iterable[str] = ()) -> Iterator[None]:
        """One part: what it raises is counted, and the check goes on.

        A part sets `exact` or `unseen` itself, at its end. A refusal must name one of `names`, if there are any.
        """
        try:
            yield
        except TaskVectorError as error:
            names = list(names)
            named = not names or any(name in str(error) for name in names)
            (self.refused if named else self.wrong).append(f"{what}: {error}")
        except ImpossibleError as error:
            self.impossible.append(f"{what}: {error}")
        except WrongError as error:
            self.wrong.append(f"{what}: {error}")
        except Exception as error:  # whatever it is, it is an outcome of its own
            self.crashed.append(
                f"{what}: {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
            )

    @property
    def kind(self) -> str:
        """The outcome of the parts together."""
        if self.crashed or self.wrong:
            return CRASHED if self.crashed else WRONG
        if self.exact:
            return PARTLY if self.refused else EXACT
        return REFUSED if self.refused else IMPOSSIBLE


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check of one model type."""

    kind: str
    #: what is refused (or wrong, or not possible) and why, without the names that differ between models
    reasons: tuple[str, ...] = ()
    #: as it was raised, for whoever looks into it
    detail: str = ""
    counts: str = ""


def judge(check: Callable[[Tally], None]) -> Outcome:
    """Run a check: its outcome, whatever happens in it."""
    tally = Tally()
    with tally.part(""):
        check(tally)
    told = [*tally.crashed, *tally.wrong] or [*tally.refused, *tally.impossible]
    reasons = sorted({normalised(each.partition("\n")[0]) for each in told})
    counts = f"{tally.exact} exact, {tally.unseen} unseen, {len(tally.refused)} refused"
    return Outcome(tally.kind, tuple(reasons), "\n".join(told), counts)


@contextmanager
def others(what: str) -> Iterator[None]:
    """A step that other libraries do alone: where they fail, nothing can be compared."""
    try:
        yield
    except Exception as error:  # anything that they raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise ImpossibleError(f"{what}: {type(error).__name__}: {first}") from error


_NAME = re.compile(r"[\w\[\]*-]+(\.[\w\[\]*-]+)+")
_CLASS = re.compile(
    r"\b(?!Auto|Peft|TaskVector|\w+Error\b)([A-Z]+[a-z0-9_]+){2,}(LM|LMHeadModel)?\b"
)  # LlamaForCausalLM, but not LoRA


def normalised(message: str) -> str:
    """A message without what differs between models that are refused for one reason.

    >>> normalised("model.layers.0.q_proj.weight, lm_head.weight and 3 more is the head of LlamaForCausalLM.")
    '… is the head of ….'
    >>> normalised("it uses target_parameters=['up', 'down'], not {'a', 'b'}.")
    'it uses target_parameters=…, not ….'
    """
    line = " ".join(message.split()).removeprefix(": ")
    line = re.sub(r"/\S+/(?=\S)", "", line)  # folders
    line = re.sub(
        r"\{[^{}]*\}|=\[[^=]*?\](?=[,. ])", lambda found: "=…"[found[0][0] != "=" :], line
    )  # sets have no order
    line = _NAME.sub("…", line)
    line = _CLASS.sub("…", line)
    line = re.sub(r"(?<![A-Za-z])\d+(\.\d+)?(e-?\d+)?", "N", line)
    line = re.sub(r"…(, …)*( and N more)?", "…", line).replace("…: …: ", "…: ")
    return line[:500]
