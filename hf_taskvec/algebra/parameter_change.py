"""`ParameterChange`: what a task vector changes in one parameter."""

from dataclasses import dataclass

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.low_rank import are_factors
from hf_taskvec.algebra.rounding import parse_dtype
from hf_taskvec.algebra.sums import Sum, Term


@dataclass(frozen=True, repr=False)
class ParameterChange:
    """What a task vector changes in one parameter: a sum of weighted terms whose tensors are read when used.

    `vector["name"]` gives it. It is not a tensor: `dense()` makes one.

    Args:
        name (`str`):
            The parameter's name, as transformers writes it to disk.
        terms (`tuple[Term, ...]`):
            The weighted changes whose sum it is.

    Example:
        >>> from hf_taskvec import TaskVector
        >>> vector = TaskVector.from_tensors({"w": (torch.ones(4, 1), torch.ones(1, 3))})
        >>> vector["w"]
        ParameterChange('w', shape=[4, 3], rank=1, low-rank)
        >>> vector["w"].norm
        3.4641016151377544
        >>> vector["w"].dense()[0]
        tensor([1., 1., 1.])

    """

    name: str
    terms: tuple[Term, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.terms[0].delta.shape

    @property
    def rank(self) -> int:
        """The rank as represented: the sum of the factors' ranks, or the full rank; 1 for what is not a matrix."""
        held = sum(term.delta.rank for term in self.terms)
        return min(held, *self.shape) if len(self.shape) > 1 else 1

    @property
    def is_low_rank(self) -> bool:
        """Whether the change is held as factors."""
        return are_factors(self.terms)

    @property
    def norm(self) -> float:
        """The Frobenius norm, from the factors where there are factors. Reads the tensors."""
        return measures.norm(self.name, self.terms)

    def dense(self, dtype: torch.dtype | str = torch.float32) -> torch.Tensor:
        """The change as one new tensor.

        Args:
            dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.float32`):
                What the exact change is rounded to, once.

        Returns:
            `torch.Tensor`: The change, on the CPU.

        Raises:
            `BadValueError`: If the change has values that are not finite in that dtype.
        """
        out = torch.empty(self.shape, dtype=parse_dtype(dtype), device="cpu")
        Sum(self.shape, self.terms).into(out, self.name)
        return out

    def __repr__(self) -> str:
        held = "low-rank" if self.is_low_rank else "dense"
        return f"ParameterChange({self.name!r}, shape={list(self.shape)}, rank={self.rank}, {held})"
