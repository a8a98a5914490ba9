"""Which token is which number: a digest of a tokenizer's vocabulary, from the files beside a model."""

import hashlib
import json
from pathlib import Path
from typing import Any


def vocabulary_digest(folder: Path) -> str | None:
    """A digest that two tokenizers share if they number the same tokens alike; None where there is no tokenizer.

    Tokens that were added to a vocabulary do not count: a fine-tune may well have one for padding. SentencePiece's file
    cannot be compared with a list of tokens, so its digest is marked: `sentencepiece:...`.
    """
    for file, read in (("tokenizer.json", _of_fast), ("vocab.json", json.loads), ("tokenizer.model", None)):
        path = folder / file
        if not path.is_file():
            continue
        try:
            content = path.read_bytes() if read is None else _canonical(read(path.read_text("utf-8")))
        except (OSError, ValueError, LookupError, TypeError):
            return None  # not a tokenizer that can be read: then nothing is known
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"sentencepiece:{digest}" if read is None else digest
    return None


def _of_fast(text: str) -> Any:
    return json.loads(text)["model"]["vocab"]


def _canonical(vocabulary: Any) -> bytes:
    return json.dumps(vocabulary, sort_keys=True, ensure_ascii=False).encode()
