"""How low the rank of weights and task vectors is: stable rank, effective rank, and the large rows of MLPs' changes.

The stable rank is `‖W‖_F / ‖W‖_2`, not squared, as in Kuzborskij and Abbasi Yadkori (2025): 1 for a matrix of rank 1,
at most the square root of the smaller side.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra import measures
from hf_taskvec.algebra.deltas import Dense
from hf_taskvec.algebra.low_rank import Target, compress
from hf_taskvec.algebra.matrix_kinds import (
    KINDS,
    Kind,
    MatrixPlace,
    fused_rows,
    is_transposed,
    place_of,
    transposed_among,
)
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.argument_checks import check_vectors
from hf_taskvec.analysis.matrix_norms import MatrixBuffer, norms_of, threads_for
from hf_taskvec.analysis.matrix_parts import MatrixPart
from hf_taskvec.errors import BadValueError
from hf_taskvec.extraction.from_finetuned import open_model
from hf_taskvec.figures import Plottable
from hf_taskvec.progress import progress_bar
from hf_taskvec.threads import workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Matrices = TaskVector | torch.nn.Module | str | Path


@dataclass(frozen=True)
class MatrixRank:
    """One matrix: which parameters it is made of, and its norms."""

    names: tuple[str, ...]
    layer: int
    kind: Kind
    expert: int | None
    shape: tuple[int, int]
    frobenius: float
    spectral: float

    @property
    def stable_rank(self) -> float:
        """`‖W‖_F / ‖W‖_2`; nan for a matrix of zeros."""
        return self.frobenius / self.spectral if self.spectral else float("nan")


@dataclass(frozen=True)
class StableRanks(Plottable):
    """Norms and stable ranks of all matrices of a model or of a vector, by layer and kind; made by `stable_ranks`.

    Args:
        matrices (`tuple[MatrixRank, ...]`):
            The matrices, in the order of layers, kinds and experts.
        what (`str`):
            The name of the model, or the vector's expression.

    """

    matrices: tuple[MatrixRank, ...]
    what: str

    def of_kind(self, kind: Kind) -> list[MatrixRank]:
        """The matrices of one kind in all layers.

        Args:
            kind (`str`):
                The kind, such as `"MLP-1"`; one of `matrix_kinds.KINDS`.

        Returns:
            `list[MatrixRank]`: The measures of each such matrix; empty if there is none.

        """
        return [matrix for matrix in self.matrices if matrix.kind == kind]

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that occur, in the usual order."""
        return [kind for kind in KINDS if self.of_kind(kind)]

    def harmonic_mean(self, kinds: Kind | Iterable[Kind] | None = None) -> float:
        """The harmonic mean of the stable ranks over all layers: small whenever most matrices' are (Timor et al. 2023).

        Args:
            kinds (`str` or `Iterable[str]`, *optional*):
                Kinds of matrices. By default the matrices as they are multiplied, each counted once: O, QKV and the
                two of the MLP.

        Returns:
            `float`: The mean over all matrices of these kinds that are not zero.

        Raises:
            `BadValueError`: If a kind is unknown, or there is no such matrix.

        """
        usual: tuple[Kind, ...] = ("O", "QKV", "MLP-1", "MLP-2")
        chosen = {kinds} if isinstance(kinds, str) else set(usual if kinds is None else kinds)
        unknown = [kind for kind in chosen if kind not in KINDS]
        if unknown:
            raise BadValueError(f"{unknown[0]!r} is no kind of matrix. Use {', '.join(KINDS)}.")
        found = [m.stable_rank for m in self.matrices if m.kind in chosen and m.spectral]
        if not found:
            raise BadValueError(f"{self.what} has no matrix of the kinds {', '.join(sorted(chosen))} that is not zero.")
        return len(found) / sum(1 / rank for rank in found)

    def figure(self) -> "Figure":
        """Stable ranks and Frobenius norms by layer, a line for each kind.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.

        """
        from hf_taskvec.analysis.result_figures import ranks_figure

        return ranks_figure(self)


def stable_ranks(
    of: Matrices,
    *,
    config: Mapping[str, Any] | None = None,
    tolerance: float = 1e-4,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> StableRanks:
    """The stable rank `‖W‖_F / ‖W‖_2` and both norms of each matrix of a model or of a task vector.

    Separate Q, K and V are also taken together as QKV, and gate and up projections as MLP-1; a fused QKV is also taken
    apart, where the config tells how. Low-rank changes are measured by their factors, exactly; others by reading each
    matrix once and a few products with it in fp32. Each thread holds one matrix at a time, and there are so few threads
    that they hold 512 MB at most.

    Args:
        of (`TaskVector`, `torch.nn.Module`, `str` or `Path`):
            A task vector; or a model: a Hub id, a folder, or a live model. No model is loaded from files.
        config (`Mapping[str, Any]`, *optional*):
            The configuration of the vector's model (`config.json`), to take a fused QKV apart.
        tolerance (`float`, *optional*, defaults to 1e-4):
            The relative error at which the search for a large matrix's spectral norm ends, by its own estimate.
            Where singular values lie close, as in a random matrix, it ends earlier, from the 14th product with the
            matrix on, when products gain less than 30 times that: at the default about half a percent too low, and
            seldom more than one. It starts at random, and once in some hundred matrices it misses the largest singular
            value for one a few percent lower; a smaller tolerance makes that rarer. But for rounding, a norm is never
            too high. Of small matrices it is calculated, not searched for.
        revision (`str`, *optional*):
            A branch, tag or commit, for Hub ids.
        token (`str` or `bool`, *optional*):
            For Hub ids, as in transformers.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `StableRanks`: The norms and stable ranks by layer and kind.

    Raises:
        `BadValueError`: If no attention or MLP matrix is known by its name, or weights are NaN or infinite.
        `MismatchError`: If a fused QKV cannot be divided as the config says.

    Example:
        >>> import torch
        >>> from hf_taskvec import TaskVector
        >>> vector = TaskVector.from_tensors({"model.layers.0.mlp.fc1.weight": torch.eye(4)})
        >>> [(m.kind, m.stable_rank) for m in stable_ranks(vector).matrices]
        [('MLP-1', 2.0)]

    """
    if not 0 < tolerance < 1:
        raise BadValueError(f"tolerance={tolerance} must be between 0 and 1.")
    terms, conv1d, known, what = _terms_of(of, revision, token)
    config = dict(config or known)
    found = {name: place for name in terms if len(terms[name][0].delta.shape) == 2 and (place := place_of(name))}
    if not found:
        raise BadValueError(
            f"{what} has no attention or MLP matrix that is known by its name. Known are those of Phi, Phi-3, GPT-2, "
            "GPT-Neo, GPT-J, GPT-NeoX, OPT, Llama, Mistral, Qwen3, Gemma-3 and their mixtures of experts."
        )
    stacks = _stacks(found, terms, conv1d, config)
    ordered = sorted(stacks.items(), key=lambda each: _order(each[0]))
    matrices = []
    buffer = MatrixBuffer()
    with workers(threads_for(stacks.values())) as run:
        norms = run(lambda each: norms_of(each[1], tolerance, buffer), ordered)
        found_norms = list(progress_bar(norms, "Ranks", progress, total=len(ordered)))
    for (place, parts), (frobenius, spectral) in zip(ordered, found_norms, strict=True):
        names = tuple(dict.fromkeys(part.name for part in parts))
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        matrices.append(MatrixRank(names, place.layer, place.kind, place.expert, shape, frobenius, spectral))
    return StableRanks(tuple(matrices), what)


def _terms_of(
    of: Matrices, revision: str | None = None, token: str | bool | None = None
) -> tuple[Mapping[str, tuple[Term, ...]], frozenset[str] | None, Mapping[str, Any], str]:
    """What is measured: terms by canonical name, which of them are stored transposed (if known), config and label.

    The terms are a vector's, or a model's weights as if they were changes from 0.
    """
    if isinstance(of, TaskVector):
        return (
            {name: each.terms for name, each in of.items()},
            transposed_among(of, of.provenance.architectures),
            {},
            of.expression,
        )
    model = open_model(of, revision, token)
    terms = {name: (Term(1.0, Dense((source,))),) for name, source in model.tensors.items()}
    return terms, model.layout.conv1d if model.layout.architecture else None, model.config, model.name


def _order(place: MatrixPlace) -> tuple[int, int, int]:
    return place.layer, KINDS.index(place.kind), -1 if place.expert is None else place.expert


def _stacks(
    found: Mapping[str, MatrixPlace],
    terms: Mapping[str, tuple[Term, ...]],
    conv1d: frozenset[str] | None,
    config: Mapping[str, Any],
) -> dict[MatrixPlace, list[MatrixPart]]:
    """The matrices to measure, each as parts one above the other."""
    stacks: dict[MatrixPlace, list[MatrixPart]] = {}
    for name, place in found.items():
        part = MatrixPart(name, terms[name], is_transposed(name, terms[name][0].delta.shape, conv1d))
        stacks.setdefault(place, []).append(part)  # gate and up projections have the same place
        if place.kind in ("Q", "K", "V"):
            stacks.setdefault(MatrixPlace(place.layer, "QKV"), []).append(part)
        elif place.kind == "QKV":
            for kind, rows in (fused_rows(name, *part.shape, config) or {}).items():
                own = MatrixPart(name, terms[name], part.transposed, tuple(rows))
                stacks[MatrixPlace(place.layer, kind)] = [own]
    # A vector that changes Q and V only has no whole QKV: the change of K is zero, and adds nothing to either norm.
    return stacks


def effective_ranks(
    of: Matrices,
    energy: float = 0.9,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> dict[str, int]:
    """For each matrix how many singular values hold the share `energy` of its squared norm.

    From the factors where there are factors. A dense matrix of full rank takes as long as its compression would.

    Args:
        of (`TaskVector`, `torch.nn.Module`, `str` or `Path`):
            A task vector; or a model: a Hub id, a folder, or a live model.
        energy (`float`, *optional*, defaults to 0.9):
            The share of the squared norm, above 0 and at most 1.
        revision (`str`, *optional*):
            A branch, tag or commit, for Hub ids.
        token (`str` or `bool`, *optional*):
            For Hub ids, as in transformers.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `dict[str, int]`: For each matrix's name the number of singular values.

    Raises:
        `BadValueError`: If `energy` is out of range, or weights are NaN or infinite.

    Example:
        >>> import torch
        >>> from hf_taskvec import TaskVector
        >>> effective_ranks(TaskVector.from_tensors({"w": torch.diag(torch.tensor([10.0, 5.0, 1.0]))}), 0.9)
        {'w': 2}

    """
    target = Target(energy=energy)
    terms, _, _, _ = _terms_of(of, revision, token)
    matrices = [name for name in terms if len(terms[name][0].delta.shape) == 2]
    return {name: compress(name, terms[name], target).rank for name in progress_bar(matrices, "Ranks", progress)}


@dataclass(frozen=True, eq=False)
class LargeRows:
    """The rows (neurons) of an MLP's change: their norms, and which of them are large; made by `large_rows`.

    Args:
        name (`str`):
            The parameter.
        layer (`int`):
            Its layer.
        norms (`torch.Tensor`):
            The norm of each row.
        threshold (`float`):
            The norm from which on a row is large.

    """

    name: str
    layer: int
    norms: torch.Tensor
    threshold: float

    @property
    def index(self) -> torch.Tensor:
        """The numbers of the large rows."""
        return (self.norms >= self.threshold).nonzero().flatten()

    @property
    def share(self) -> float:
        """How many of the rows are large."""
        return len(self.index) / len(self.norms)

    @property
    def energy(self) -> float:
        """How much of the squared norm they hold."""
        whole = self.norms.square().sum().item()
        return self.norms[self.index].square().sum().item() / whole if whole else 0.0


def large_rows(vector: TaskVector, ratio: float = 0.1, *, progress: bool | None = None) -> list[LargeRows]:
    """Which neurons of the MLPs a vector changes much: rows of norm at least `ratio` times the largest row's.

    Corollary 2 of Li et al. (2025): only some rows are large, the others smaller by √(log B / B) for batches of B (0.19
    for 128), and those can be pruned. Rows are the outputs of the MLP's first matrices, however they are stored.

    Args:
        vector (`TaskVector`):
            The change.
        ratio (`float`, *optional*, defaults to 0.1):
            Which share of the largest row's norm makes a row large.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `list[LargeRows]`: One for each first matrix of an MLP.

    Raises:
        `BadValueError`: If the vector changes no such matrix, or `ratio` is not in (0, 1].

    Example:
        >>> import torch
        >>> from hf_taskvec import TaskVector
        >>> change = torch.tensor([[3.0, 4.0], [0.0, 0.1], [1.0, 0.0]])
        >>> large_rows(TaskVector.from_tensors({"model.layers.0.mlp.fc1.weight": change}))[0].index.tolist()
        [0, 2]

    """
    if not 0 < ratio <= 1:
        raise BadValueError(f"ratio={ratio} must be in (0, 1].")
    check_vectors(vector)
    found = []
    conv1d = transposed_among(vector, vector.provenance.architectures)
    for name, change in progress_bar(vector.items(), "Rows", progress, total=len(vector)):
        place = place_of(name)
        if place is None or place.kind != "MLP-1" or len(vector.shape(name)) != 2:
            continue
        norms = measures.row_norms(name, change.terms, axis=int(is_transposed(name, vector.shape(name), conv1d)))
        found.append(LargeRows(name, place.layer, norms, max(ratio * norms.max().item(), 5e-324)))
    if not found:
        raise BadValueError(f"{vector.expression} changes no first matrix of an MLP.")
    return found
