"""How alike two tasks are: eq. (11) of Li et al. (2025), from the outputs of two fine-tuned models.

The models' outputs over a data set are centred, each by its own mean, and compared sample by sample by their cosine.
Two passes: the first for the means, the second for the cosines; a bounded number of outputs is held at a time.

The paper does not say which outputs of a language model it compares. Here they are the logits of the next token, pooled
in one of three ways (`Pooling`), so the values are to be compared with each other rather than with the paper's.

Raw logits mostly tell what every fine-tune shares with the model it comes from, so unrelated tasks look alike, too.
`relative_to=base` compares what fine-tuning changed instead: log-probabilities less the base's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, get_args

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.argument_checks import check_batch_size
from hf_taskvec.analysis.cosines import cosine_matrix, places_of
from hf_taskvec.analysis.edited_models import FineTuned, applied_model, model_of
from hf_taskvec.analysis.pooled_logits import Pooling, SamplePooling, pooled_logits
from hf_taskvec.analysis.token_rows import Data, TokenRows, check_rows, token_rows
from hf_taskvec.errors import BadValueError, MismatchError
from hf_taskvec.figures import Plottable
from hf_taskvec.models.model_facts import vocabulary_size
from hf_taskvec.progress import progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The pooled outputs of all models that are held take at most so many bytes.
_HELD_BYTES = 1 << 28
_HELD_EACH = 4 + 8  # bytes of an output: as the model gave it, and centred in fp64


@dataclass(frozen=True)
class Correlation:
    """α̂ of eq. (11), made by `task_correlation`; `float(correlation)` is its value.

    Args:
        value (`float`):
            The mean of the two correlations, in [−1, 1].
        on_a (`float`):
            The correlation on the first task's data, in [−1, 1].
        on_b (`float`):
            The correlation on the second task's data, in [−1, 1].
        pooling (`str`):
            Which outputs were compared: `"last"`, `"mean"` or `"sample"`.
        samples (`tuple[int, int]`):
            The number of samples of either task's data.
        relative (`bool`):
            Whether log-probabilities less a base's were compared, not logits.

    """

    value: float
    on_a: float
    on_b: float
    pooling: Pooling
    samples: tuple[int, int]
    relative: bool = False

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"α̂ = {self.value:+.3f} ({self.on_a:+.3f} on the first task's data, {self.on_b:+.3f} on the second's)"


@dataclass(frozen=True)
class CorrelationMatrix(Plottable):
    """α̂ between each two of several tasks; `matrix["a", "b"]` is one of them.

    Args:
        names (`tuple[str, ...]`):
            The tasks, in the order of rows and columns.
        values (`tuple[tuple[float, ...], ...]`):
            The correlations; 1 on the diagonal.
        method (`str`):
            How they were measured, in words.

    """

    names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    method: str

    def __getitem__(self, pair: tuple[str, str]) -> float:
        one, other = places_of(pair, self.names, "task")
        return self.values[one][other]

    def figure(self) -> "Figure":
        """A heat map of the correlations.

        Returns:
            `matplotlib.figure.Figure`: The figure.

        Raises:
            `UnsupportedError`: If matplotlib is not installed.

        """
        from hf_taskvec.analysis.result_figures import heat_map_figure

        return heat_map_figure(self.names, self.values, f"Task correlation α̂ ({self.method})")


def task_correlation(
    model_a: FineTuned,
    model_b: FineTuned,
    data_a: Data,
    data_b: Data,
    *,
    relative_to: FineTuned | None = None,
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
        model_a (`torch.nn.Module` or `EditedModel`):
            The model fine-tuned on the first task: a live one, or `EditedModel(base, vector)`, with which one model in
            memory is enough for both.
        model_b (`torch.nn.Module` or `EditedModel`):
            The model fine-tuned on the second task.
        data_a (`Dataset`, or an iterable of token-id sequences or texts):
            The first task's data; a `datasets.Dataset` has the column `input_ids`.
        data_b (`Dataset`, or an iterable of token-id sequences or texts):
            The second task's data.
        relative_to (`torch.nn.Module` or `EditedModel`, *optional*):
            The model that the fine-tunes come from. Then log-probabilities less this model's are compared: what each
            fine-tune changed. Without it, the logits themselves are, as eq. (11) has it.
        pooling (`str`, *optional*, defaults to `"last"`):
            Which outputs are compared. One sample for each row: the logits after its last token (`"last"`), or their
            mean over its tokens (`"mean"`); or one for each of some positions of each row, drawn at random
            (`"sample"`).
        positions (`int`, *optional*, defaults to 16):
            How many positions of each row, with `pooling="sample"`.
        batch_size (`int`, *optional*, defaults to 8):
            Rows in a forward pass.
        max_length (`int`, *optional*):
            Cut rows to this many tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts.
        seed (`int`, *optional*, defaults to 0):
            Of the sampled positions.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `Correlation`: α̂, and its two halves.

    Raises:
        `BadValueError`: If the data is empty or all the same, or logits are NaN or infinite.
        `MismatchError`: If the models have vocabularies of different sizes.

    Example:
        >>> alpha = task_correlation(tuned_a, tuned_b, texts_a, texts_b, tokenizer=tokenizer)  # doctest: +SKIP
        >>> recommend_scales(alpha).forget.in_sweep.scale  # doctest: +SKIP

    """
    subjects = {"a": model_a, "b": model_b}
    rows = {
        "a": token_rows(data_a, tokenizer, max_length, "data_a"),
        "b": token_rows(data_b, tokenizer, max_length, "data_b"),
    }
    pool = SamplePooling(pooling, positions, seed, batch_size)
    _check(subjects, relative_to, rows, pool)
    outputs = _Outputs(list(subjects.values()), relative_to, pool)
    found = {}
    with progress_bar([], "Correlating", progress, outputs.steps(rows)) as bar:
        for name in rows:
            found[name] = _cosines(outputs, rows[name], [(0, 1)], bar)[0]
    samples = tuple(sum(pool.count(row) for row in rows[name]) for name in "ab")
    mean, relative = (found["a"] + found["b"]) / 2, relative_to is not None
    return Correlation(mean, found["a"], found["b"], pooling, (samples[0], samples[1]), relative)


def correlation_matrix(
    models: Mapping[str, FineTuned],
    data: Mapping[str, Data],
    *,
    relative_to: FineTuned | None = None,
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
        models (`Mapping[str, torch.nn.Module | EditedModel]`):
            For each task its fine-tuned model: a live one, or `EditedModel(base, vector)`.
        data (`Mapping[str, Dataset]`, or of iterables of token-id sequences or texts):
            For each task its data, under the same names.
        relative_to (`torch.nn.Module` or `EditedModel`, *optional*):
            The model that the fine-tunes come from. Then log-probabilities less this model's are compared: what each
            fine-tune changed. Without it, the logits themselves are, as eq. (11) has it.
        pooling (`str`, *optional*, defaults to `"last"`):
            Which outputs are compared. One sample for each row: the logits after its last token (`"last"`), or their
            mean over its tokens (`"mean"`); or one for each of some positions of each row, drawn at random
            (`"sample"`).
        positions (`int`, *optional*, defaults to 16):
            How many positions of each row, with `pooling="sample"`.
        batch_size (`int`, *optional*, defaults to 8):
            Rows in a forward pass.
        max_length (`int`, *optional*):
            Cut rows to this many tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts.
        seed (`int`, *optional*, defaults to 0):
            Of the sampled positions.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `CorrelationMatrix`: α̂ of each pair.

    Raises:
        `BadValueError`: If there are fewer than two tasks, the data is empty or all the same, or logits are NaN.
        `MismatchError`: If `models` and `data` name different tasks, or the vocabularies differ in size.

    Example:
        >>> models = {name: EditedModel(base, vector) for name, vector in vectors.items()}  # doctest: +SKIP
        >>> correlation_matrix(models, texts, tokenizer=tokenizer).plot("correlation.png")  # doctest: +SKIP

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
    pool = SamplePooling(pooling, positions, seed, batch_size)
    _check(models, relative_to, rows, pool)
    names, outputs = tuple(models), _Outputs(list(models.values()), relative_to, pool)
    halves: dict[tuple[int, int], list[float]] = {pair: [] for pair in combinations(range(len(names)), 2)}
    with progress_bar([], "Correlating", progress, outputs.steps(rows)) as bar:
        for own, name in enumerate(names):
            pairs = [pair for pair in halves if own in pair]
            for pair, value in zip(pairs, _cosines(outputs, rows[name], pairs, bar), strict=True):
                halves[pair].append(value)
    values = [[1.0] * len(names) for _ in names]
    for (one, other), found in halves.items():
        values[one][other] = values[other][one] = sum(found) / 2
    method = f"{pooling} pooling" if relative_to is None else f"{pooling} pooling, relative to the base"
    return CorrelationMatrix(names, tuple(map(tuple, values)), method)


def correlation_proxy(
    vectors: Sequence[TaskVector] | Mapping[str, TaskVector], *, progress: bool | None = None
) -> CorrelationMatrix:
    """The vectors' cosines in place of α̂: no model, no data, no forward pass.

    It orders pairs of tasks much as α̂ does, but its values are others: near 0 for most fine-tunes in large models.

    Args:
        vectors (`Sequence[TaskVector]` or `Mapping[str, TaskVector]`):
            By name; or a sequence, whose expressions are the names.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `CorrelationMatrix`: The cosine of each pair.

    Raises:
        `BadValueError`: If there are fewer than two vectors, or one changes nothing.
        `MismatchError`: If they are of models of different sizes or architectures.

    Example:
        >>> import torch
        >>> one, other = (TaskVector.from_tensors({"w": torch.tensor(w)}) for w in ([3.0, 4.0], [1.0, 0.0]))
        >>> correlation_proxy({"a": one, "b": other})["a", "b"]
        0.6

    """
    found = cosine_matrix(vectors, progress=progress)
    return CorrelationMatrix(found.names, found.total, "proxy: the vectors' cosine")


def _check(
    models: Mapping[str, FineTuned], relative_to: FineTuned | None, rows: Mapping[str, TokenRows], pool: SamplePooling
) -> None:
    if pool.how not in get_args(Pooling):
        raise BadValueError(f"pooling={pool.how!r} is not one of {', '.join(get_args(Pooling))}.")
    if pool.positions < 1:
        raise BadValueError(f"positions={pool.positions}: at least one position of each row must be looked at.")
    check_batch_size(pool.batch_size)
    subjects = dict(models) if relative_to is None else {**models, "relative_to": relative_to}
    sizes = {name: vocabulary_size(model_of(subject).config) for name, subject in subjects.items()}
    if len(set(sizes.values())) > 1:
        described = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise MismatchError(
            f"the models have vocabularies of different sizes ({described}), so their outputs cannot be compared. "
            "Give fine-tunes of one base."
        )
    for name, each in rows.items():
        if sum(pool.count(row) for row in each) < 2:
            raise BadValueError(
                f"the data of {name} gives one sample, which is its own mean: a correlation needs two rows or more."
            )
        for subject in subjects.values():
            check_rows(each, model_of(subject), f"the data of {name}")


@dataclass(frozen=True)
class _Outputs:
    """What is compared: outputs of some models, perhaps less those of the model that they come from."""

    subjects: Sequence[FineTuned]
    relative_to: FineTuned | None
    pool: SamplePooling

    @property
    def vocabulary(self) -> int:
        return vocabulary_size(model_of(self.subjects[0]).config)

    @property
    def models(self) -> int:
        """How many models are asked."""
        return len(self.subjects) + (self.relative_to is not None)

    def chunks(self, rows: TokenRows) -> list[slice]:
        """Runs of rows whose outputs, of all models, may be held at once; each vector is applied once for each."""
        most = max(1, _HELD_BYTES // (_HELD_EACH * self.vocabulary * self.models))
        found, start, held = [], 0, 0
        for number, row in enumerate(rows):
            if held and held + self.pool.count(row) > most:
                found.append(slice(start, number))
                start, held = number, 0
            held += self.pool.count(row)
        return [*found, slice(start, len(rows))]

    def steps(self, rows: Mapping[str, TokenRows]) -> int:
        """How many rows are read in all, by all models."""
        return sum((1 if len(self.chunks(each)) == 1 else 2) * len(each) * self.models for each in rows.values())

    def of(self, rows: TokenRows, chunk: slice, bar: Any) -> Iterator[torch.Tensor]:
        """Of each model in turn, the outputs on a run of rows."""

        def measured(subject: FineTuned) -> torch.Tensor:
            with applied_model(subject) as model:
                return pooled_logits(model, rows[chunk], chunk.start, self.pool, bar, log=self.relative_to is not None)

        start = None if self.relative_to is None else measured(self.relative_to)
        for subject in self.subjects:
            found = measured(subject)
            yield found if start is None else found.sub_(start)  # whatever the caller does, the model is as it was


def _cosines(outputs: _Outputs, rows: TokenRows, pairs: Sequence[tuple[int, int]], bar: Any) -> list[float]:
    """For each pair of models the mean cosine of their centred outputs over the rows."""
    chunks = outputs.chunks(rows)
    sums = [torch.zeros(outputs.vocabulary, dtype=torch.float64) for _ in outputs.subjects]
    held: list[torch.Tensor] = []
    for chunk in chunks:
        for total, output in zip(sums, outputs.of(rows, chunk, bar), strict=True):
            total += output.sum(dim=0, dtype=torch.float64)
            if len(chunks) == 1:  # then the second pass needs no forward passes
                held.append(output)
    count = sum(map(outputs.pool.count, rows))
    means = [total / count for total in sums]

    def summed(chunk: slice) -> list[float]:
        centred = [
            _normed(output, mean) for output, mean in zip(held or outputs.of(rows, chunk, bar), means, strict=True)
        ]
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
            "a model gives the same output for every row, so there is no direction to compare. "
            "Is all the data the same text, or a fine-tune the model that it comes from?"
        )
    return centred.div_(norms)
