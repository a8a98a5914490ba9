"""Blocks of tokens, checked, and the order in which they are trained on."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_taskvec.errors import BadValueError, MismatchError, MissingNameError, did_you_mean

if TYPE_CHECKING:
    import datasets

IGNORED = -100  # the label of a token that is not to be learnt, as everywhere in transformers


@dataclass(frozen=True)
class TokenBlocks:
    """Token ids and labels, one row for each block."""

    ids: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        """Tokens in each block."""
        return self.ids.shape[1]

    @property
    def digest(self) -> str:
        """sha256 of what is learnt, in its order."""
        digest = hashlib.sha256(repr(tuple(self.ids.shape)).encode())
        for tensor in (self.ids, self.labels):
            digest.update(memoryview(tensor.numpy()))  # type: ignore[arg-type]
        return digest.hexdigest()

    def targets(self, rows: torch.Tensor) -> int:
        """How many tokens of these rows are predicted."""
        return int((self.labels[rows, 1:] != IGNORED).sum())


def read_blocks(blocks: "datasets.Dataset", vocabulary: int, context: int | None) -> TokenBlocks:
    """The blocks of a data set, refused if the model cannot learn from them.

    Its column `input_ids` holds lists of one length; `labels`, where there is such a column, may hide tokens by −100.
    """
    import datasets

    if not isinstance(blocks, datasets.Dataset):
        raise BadValueError(f"blocks must be a datasets.Dataset with input_ids, not a {type(blocks).__name__}.")
    if "input_ids" not in blocks.column_names:
        hint = did_you_mean("input_ids", blocks.column_names)
        raise MissingNameError(
            f"the blocks have the columns {', '.join(blocks.column_names)}, and no input_ids.{hint} "
            "Book.training_blocks() gives what is needed."
        )
    if not len(blocks):
        raise BadValueError("there are no blocks to train on. Is the text longer than one block?")
    ids = _matrix(blocks, "input_ids")
    labels = _matrix(blocks, "labels") if "labels" in blocks.column_names else ids
    if labels.shape != ids.shape:
        raise MismatchError(f"labels have the shape {list(labels.shape)}, input_ids {list(ids.shape)}.")
    if ids.shape[1] < 2:
        raise BadValueError("blocks of fewer than 2 tokens hold nothing to predict. Use longer ones.")
    if context is not None and ids.shape[1] > context:
        raise MismatchError(
            f"the blocks are {ids.shape[1]} tokens long, the model reads at most {context}. Use shorter blocks."
        )
    kept = labels[labels != IGNORED]
    if not len(kept):
        raise BadValueError("every label is -100: there is nothing to learn.")
    for name, tensor in (("input_ids", ids), ("labels", kept)):
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise MismatchError(
                f"{name} holds the token {wrong}, but the model's vocabulary is 0 to {vocabulary - 1}. Were the blocks "
                "made with another model's tokenizer?"
            )
    if "attention_mask" in blocks.column_names and not bool(_matrix(blocks, "attention_mask").all()):
        raise BadValueError("some blocks are padded (attention_mask has zeros). Pack the text into full blocks.")
    return TokenBlocks(ids, labels)


def _matrix(blocks: "datasets.Dataset", column: str) -> torch.Tensor:
    rows = blocks.select_columns(column).with_format("numpy")[:][column]
    if rows.dtype == object:  # rows of different lengths make no matrix
        lengths = {len(row) for row in rows}
        raise BadValueError(
            f"the blocks differ in their length ({column} has {min(lengths)} to {max(lengths)} tokens). Pack the text "
            "into blocks of one length, as Book.training_blocks() does."
        )
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        raise BadValueError(f"{column} must hold lists of whole numbers, one list for each block.")
    return torch.from_numpy(rows.astype("int64"))


def mixed_seed(*parts: int) -> int:
    """One seed from several numbers, so that seeds of close numbers are unrelated."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of the blocks in an epoch: of the seed and the epoch only, whatever happened before."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed_seed(seed, epoch)))


def process_micro_batches(rows: torch.Tensor, rank: int, processes: int, size: int) -> list[torch.Tensor]:
    """A process's part of one batch, in micro-batches: as many for every process, some perhaps empty.

    >>> [[list(map(int, part)) for part in process_micro_batches(torch.arange(5), rank, 2, 2)] for rank in (0, 1)]
    [[[0, 2], [4]], [[1, 3], []]]
    """
    mine = rows[rank::processes]
    largest = -(-len(rows) // processes)
    return [mine[start : start + size] for start in range(0, largest, size)]
