"""Which token is which number: a digest of a tokenizer's vocabulary, from the files beside a model."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_taskvec.errors import CorruptFileError
from hf_taskvec.json_files import read_json


def vocabulary_digest(folder: Path) -> str | None:
    """A digest that two tokenizers share if they number the same tokens alike; None where there is no tokenizer.

    Tokens that were added to a vocabulary do not count: a fine-tune may well have one for padding. SentencePiece's file
    cannot be compared with a list of tokens, so its digest is marked: `sentencepiece:...`.
    """
    for file, read in (("tokenizer.json", _of_fast), ("vocab.json", _of_slow), ("tokenizer.model", _of_sentencepiece)):
        path = folder / file
        if not path.is_file():
            continue
        try:
            return read(path)
        except (OSError, CorruptFileError, LookupError, TypeError):
            return None  # not a tokenizer that can be read: then nothing is known
    return None


def _of_fast(path: Path) -> str | None:
    return _digest(read_json(path)["model"]["vocab"])


def _of_slow(path: Path) -> str | None:
    return _digest(read_json(path))


def _of_sentencepiece(path: Path) -> str:
    return f"sentencepiece:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _digest(vocabulary: Any) -> str | None:
    """Of tokens with their numbers; a unigram vocabulary is a list of tokens with their scores, in order."""
    if isinstance(vocabulary, dict):
        known = all(type(number) is int for number in vocabulary.values())
    else:
        known = isinstance(vocabulary, list) and all(
            isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and type(each[1]) in (int, float)
            for each in vocabulary
        )
    canonical = json.dumps(vocabulary, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16] if known else None
