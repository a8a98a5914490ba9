"""Task vectors for Hugging Face language models.

The public names are listed here and imported when first used, so that `import hf_taskvec` costs nothing.
"""

from typing import TYPE_CHECKING

from hf_taskvec._version import __version__
from hf_taskvec.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.errors import TaskVectorError
    from hf_taskvec.extraction.from_any import open_vector
    from hf_taskvec.forgetting import Forgotten, forget
    from hf_taskvec.merging import combine, rules

_HOMES = {
    "Forgotten": "forgetting",
    "TaskVector": "algebra.task_vector",
    "TaskVectorError": "errors",
    "combine": "merging",
    "forget": "forgetting",
    "open_vector": "extraction.from_any",
    "rules": "merging",
}

__all__ = ["Forgotten", "TaskVector", "TaskVectorError", "__version__", "combine", "forget", "open_vector", "rules"]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
