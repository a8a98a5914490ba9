"""The search for the largest singular value against a full decomposition, and how long it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_taskvec import TaskVector
from hf_taskvec.analysis import matrix_norms, spectral_norm, stable_ranks
from hf_taskvec.models.checkpoint import open_checkpoint


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with a number for each product with a matrix and its transpose."""
    made = []
    both = spectral_norm._both_products

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(1)
        return both(*args)

    monkeypatch.setattr(spectral_norm, "_both_products", counted)
    return made


def with_values(*values: float) -> torch.Tensor:
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(0)
    sides = [torch.randn(side, len(values), dtype=torch.float64, generator=generator) for side in (150, 120)]
    left, right = (torch.linalg.qr(side).Q for side in sides)
    return ((left * torch.tensor(values)) @ right.T).float()


def hidden(value: float, size: int = 4096) -> torch.Tensor:
    """The identity but for one direction, of which the search's first vector holds next to nothing."""
    first = torch.randn(size, generator=torch.Generator().manual_seed(0))
    diagonal = torch.ones(size)
    diagonal[first.abs().argmin()] = value
    return torch.diag(diagonal)


@pytest.mark.parametrize("shape", [(2000, 500), (500, 2000), (1000, 1000)])
def test_a_flat_spectrum_is_not_searched_for_long(products: list[int], shape: tuple[int, int]) -> None:
    """The last digits of a random matrix's norm would take many passes over it; the first two take 14 or so."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": matrix})
    (found,) = stable_ranks(vector).matrices
    exact = torch.linalg.matrix_norm(matrix, 2).item()
    assert 0.98 * exact < found.spectral < exact * (1 + 1e-6)
    assert 14 <= len(products) <= 17
    (finer,) = stable_ranks(vector, tolerance=1e-6).matrices
    assert finer.spectral == pytest.approx(exact, rel=1e-3)


def test_a_spectrum_with_a_gap_settles_soon(monkeypatch: pytest.MonkeyPatch, products: list[int]) -> None:
    monkeypatch.setattr(matrix_norms, "_SMALL", 0)
    (found,) = stable_ranks(
        TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": with_values(3.0, *torch.linspace(1, 2, 99))})
    ).matrices
    assert found.spectral == pytest.approx(3, rel=1e-4)
    assert len(products) < 10


@pytest.mark.parametrize("scale", [1e-43, 1e-30, 1e-14, 1e-9, 1e9, 1e14, 1e30, 1e37])
@pytest.mark.parametrize("held", [0, 1 << 28])
def test_norms_beyond_the_range_of_fp32_squares_are_found(
    monkeypatch: pytest.MonkeyPatch, products: list[int], scale: float, held: int
) -> None:
    """Squares and fourth powers of such numbers are not fp32's, and some of their norms are not."""
    monkeypatch.setattr(matrix_norms, "_HELD_BYTES", held)
    matrix = scale * torch.randn(400, 350, generator=torch.Generator().manual_seed(0))
    vector = TaskVector.from_tensors({"model.layers.0.self_attn.o_proj.weight": matrix})
    (found,) = stable_ranks(vector, tolerance=1e-6).matrices
    exact = matrix.double()
    assert found.spectral == pytest.approx(torch.linalg.matrix_norm(exact, 2).item(), rel=1e-3)
    assert found.frobenius == pytest.approx(exact.norm().item(), rel=1e-6)
    assert products


@pytest.mark.parametrize(
    ("matrix", "largest"),
    [
        (torch.eye(100), 1.0),
        (torch.zeros(50, 40).index_put_((torch.tensor(2), torch.tensor(3)), torch.tensor(5.0)), 5.0),
        (torch.ones(60, 50), 3000**0.5),
        (with_values(3.0, 1.0), 3.0),
        (with_values(1.05, *[1.0] * 99), 1.05),
        (with_values(1e-3, *[9.99e-4] * 50), 1e-3),
        (hidden(1.05), 1.05),
    ],
    ids=["identity", "one number", "one row", "two values", "one above", "one hardly above", "one hidden"],
)
@pytest.mark.parametrize("tolerance", [1e-4, 1e-9])
@pytest.mark.parametrize("small", [0, 320])
def test_the_largest_value_is_found_where_the_search_runs_out_of_directions(
    monkeypatch: pytest.MonkeyPatch, matrix: torch.Tensor, largest: float, tolerance: float, small: int
) -> None:
    """Few different singular values: soon all directions are found, and what is left of a step is rounding."""
    monkeypatch.setattr(matrix_norms, "_SMALL", small)
    name = "model.layers.0.self_attn.o_proj.weight"
    (found,) = stable_ranks(TaskVector.from_tensors({name: matrix}), tolerance=tolerance).matrices
    assert found.spectral == pytest.approx(largest, rel=1e-6)


def test_nearly_all_norms_of_a_real_model_are_right_to_four_digits(shared: Path) -> None:
    """Real matrices have a few large singular values: nearly all norms are right to four digits, all to two."""
    folder = shared / "models" / "stories15M"
    tensors = open_checkpoint(folder).tensors
    errors = []
    for matrix in stable_ranks(folder).matrices:
        weight = torch.cat([tensors[name].read() for name in matrix.names])
        errors.append(1 - matrix.spectral / torch.linalg.matrix_norm(weight.double(), 2).item())
    assert min(errors) > -1e-6 and max(errors) < 0.02
    assert sum(error < 1e-4 for error in errors) >= 0.9 * len(errors)
