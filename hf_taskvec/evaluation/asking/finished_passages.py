"""A folder of finished passages, so that an interrupted sweep continues where it stopped.

A record is known by what made it: the model's fingerprint, the edit's, λ, the passage and the protocol with
its decoding; never by a rank or a path. Each finished batch is one JSON file under the hash of its content,
written beside and renamed: a killed process leaves a whole file or none, and two processes cannot damage
each other's.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_taskvec import atomic
from hf_taskvec.errors import CorruptFileError, OutputError
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage
from hf_taskvec.evaluation.asking.generation import Continuation
from hf_taskvec.evaluation.texts.protocols import Protocol
from hf_taskvec.json_files import read_json
from hf_taskvec.typed_values import typed

STORE_FORMAT = "hf_taskvec/evaluation-store"
STORE_VERSION = 1


@dataclass(frozen=True)
class _Record:
    """A finished passage, as it is stored."""

    key: str
    text: str
    log_probs: tuple[float, ...]
    hits: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        """Whether there is a hit or a miss for each token of the true text."""
        return len(self.hits) == len(self.log_probs) and set(self.hits) <= {0, 1}


@dataclass(frozen=True)
class _StoreHead:
    """What a file of the store says of itself."""

    format: str
    version: int


@dataclass(frozen=True)
class _StoreFile:
    """What it holds."""

    sha256: str
    records: tuple[_Record, ...]


def store_folder(store: str | Path | None, output: str | Path | None) -> Path | None:
    """Where finished passages are kept: in `store`, else in the output's own folder; `None` without either."""
    if store is not None:
        return Path(store)
    return None if output is None else Path(output) / "store"


def record_key(model: str, edit: str, scale: float, passage: TokenizedPassage, protocol: Protocol) -> str:
    """The name of one passage at one λ: a hash of all that decides what the model answers."""
    parts = [
        STORE_VERSION,
        model,
        edit,
        repr(float(scale) + 0.0),  # −0.0 and 0.0 are the same λ
        passage.text.key,
        passage.prompt_ids,
        passage.answer_ids,
        passage.new_tokens,
        protocol.hash,
        protocol.decoding.hash,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class FinishedPassages:
    """The finished passages of a folder; an in-memory one without a folder.

    Reading is done once, when it is opened. A damaged file is an error that names it: nothing is deleted, and
    moving that file away costs only its own passages.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._records: dict[str, Continuation] = {}
        if self.folder is not None:
            atomic.ensure_writable(self.folder)
            for path in sorted(self.folder.glob("*.json")):
                for key, record in _read(path).items():
                    # The same passage may have been done without and later with its likelihood.
                    if record.log_probs or key not in self._records:
                        self._records[key] = record

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Continuation:
        return self._records[key]

    def found(self, keys: Iterable[str], likelihood: bool = True) -> dict[str, Continuation]:
        """Those of `keys` that are finished, with the likelihood of the true text if that is asked for."""
        known = ((key, self._records.get(key)) for key in keys)
        return {key: found for key, found in known if found and (found.log_probs or not likelihood)}

    def add(self, records: Mapping[str, Continuation]) -> None:
        """Keep a finished batch, on disk before this returns."""
        self._records.update(records)
        if self.folder is None or not records:
            return
        body = [
            {"key": key, "text": c.text, "log_probs": list(c.log_probs), "hits": [int(hit) for hit in c.hits]}
            for key, c in sorted(records.items())
        ]
        digest = _digest(body)
        target = self.folder / f"{digest[:32]}.json"
        content = {"format": STORE_FORMAT, "version": STORE_VERSION, "sha256": digest, "records": body}
        try:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False)
            atomic.write_text(target, text, shared=True)  # two processes may finish the same batch at the same moment
        except OSError as error:
            raise OutputError(
                f"the store {self.folder.name!r} cannot be written: {error.strerror}. Free some space or "
                "name another folder; what is finished stays there"
            ) from None


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Continuation]:
    remedy = "Move it away: only its own passages will be generated again"
    try:
        content = read_json(path)
        head = typed(_StoreHead, content)
        if head.format != STORE_FORMAT:
            raise CorruptFileError("it is no file of an evaluation store")
        if head.version != STORE_VERSION:
            raise CorruptFileError(f"it has version {head.version} of the store, this hf_taskvec reads {STORE_VERSION}")
        stored = typed(_StoreFile, content)
    except CorruptFileError as error:
        raise CorruptFileError(f"{path.name} in the store cannot be read: {error}. {remedy}") from None
    if _digest(content["records"]) != stored.sha256:
        raise CorruptFileError(f"{path.name} in the store does not match its checksum. {remedy}")
    records = {record.key: record for record in stored.records}
    if len(records) != len(stored.records) or not all(record.is_sound for record in stored.records):
        raise CorruptFileError(f"{path.name} in the store contradicts itself. {remedy}")
    return {
        key: Continuation(record.text, record.log_probs, tuple(hit == 1 for hit in record.hits))
        for key, record in records.items()
    }
