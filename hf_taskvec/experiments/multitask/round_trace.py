"""What happened in each round, as plain values that become JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hf_taskvec import atomic
from hf_taskvec.json_files import parse_json
from hf_taskvec.typed_values import typed

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class RoundTrace:
    """One round.

    Args:
        round (`int`):
            Its number, from 1.
        steps (`int`):
            How many steps each task has made so far.
        losses (`tuple` of `float`):
            The mean training loss of each task in this round.
        task_cosines (`Matrix`):
            cos(τ_i, τ_j), the changes since θ_0.
        update_cosines (`Matrix`):
            cos(δ_i, δ_j), the changes of this round.
        task_norms (`tuple` of `float`):
            ‖τ_i‖.
        update_norms (`tuple` of `float`):
            ‖δ_i‖.
        discarded (`float`, *optional*, defaults to 0.0):
            The share of the merged change's squared norm that does not fit into LoRA's rank; 0 for full fine-tuning.
    """

    round: int
    steps: int
    losses: tuple[float, ...]
    task_cosines: Matrix
    update_cosines: Matrix
    task_norms: tuple[float, ...]
    update_norms: tuple[float, ...]
    discarded: float = 0.0


@dataclass(frozen=True)
class Trace:
    """All rounds of a run.

    Args:
        tasks (`tuple` of `str`):
            Their names, in the order of all matrices.
        rounds (`tuple` of `RoundTrace`, *optional*):
            One after the other.
    """

    tasks: tuple[str, ...]
    rounds: tuple[RoundTrace, ...] = ()

    def to_json(self) -> str:
        """The trace as JSON.

        Returns:
            `str`: All fields, indented, with a newline at the end.
        """
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """The trace that `to_json` wrote.

        Args:
            text (`str`):
                The JSON.

        Returns:
            `Trace`: Equal to the one that was written.

        Raises:
            `CorruptFileError`: If it is no trace.
        """
        return typed(cls, parse_json(text, "the trace"))

    def save(self, output: Path) -> None:
        """Write the trace into a JSON file.

        Args:
            output (`Path`):
                The file; replaced whole if it exists.
        """
        atomic.write_text(output, self.to_json())


def cosines(gram: torch.Tensor) -> tuple[Matrix, tuple[float, ...]]:
    """Cosines and norms from inner products; the cosine with what has no length is 0."""
    norms = gram.diagonal().clamp_min(0.0).sqrt()
    outer = norms[:, None] * norms
    matrix = torch.where(outer > 0, gram / outer.clamp_min(torch.finfo(gram.dtype).tiny), torch.zeros_like(gram))
    return tuple(tuple(row) for row in matrix.clamp(-1.0, 1.0).tolist()), tuple(norms.tolist())


def pairs(matrix: Sequence[Sequence[float]]) -> list[float]:
    """The numbers above the diagonal: one for each pair of tasks."""
    return [value for number, row in enumerate(matrix) for value in row[number + 1 :]]
