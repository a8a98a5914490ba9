"""How alike two tasks are: eq. (11) of Li et al. (2025), from the outputs of two fine-tuned models.

The models' outputs over a data set are centred, each by its own mean, and compared sample by sample by their cosine.
Two passes: the first for the means, the second for the cosines; a bounded number of outputs is held at a time.

The paper does not say which outputs of a language model it compares. Here they are the logits of the next token, pooled
in one of three ways (`Pooling`), so the values are to be compared with each other rather than with the paper's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.cosines import cosine_matrix, places_of
from hf_taskvec.analysis.token_batches import (
    Batch,
    Data,
    Rows,
    Subject,
    batches,
    check_batch_size,
    check_rows,
    looking_at,
    make_batch,
    model_of,
    progress_bar,
    skips_logits,
    token_rows,
    vocabulary_of,
)
from hf_taskvec.errors import BadValueError, MismatchError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: One sample for each row: the logits after its last token (`last`) or their mean over its tokens (`mean`); or one for
#: each of some positions of each row, drawn at random (`sample`).
Pooling = Literal["last", "mean", "sample"]

# The logits of one forward pass, and the pooled outputs of all models that are held, take at most so many bytes.
_LOGITS_BYTES = 1 << 29
_HELD_BYTES = 1 << 28
_HELD_EACH = 4 + 8  # bytes of an output: as the model gave it, and centred in fp64


@dataclass(frozen=True)
class Correlation:
    """α̂ of eq. (11): the mean of the correlations on either task's data, each in [−1, 1]."""

    value: float
    on_a: float
    on_b: float
    pooling: str
    samples: tuple[int, int]

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"α̂ = {self.value:+.3f} ({self.on_a:+.3f} on the first task's data, {self.on_b:+.3f} on the second's)"


@dataclass(frozen=True)
class CorrelationMatrix:
    """α̂ between each two of several tasks; 1 on the diagonal."""

    names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    pooling: str

    def __getitem__(self, pair: tuple[str, str]) -> float:
        one, other = places_of(pair, self.names, "task")
        return self.values[one][other]

    def figure(self) -> "Figure":
        """A heat map."""
        from hf_taskvec.analysis.plots import matrix_figure

        return matrix_figure(self.names, self.values, f"Task correlation α̂ ({self.pooling})")


def task_correlation(
    model_a: Subject,
    model_b: Subject,
    data_a: Data,
    data_b: Data,
    *,
    pooling: Pooling = "last",
    positions: int = 16,
    batch_size: int = 8,
    max_length: int | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Correlation:
    """The correlation α̂ of two tasks, from the models fine-tuned on them and held-out data of both: eq. (11).

    Args:
        model_a, model_b: the two fine-tuned models: live ones, or `Edited(base, vector)`, which needs one model in
            memory for both.
        data_a, data_b: each task's data: a `datasets.Dataset` with `input_ids`, token-id sequences, or texts.
        pooling: which outputs are compared: see `Pooling`.
        positions: how many positions of each row, with `pooling="sample"`.
        batch_size: rows in a forward pass.
        max_length: cut rows to this many tokens.
        tokenizer: for texts.
        seed: of the sampled positions.
        progress: show a progress bar; by default on a terminal.
    """
    subjects = {"a": model_a, "b": model_b}
    rows = {
        "a": token_rows(data_a, tokenizer, max_length, "data_a"),
        "b": token_rows(data_b, tokenizer, max_length, "data_b"),
    }
    pool = _Pool(pooling, positions, seed, batch_size)
    _check(subjects, rows, pool)
    found = {}
    with progress_bar([], "Correlating", progress, _steps(rows, subjects, pool)) as bar:
        for name in rows:
            found[name] = _cosines(list(subjects.values()), rows[name], [(0, 1)], pool, bar)[0]
    samples = tuple(sum(pool.count(row) for row in rows[name]) for name in "ab")
    return Correlation((found["a"] + found["b"]) / 2, found["a"], found["b"], pooling, (samples[0], samples[1]))


def correlation_matrix(
    models: Mapping[str, Subject],
    data: Mapping[str, Data],
    *,
    pooling: Pooling = "last",
    positions: int = 16,
    batch_size: int = 8,
    max_length: int | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    progress: bool | None = None,
) -> CorrelationMatrix:
    """α̂ between each two of several tasks. Each model sees each data set, whatever the number of pairs.

    Args:
        models: task -> its fine-tuned model (live, or `Edited(base, vector)`).
        data: task -> its data, under the same names.

    The other arguments are those of `task_correlation`.
    """
    if not isinstance(models, Mapping) or not isinstance(data, Mapping):
        raise BadValueError(
            "models and data are given by the tasks' names: correlation_matrix({name: model}, {name: data})."
        )
    if len(models) < 2:
        raise BadValueError("a correlation needs two tasks or more.")
    if set(models) != set(data):
        raise MismatchError(f"models and data name different tasks: {', '.join(sorted(set(models) ^ set(data)))}.")
    rows = {name: token_rows(data[name], tokenizer, max_length, f"the data of {name}") for name in models}
    pool = _Pool(pooling, positions, seed, batch_size)
    _check(models, rows, pool)
    names, subjects = tuple(models), list(models.values())
    halves: dict[tuple[int, int], list[float]] = {pair: [] for pair in combinations(range(len(names)), 2)}
    with progress_bar([], "Correlating", progress, _steps(rows, models, pool)) as bar:
        for own, name in enumerate(names):
            pairs = [pair for pair in halves if own in pair]
            for pair, value in zip(pairs, _cosines(subjects, rows[name], pairs, pool, bar), strict=True):
                halves[pair].append(value)
    values = [[1.0] * len(names) for _ in names]
    for (one, other), found in halves.items():
        values[one][other] = values[other][one] = sum(found) / 2
    return CorrelationMatrix(names, tuple(map(tuple, values)), f"{pooling} pooling")


def correlation_proxy(vectors: Sequence[TaskVector] | Mapping[str, TaskVector]) -> CorrelationMatrix:
    """The vectors' cosines in place of α̂: no model, no data, no forward pass.

    It orders pairs of tasks much as α̂ does, but its values are others: near 0 for most fine-tunes in large models.
    """
    found = cosine_matrix(vectors, progress=False)
    return CorrelationMatrix(found.names, found.total, "proxy: the vectors' cosine")


@dataclass(frozen=True)
class _Pool:
    """How samples are made of a row's logits."""

    how: Pooling
    positions: int
    seed: int
    batch_size: int

    def count(self, row: Sequence[int]) -> int:
        return min(self.positions, len(row)) if self.how == "sample" else 1

    def chosen(self, number: int, length: int) -> torch.Tensor:
        """The positions of a row that are looked at, whatever its neighbours in the batch."""
        if self.how == "last":
            return torch.tensor([length - 1])
        if self.how == "mean":
            return torch.arange(length)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return torch.randperm(length, generator=generator)[: self.positions].sort().values


def _check(subjects: Mapping[str, Subject], rows: Mapping[str, Rows], pool: _Pool) -> None:
    if pool.how not in get_args(Pooling):
        raise BadValueError(f"pooling={pool.how!r} is not one of {', '.join(get_args(Pooling))}.")
    if pool.positions < 1:
        raise BadValueError(f"positions={pool.positions}: at least one position of each row must be looked at.")
    check_batch_size(pool.batch_size)
    sizes = {name: vocabulary_of(model_of(subject)) for name, subject in subjects.items()}
    if len(set(sizes.values())) > 1:
        described = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise MismatchError(
            f"the models have vocabularies of different sizes ({described}), so their outputs cannot be compared. Give "
            "fine-tunes of one base."
        )
    for name, each in rows.items():
        if sum(pool.count(row) for row in each) < 2:
            raise BadValueError(
                f"the data of {name} gives one sample, which is its own mean: a correlation needs two rows or more."
            )
        for subject in subjects.values():
            check_rows(each, model_of(subject), f"the data of {name}")


def _chunks(rows: Rows, vocabulary: int, subjects: int, pool: _Pool) -> list[slice]:
    """Runs of rows whose outputs, of all models, may be held at once; a vector is put on and off once for each."""
    most = max(1, _HELD_BYTES // (_HELD_EACH * vocabulary * subjects))
    found, start, held = [], 0, 0
    for number, row in enumerate(rows):
        if held and held + pool.count(row) > most:
            found.append(slice(start, number))
            start, held = number, 0
        held += pool.count(row)
    return [*found, slice(start, len(rows))]


def _steps(rows: Mapping[str, Rows], subjects: Mapping[str, Subject], pool: _Pool) -> int:
    vocabulary = vocabulary_of(model_of(next(iter(subjects.values()))))
    total = 0
    for each in rows.values():
        passes = 1 if len(_chunks(each, vocabulary, len(subjects), pool)) == 1 else 2
        total += passes * len(each) * len(subjects)
    return total


def _cosines(
    subjects: Sequence[Subject], rows: Rows, pairs: Sequence[tuple[int, int]], pool: _Pool, bar: Any
) -> list[float]:
    """For each pair of models the mean cosine of their centred outputs over the rows."""
    vocabulary = vocabulary_of(model_of(subjects[0]))
    chunks = _chunks(rows, vocabulary, len(subjects), pool)

    def outputs(chunk: slice) -> Iterator[torch.Tensor]:
        for subject in subjects:
            with looking_at(subject) as model:
                found = _outputs(model, rows[chunk], chunk.start, pool, bar)
            yield found  # outside: whatever the caller does, the model is as it was

    sums = [torch.zeros(vocabulary, dtype=torch.float64) for _ in subjects]
    held: list[torch.Tensor] = []
    for chunk in chunks:
        for total, output in zip(sums, outputs(chunk), strict=True):
            total += output.sum(dim=0, dtype=torch.float64)
            if len(chunks) == 1:  # then the second pass needs no forward passes
                held.append(output)
    count = sum(map(pool.count, rows))
    means = [total / count for total in sums]

    def summed(chunk: slice) -> list[float]:
        centred = [_normed(output, mean) for output, mean in zip(held or outputs(chunk), means, strict=True)]
        return [torch.dot(centred[one].flatten(), centred[other].flatten()).item() for one, other in pairs]

    results = [sum(found) / count for found in zip(*map(summed, chunks), strict=True)]
    return [max(-1.0, min(1.0, result)) for result in results]


def _normed(output: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Samples less their mean, each of length 1, in fp64."""
    whole = torch.linalg.vector_norm(output, dim=1, keepdim=True, dtype=torch.float64)
    centred = output.double().sub_(mean)
    norms = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    # One text in two places of a batch may give outputs that differ in fp32's last digits.
    if not bool((norms > 1e-6 * whole).all()):
        raise BadValueError(
            "a model gives the same output for every row, so there is no direction to compare. Is all the data the same text?"
        )
    return centred.div_(norms)


def _outputs(model: Any, rows: Rows, first: int, pool: _Pool, bar: Any) -> torch.Tensor:
    """The pooled logits of some rows, one line for each sample, in fp32."""
    vocabulary = vocabulary_of(model)
    skips = skips_logits(model)
    found = []
    for batch in batches(rows, pool.batch_size, first):
        most = max(1, _LOGITS_BYTES // (4 * vocabulary * batch.input_ids.shape[1]))
        for start in range(0, len(batch.lengths), most):
            part = rows[batch.first - first :][start : min(start + most, len(batch.lengths))]
            found.append(_pooled(model, make_batch(part, batch.first + start), pool, skips))
        bar.update(len(batch.lengths))
    result = torch.cat(found)
    if not bool(result.isfinite().all()):
        raise BadValueError(
            "the model's logits are NaN or infinite: its weights are broken (or too large for float16)."
        )
    return result


@torch.inference_mode()
def _pooled(model: Any, batch: Batch, pool: _Pool, skips: bool) -> torch.Tensor:
    chosen = [pool.chosen(batch.first + i, int(length)) for i, length in enumerate(batch.lengths)]
    asked = torch.cat(chosen).unique()  # the output layer is not asked for what no row needs
    inputs = batch.inputs(model)
    keep = {"logits_to_keep": asked.to(inputs["input_ids"].device)} if skips else {}
    logits = model(**inputs, use_cache=False, **keep).logits
    place = {int(position): i for i, position in enumerate(asked)} if skips else None
    samples = []
    for i, positions in enumerate(chosen):
        index = positions if place is None else torch.tensor([place[int(p)] for p in positions])
        own = logits[i, index.to(logits.device)].float()
        samples.append(own.mean(dim=0, keepdim=True) if pool.how == "mean" else own)
    return torch.cat(samples).cpu()
