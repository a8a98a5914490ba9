"""Which books a model was trained on: marks on blocks of text, and what a training record keeps of them.

A mark is a book's fingerprint, which stands for its text *and* for what of it is held out. So a model whose record
holds it was trained on the seen part alone.
"""

import re
from pathlib import Path
from typing import Any

from hf_taskvec.errors import CorruptFileError
from hf_taskvec.filenames import TRAINING_RECORD
from hf_taskvec.json_files import read_json

_MARK = "seen text of the book sha256:"
_FOUND = re.compile(re.escape(_MARK) + r"([0-9a-f]{64})")
RECORDED = "books"  # the field of the training record


def book_mark(fingerprint: str) -> str:
    """What a data set of a book's blocks says of itself; data sets that are joined say all of it."""
    return _MARK + fingerprint


def marked_books(description: str | None) -> list[str]:
    """The fingerprints of the books that a data set's description names, each once.

    >>> marked_books(book_mark("a" * 64) + " and " + book_mark("a" * 64)) == ["a" * 64]
    True
    """
    return list(dict.fromkeys(_FOUND.findall(description or "")))


def recorded_books(model: Any) -> frozenset[str]:
    """The fingerprints of the books that the training record beside a live model's weights names; none without one."""
    folder = Path(str(model.config._name_or_path or ""))
    record = folder / TRAINING_RECORD
    if not str(model.config._name_or_path) or not record.is_file():
        return frozenset()
    try:
        found = read_json(record).get(RECORDED, [])
    except CorruptFileError:
        return frozenset()  # nothing is known then, which is what an empty set says
    return frozenset(each for each in found if isinstance(each, str)) if isinstance(found, list) else frozenset()
