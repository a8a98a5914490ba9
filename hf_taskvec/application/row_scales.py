"""λ of an attached edit: one for the whole batch, or one for each of its rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hf_taskvec.errors import BadValueError


class RowScales:
    """The λ of each row, and what is known of the batch that goes through the model.

    Layers see batches in several shapes. Which of a layer's outputs belongs to which row is read off the shape of the
    model's own input; where that does not tell, several λ are refused.
    """

    def __init__(self) -> None:
        self._values = torch.zeros(1, dtype=torch.float64, device="cpu")
        self._batch: tuple[int, int | None] | None = None

    def set(self, scales: Sequence[float]) -> None:
        """One λ for each row, or one for all."""
        self._values = torch.tensor(scales, dtype=torch.float64, device="cpu")

    @property
    def are_zero(self) -> bool:
        """Whether nothing is added at all."""
        return not self._values.any()

    @property
    def text(self) -> str:
        """The values, for a fingerprint."""
        return repr(sorted(set(self._values.tolist())) if self._are_equal else self._values.tolist())

    @property
    def _are_equal(self) -> bool:
        return bool((self._values == self._values[0]).all())

    @contextmanager
    def in_batch(self, batch: torch.Tensor | None, tells_positions: bool = True) -> Iterator[None]:
        """A block in which the model runs on this input; one that does not fit the scales is refused."""
        before = self._batch
        if batch is not None:
            _check_rows(self._values, batch.shape[0])
            positions = (batch.shape[1] if batch.ndim > 1 else 1) if tells_positions else None
            self._batch = (batch.shape[0], positions)
        try:
            yield
        finally:
            self._batch = before

    def for_output(self, output: torch.Tensor, name: str, is_lookup: bool) -> torch.Tensor | None:
        """λ for each row of a layer's output, shaped to be multiplied with it; None if it is 0 throughout.

        Args:
            output (`torch.Tensor`):
                What the weight gave.
            name (`str`):
                Of the weight, for errors.
            is_lookup (`bool`):
                Whether it is an embedding's. Positions are often looked up once for all rows; each row then gets its
                own, which broadcasting would have given it anyway.

        Raises:
            `BadValueError`: If there are several λ, and the shape does not tell which row is whose.

        """
        values = self._values
        if self.are_zero:
            return None
        shape = output.shape
        if len(values) > 1:
            values = values.repeat_interleave(self._rows(shape, name, is_lookup) // len(values))
        return values.to(output.device).view(-1, *[1] * (len(shape) - 1))

    def _rows(self, shape: torch.Size, name: str, is_lookup: bool) -> int:
        if self._batch is None:  # the layer was called by itself
            _check_rows(self._values, shape[0])
            return shape[0]
        rows, positions = self._batch
        # Some layers flatten rows and positions into one axis, in this order.
        if shape[0] == (rows if len(shape) > 2 else rows * (positions or 0)):
            return shape[0]
        if is_lookup and len(shape) > 2 and shape[0] == 1:
            return rows
        positioned = "" if positions is None else f" and {positions} positions"
        raise BadValueError(
            f"{name}: its layer gives {list(shape)} for a batch of {rows} rows{positioned}, which does not tell which "
            "row is whose, so it cannot have one λ for each. Use one λ for all (set_scale), merge the vector "
            f"(merge=True), or leave it out: vector.filter(exclude={name!r})."
        )


def _check_rows(scales: torch.Tensor, rows: int) -> None:
    if rows % len(scales):
        raise BadValueError(
            f"{len(scales)} scales were set, but the batch has {rows} rows. Give one scale for each row."
        )
