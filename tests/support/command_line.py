"""Commands that a test runs in its own process, and their answers."""

import json
from collections.abc import Callable

COMMANDS = [
    *("extract", "show", "compare", "combine", "compress"),
    *("apply", "merge", "adapter", "eval", "sweep", "choose", "forget", "audit", "survival"),
    *("card", "push"),
]
#: the command lines of other tools, whose options and errors are their own
OF_OTHERS = ["lm-eval"]
SECRET = "hf_" + "SeCrEt" * 6


class Answer:
    """The exit code and what was printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict:
        return json.loads(self.out)


Run = Callable[..., Answer]
