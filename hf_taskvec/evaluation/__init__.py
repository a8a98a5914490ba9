"""What an edit made a model forget, what it kept, and how sure we are.

The public names are listed here and imported when first used: `import hf_taskvec.evaluation` costs no torch.

    from hf_taskvec.evaluation import load_book, protocols, rouge_l, sweep, UnlearningReport
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_taskvec.evaluation import protocols
    from hf_taskvec.evaluation.books import Book, load_book
    from hf_taskvec.evaluation.choice import Choice
    from hf_taskvec.evaluation.leaks import LeakReport, check_leaks
    from hf_taskvec.evaluation.passages import Passage
    from hf_taskvec.evaluation.report import UnlearningReport
    from hf_taskvec.evaluation.rouge import RougeScore, rouge_l
    from hf_taskvec.evaluation.sweeps import sweep
    from hf_taskvec.evaluation.tables import compare

_HOME = {
    "Book": "books",
    "Choice": "choice",
    "LeakReport": "leaks",
    "Passage": "passages",
    "RougeScore": "rouge",
    "UnlearningReport": "report",
    "check_leaks": "leaks",
    "compare": "tables",
    "load_book": "books",
    "rouge_l": "rouge",
    "sweep": "sweeps",
}

__all__ = [
    "Book",
    "Choice",
    "LeakReport",
    "Passage",
    "RougeScore",
    "UnlearningReport",
    "check_leaks",
    "compare",
    "load_book",
    "protocols",
    "rouge_l",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name == "protocols":
        return import_module(f"{__name__}.protocols")
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
