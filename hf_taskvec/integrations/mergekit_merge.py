"""`open_merge`: a YAML of mergekit as a model and a task vector, which together are the merged model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_taskvec.algebra.deltas import Dense, Difference
from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.parameter_names import layer_count
from hf_taskvec.algebra.provenance import Origin, Provenance
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.sums import Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.to_checkpoint import apply, largest_applied_size
from hf_taskvec.errors import BadValueError, MismatchError, UnsupportedError
from hf_taskvec.extraction.from_finetuned import VocabularyChoice
from hf_taskvec.integrations.mergekit_config import MergekitConfig, MergeSlice, MergeSource, read_mergekit_config
from hf_taskvec.merging import combine
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.companions import COMPANIONS
from hf_taskvec.models.stacked_layers import stacked_layers, stacked_tensors
from hf_taskvec.models.tokenizer_digest import vocabulary_digest


@dataclass(frozen=True)
class MergekitMerge:
    """A merge that a YAML of mergekit describes: the merged model is `base + vector`.

    Args:
        config (`MergekitConfig`):
            What the YAML says.
        base (`Checkpoint`):
            The model that the vector starts from: the `base_model`, or else the first of the models; with `slices` that
            move layers, one of those layers.
        vector (`TaskVector`):
            What the merge changes in it, lazily. Other λ than 1 go less far, or further.

    """

    config: MergekitConfig
    base: Checkpoint
    vector: TaskVector

    def apply(
        self,
        output: str | Path,
        *,
        scale: float = 1.0,
        dtype: str | None = None,
        max_shard_size: int | str | None = None,
        overwrite: bool = False,
        progress: bool | None = None,
    ) -> Path:
        """Write the merged model, streamed.

        Args:
            output (`str` or `Path`):
                The folder to write.
            scale (`float`, *optional*, defaults to 1.0):
                λ.
            dtype (`str`, *optional*):
                Of the result; by default the YAML's `out_dtype`, else its `dtype`, else the base's own.
            max_shard_size (`int` or `str`, *optional*):
                The largest size of one file; by default the base's own files.
            overwrite (`bool`, *optional*, defaults to `False`):
                Replace an earlier output.
            progress (`bool`, *optional*):
                Show a progress bar; by default on a terminal.

        Returns:
            `Path`: The folder.

        """
        chosen = self._layout(dtype, max_shard_size)
        return apply(self.vector, self.base, output, scale=scale, overwrite=overwrite, progress=progress, **chosen)

    def largest_size(self, *, dtype: str | None = None, max_shard_size: int | str | None = None) -> int:
        """How many bytes `apply` writes at most; nothing is read."""
        return largest_applied_size(self.vector, self.base, **self._layout(dtype, max_shard_size))

    def _layout(self, dtype: str | None, max_shard_size: int | str | None) -> dict[str, Any]:
        size = max_shard_size or ("5GB" if self.base.is_stacked else None)  # its files have no order of their own
        return {"dtype": dtype or self.config.dtype, "max_shard_size": size}


def open_merge(
    config: str | Path | Mapping[str, Any] | MergekitConfig,
    *,
    seed: int = 0,
    vocabulary: VocabularyChoice | None = None,
    token: str | bool | None = None,
) -> MergekitMerge:
    """A YAML of mergekit, ready to be run: its models are opened, and nothing but what angles need is read.

    Args:
        config (`str`, `Path`, `Mapping` or `MergekitConfig`):
            The file, or what it holds.
        seed (`int`, *optional*, defaults to 0):
            Chooses what random methods (DARE, DELLA) drop.
        vocabulary (`str`, *optional*):
            For models whose embeddings have other numbers of rows: see `TaskVector.from_finetuned`.
        token (`str` or `bool`, *optional*):
            For Hub ids, as in transformers.

    Returns:
        `MergekitMerge`: The base and the vector.

    Raises:
        `MissingNameError`: If the YAML has an option, a method or a parameter that there is not.
        `UnsupportedError`: If it has one that is not supported here.
        `BadValueError`: If a value makes no sense.
        `MismatchError`: If the models do not belong together.

    Example:
        ```python
        merge = open_merge("merge.yaml")
        merge.apply("merged")  # what mergekit would write
        sweep(model, merge.vector, [0, 0.5, 1], books)  # and how far of the way is best
        ```

    """
    read = config if isinstance(config, MergekitConfig) else read_mergekit_config(config)
    opened: dict[str, Checkpoint] = {}

    def open_model(weights: str) -> Checkpoint:
        if weights not in opened:
            opened[weights] = open_checkpoint(weights, None, token, [*COMPANIONS])
        return opened[weights]

    first = [_reference(each, read.base_model) for each in read.slices]
    of_first = open_model(first[0].weights)
    layers = layer_count(of_first.tensors)
    if _is_in_place(read.slices, first, layers):
        base, columns, slices = _by_models(read, first[0].weights, of_first, vocabulary, token)
    else:
        base, columns, slices = _by_layers(read, first, open_model)
    _check_tokenizer(read, base, open_model)
    whole = _needs_whole(read)
    if whole:
        columns = [*columns, _weights_of(base)]
    if not columns:
        return MergekitMerge(read, base, TaskVector({}))
    options: dict[str, Any] = {"parameters": dict(read.parameters)} if read.parameters else {}
    options |= ({"whole": True} if whole else {}) | ({"seed": seed} if seed else {})
    return MergekitMerge(read, base, combine(columns, "mergekit", method=read.method, slices=slices, **options))


def _reference(each: MergeSlice, base_model: str | None) -> MergeSource:
    """The model of a slice that its vectors start from."""
    fallback = each.sources[0]
    if base_model is None:
        return MergeSource(fallback.weights, fallback.layers, fallback.parameters)
    listed = next((source for source in each.sources if source.model == base_model), None)
    if listed is None and fallback.layers is not None:
        raise BadValueError(f"slices: the base_model {base_model} has to be one of the sources, with its layer_range.")
    return listed or MergeSource(base_model, None, {})


def _is_in_place(slices: Sequence[MergeSlice], first: Sequence[MergeSource], layers: int) -> bool:
    """Whether each layer of the output is made of the same layer of the models, and starts from one of them."""
    start = 0
    for each, reference in zip(slices, first, strict=True):
        if any(source.layers is None for source in each.sources):
            return True
        if reference.model != first[0].model or len({source.layers for source in each.sources}) != 1:
            return False
        begin, stop = each.sources[0].layers or (0, 0)
        if begin != start:
            return False
        start = stop
    return start == layers


_Parts = tuple[Checkpoint, list[TaskVector], list[dict[str, Any]]]


def _by_models(
    read: MergekitConfig,
    reference: str,
    base: Checkpoint,
    vocabulary: VocabularyChoice | None,
    token: str | bool | None,
) -> _Parts:
    """Every model is a vector: the usual case."""
    named = [source for each in read.slices for source in each.sources if source.model != reference]
    numbers = {model: number for number, model in enumerate(dict.fromkeys(source.model for source in named))}
    vectors = {}
    for source in named:
        if source.model in vectors:
            continue
        vector = TaskVector({})
        if source.weights != reference:
            vector = TaskVector.from_finetuned(reference, source.weights, vocabulary=vocabulary, token=token)
        if source.adapter is not None:
            vector = vector + TaskVector.from_adapter(source.adapter, base=source.weights, token=token)
        vectors[source.model] = vector
    slices, end = [], 0
    for each in read.slices:
        start, end = each.sources[0].layers or (0, layer_count(base.tensors))
        entries = [(numbers.get(source.model), source.parameters) for source in each.sources]
        if read.method == "slerp" and all(vector is not None for vector, _ in entries):
            entries.insert(0, (None, {}))  # the base_model is one of the two, listed or not
        slices.append(_entry(start, end, entries, each.parameters))
    return base, list(vectors.values()), slices


def _by_layers(read: MergekitConfig, first: Sequence[MergeSource], open_model: Any) -> _Parts:
    """Layers that move, or start from several models: the base is put together of them, and so is each vector."""
    with_adapter = next((source for each in read.slices for source in each.sources if source.adapter), None)
    if with_adapter is not None:
        raise UnsupportedError(
            f"slices that move layers cannot take {with_adapter.model} with an adapter on it. Write that model first: "
            f"taskvec apply {with_adapter.adapter} {with_adapter.weights} -o MODEL"
        )
    width = max(len(each.sources) for each in read.slices)
    if any(len(each.sources) != width for each in read.slices):
        raise UnsupportedError(
            "slices that move layers must have the same number of sources. Write the slices that merge fewer first."
        )
    orders = []  # of each slice its sources, the one that the vectors start from at first
    for each, reference in zip(read.slices, first, strict=True):
        others = [source for source in each.sources if source.model != reference.model]
        orders.append([reference, *others])

    def stack(column: int) -> tuple[list[tuple[Checkpoint, int]], tuple[Checkpoint, Checkpoint]]:
        layers = []
        for order in orders:
            start, stop = order[column].layers or (0, 0)
            layers += [(open_model(order[column].weights), number) for number in range(start, stop)]
        return layers, (open_model(orders[0][column].weights), open_model(orders[-1][column].weights))

    base = stacked_layers(*stack(0))
    columns = []
    for column in range(1, width):
        layers, ends = stack(column)
        models = list(dict.fromkeys(model.name for model, _ in layers))
        columns.append(_stacked_difference(base, stacked_tensors(layers, ends), models))
    slices, end = [], 0
    for each, order in zip(read.slices, orders, strict=True):
        start, (low, high) = end, order[0].layers or (0, 0)
        end = start + high - low
        entries = [(number - 1 if number else None, source.parameters) for number, source in enumerate(order)]
        slices.append(_entry(start, end, entries, each.parameters))
    return base, columns, slices


def _entry(
    start: int, stop: int, sources: Sequence[tuple[int | None, Mapping[str, Any]]], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """A slice as the rule takes it."""
    made = [{"vector": vector, **({"parameters": dict(given)} if given else {})} for vector, given in sources]
    return {"layers": [start, stop], "sources": made, **({"parameters": dict(parameters)} if parameters else {})}


def _stacked_difference(base: Checkpoint, tensors: Mapping[str, Source], models: Sequence[str]) -> TaskVector:
    """The vector from one stack of layers to another."""
    terms = {}
    for name, source in base.tensors.items():
        other = tensors.get(name)
        if other is None or other.shape != source.shape:
            raise MismatchError(f"{name}: the layers that are put together have other shapes, or are of other kinds.")
        if other != source:
            terms[name] = [Term(1.0, Difference(source, other))]
    how = f"layers of {', '.join(models)}"
    return TaskVector(terms, Provenance.of(Origin(label_for("_".join(models)), how, base.record())))


def _weights_of(base: Checkpoint) -> TaskVector:
    """The weights of a model itself, for what is no sum of changes."""
    terms = {name: [Term(1.0, Dense((source,)))] for name, source in base.tensors.items()}
    return TaskVector(terms, Provenance.of(Origin(label_for(base.name), "the weights themselves", base.record())))


def _needs_whole(read: MergekitConfig) -> bool:
    """Whether the method takes the weights of whole models, and not only their changes."""
    if read.method == "linear":
        every = [read.parameters, *(each.parameters for each in read.slices)]
        return any(given.get("normalize", True) is not True for given in every)
    if read.method == "passthrough":
        every = [read.parameters, *(each.parameters for each in read.slices)]
        every += [source.parameters for each in read.slices for source in each.sources]
        return any("scale" in given for given in every)
    return read.method == "slerp" or (read.method == "nuslerp" and read.base_model is None)


def _check_tokenizer(read: MergekitConfig, base: Checkpoint, open_model: Any) -> None:
    """Make sure that the tokenizer that is written, the base's, is the one that is asked for."""
    asked = read.tokenizer_source
    if asked is None:
        return
    if asked == "base" and read.base_model is None:
        raise BadValueError("tokenizer_source: base, and there is no base_model.")
    models = {name: open_model(name.partition("+")[0]) for name in read.models}
    if asked not in ("base", "union") and asked not in models:
        raise BadValueError(f"tokenizer_source: {asked} is none of the models. Take base, union, or one of them.")
    digests = {vocabulary_digest(model.folder) for model in models.values() if model.folder}
    if len(digests) != 1 or None in digests:
        raise UnsupportedError(
            f"tokenizer_source: {asked}, and the models have different vocabularies, or none that can be read: rows of "
            "embeddings are not moved to other tokens here. Give models of one vocabulary."
        )
    if asked not in ("base", "union") and models[asked].folder != base.folder:
        raise UnsupportedError(
            f"tokenizer_source: {asked} has the same vocabulary as {base.name}, whose files are written. Leave it out, "
            f"and copy the tokenizer's files from {asked} if they are better."
        )
