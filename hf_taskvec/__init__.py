"""Task vectors for Hugging Face language models.

The public names are listed here and imported when first used, so that `import hf_taskvec` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_taskvec._version import __version__

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.errors import TaskVectorError
    from hf_taskvec.extraction.from_any import open_vector
    from hf_taskvec.merging import combine, rules

_HOME = {
    "TaskVector": "hf_taskvec.algebra.task_vector",
    "TaskVectorError": "hf_taskvec.errors",
    "combine": "hf_taskvec.merging",
    "open_vector": "hf_taskvec.extraction.from_any",
    "rules": "hf_taskvec.merging",
}

__all__ = ["TaskVector", "TaskVectorError", "__version__", "combine", "open_vector", "rules"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hf_taskvec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
