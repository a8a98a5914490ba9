"""The benchmarks by name: which data sets they need, how they ask, and how they are loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.benchmarks.benchmark_scores import (
    MUSE_METRICS,
    TOFU_METRICS,
    ItemValues,
    muse_scores,
    tofu_scores,
)
from hf_taskvec.evaluation.benchmarks.data_sources import DataSource, HubAccess, load_rows
from hf_taskvec.evaluation.benchmarks.prompt_forms import PromptForm, prompt_form
from hf_taskvec.evaluation.benchmarks.published_rows import PUBLISHED, PublishedTable
from hf_taskvec.evaluation.scoring.metrics import MetricInfo
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.protocols import Decoding, Protocol
from hf_taskvec.json_files import json_digest

BenchmarkName = Literal["muse/books", "muse/news", "tofu/forget01", "tofu/forget05", "tofu/forget10"]
PartKind = Literal["continuation", "few_shot", "text", "truth", "answer"]
# The number that each item of a kind gets.
ITEM_VALUES: dict[PartKind, tuple[str, ...]] = {
    "continuation": ("rouge_l",),
    "few_shot": ("rouge_l", "rouge_l_recall"),
    "text": ("min_k",),
    "answer": ("min_k",),
    "truth": (
        "rouge_l_recall",
        "probability",
        "normalised_probability",
        "min_k",
        "truth_ratio",
        "truth_ratio_open_unlearning",
    ),
}
_VERBMEM = protocols.get("open-unlearning")
_KNOWMEM = replace(_VERBMEM, name="muse-knowmem", answer_length=2048, decoding=Decoding(max_new_tokens=32))
_TOFU = replace(_VERBMEM, name="tofu-answers", answer_length=2048, decoding=Decoding(max_new_tokens=200))


@dataclass(frozen=True)
class BenchmarkItem:
    """One row of a part.

    Args:
        prompt (`str`):
            The question, or the text to continue; empty where the whole text is judged.
        answer (`str`):
            What is true.
        paraphrase (`str`, *optional*):
            The same in other words; the answer itself where the data set has no other.
        wrong (`tuple[str]`, *optional*):
            Wrong answers to the same question.
    """

    prompt: str
    answer: str
    paraphrase: str = ""
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchmarkPart:
    """The items of one data set, and how a model is asked for them.

    Args:
        name (`str`):
            What reports call it.
        kind (`"continuation"`, `"few_shot"`, `"text"`, `"truth"` or `"answer"`):
            `"continuation"`: a text is continued; `"few_shot"`: a question is answered after in-context examples;
            `"text"`: the likelihood of a whole text; `"answer"`: that of an answer; `"truth"`: a question is answered,
            and the likelihoods of the answer, of its paraphrase and of wrong ones are compared.
        source (`DataSource`):
            Where the items are from.
        protocol (`Protocol`):
            How the model generates, and for how long.
        items (`tuple[BenchmarkItem]`):
            What is asked.
        examples (`tuple[tuple[str, str]]`, *optional*):
            In-context questions and answers.
    """

    name: str
    kind: PartKind
    source: DataSource
    protocol: Protocol
    items: tuple[BenchmarkItem, ...] = field(repr=False)
    examples: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def fingerprint(self) -> str:
        """sha256 of the items and the examples: what they say, not where they were."""
        rows = [[item.prompt, item.answer, item.paraphrase, item.wrong] for item in self.items]
        return json_digest(rows, self.examples)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark with its data, ready to be asked; made by `load_benchmark`.

    Args:
        name (`str`):
            Such as `muse/books`.
        parts (`tuple[BenchmarkPart]`):
            The sets of items.
        prompt (`PromptForm`):
            How questions are put.
        training (`dict[str, DataSource]`):
            What a model is trained on: `forget` and `retain` (and `full`, TOFU's both). They are named, not loaded.
        metrics (`tuple[MetricInfo]`):
            What each metric of a report means, the published ones first.
    """

    name: str
    parts: tuple[BenchmarkPart, ...]
    prompt: PromptForm
    training: Mapping[str, DataSource]
    metrics: tuple[MetricInfo, ...] = field(repr=False)

    @property
    def published(self) -> PublishedTable:
        """What others report of it."""
        return PUBLISHED[self.name]

    def part(self, name: str) -> BenchmarkPart:
        """The part of that name.

        Raises:
            `MissingNameError`: If there is none.
        """
        known = {part.name: part for part in self.parts}
        if name not in known:
            raise MissingNameError(
                f"{self.name} has no part {name!r}.{did_you_mean(name, known)} Its parts are {', '.join(known)}"
            )
        return known[name]


@dataclass(frozen=True)
class PartDefinition:
    """A part before its data is loaded: as `BenchmarkPart`, with the source of its in-context examples."""

    name: str
    kind: PartKind
    source: DataSource
    protocol: Protocol
    examples: DataSource | None = None


@dataclass(frozen=True)
class BenchmarkDefinition:
    """A benchmark before its data is loaded.

    Args:
        parts (`tuple[PartDefinition]`):
            The sets of items.
        training (`dict[str, DataSource]`):
            What a model is trained on.
        metrics (`tuple[MetricInfo]`):
            What is reported.
        scores (`Callable`):
            Gives these metrics, from a model's numbers of every item and the retrained model's.
    """

    parts: tuple[PartDefinition, ...]
    training: Mapping[str, DataSource]
    metrics: tuple[MetricInfo, ...]
    scores: Callable[[ItemValues, ItemValues], dict[str, float]]


def _muse(corpus: str) -> BenchmarkDefinition:
    # Configurations, splits and columns as in muse_bench's load_data.py and open-unlearning's configs/data/datasets.
    repo = f"muse-bench/MUSE-{corpus}"

    def knowmem(split: str) -> PartDefinition:
        qa = ("question", "answer")
        source, shots = (DataSource(repo, "knowmem", f"{split}_{kind}", qa) for kind in ("qa", "qa_icl"))
        return PartDefinition(f"knowmem_{split}", "few_shot", source, _KNOWMEM, shots)

    def privleak(split: str) -> PartDefinition:
        return PartDefinition(f"privleak_{split}", "text", DataSource(repo, "privleak", split, ("text",)), _VERBMEM)

    return BenchmarkDefinition(
        parts=(
            PartDefinition(
                "verbmem_forget", "continuation", DataSource(repo, "verbmem", "forget", ("prompt", "gt")), _VERBMEM
            ),
            knowmem("forget"),
            knowmem("retain"),
            privleak("forget"),
            privleak("holdout"),
        ),
        training={
            "forget": DataSource(repo, "raw", "forget", ("text",)),
            "retain": DataSource(repo, "raw", "retain1", ("text",)),
        },
        metrics=MUSE_METRICS,
        scores=muse_scores,
    )


def _tofu(share: int) -> BenchmarkDefinition:
    # Configurations and columns as in open-unlearning's configs and TOFU's config/eval_everything.yaml. These name
    # holdout10 only; holdout01 and holdout05 are as in scripts of others.
    def source(config: str, *columns: str, lists: tuple[str, ...] = ()) -> DataSource:
        return DataSource("locuslab/TOFU", config, "train", ("question", "answer", *columns), lists)

    def truth(name: str, config: str, *columns: str) -> PartDefinition:
        return PartDefinition(name, "truth", source(config, *columns, lists=("perturbed_answer",)), _TOFU)

    return BenchmarkDefinition(
        parts=(
            truth("forget", f"forget{share:02}_perturbed", "paraphrased_answer"),
            truth("retain", "retain_perturbed", "paraphrased_answer"),
            truth("real_authors", "real_authors_perturbed"),
            truth("world_facts", "world_facts_perturbed"),
            PartDefinition("holdout", "answer", source(f"holdout{share:02}"), _TOFU),
        ),
        training={
            "forget": source(f"forget{share:02}"),
            "retain": source(f"retain{100 - share}"),
            "full": source("full"),
        },
        metrics=TOFU_METRICS,
        scores=tofu_scores,
    )


DEFINITIONS: dict[str, BenchmarkDefinition] = {
    "muse/books": _muse("Books"),
    "muse/news": _muse("News"),
    "tofu/forget01": _tofu(1),
    "tofu/forget05": _tofu(5),
    "tofu/forget10": _tofu(10),
}


def load_benchmark(
    name: BenchmarkName | str,
    *,
    prompt: str | PromptForm = "question",
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Benchmark:
    """A benchmark with its data sets, fetched from the Hub (or from the cache) and checked.

    Args:
        name (`str`):
            `"muse/books"`, `"muse/news"`, `"tofu/forget01"`, `"tofu/forget05"` or `"tofu/forget10"`.
        prompt (`str` or `PromptForm`, *optional*, defaults to `"question"`):
            How questions are put: `"question"` (`Question: …` and `Answer: …`, as base models are asked),
            `"llama-2-chat"`, or `"chat"`, the tokenizer's chat template, with which TOFU's published rows were made. A
            model is asked as it was fine-tuned.
        revision (`str`, *optional*):
            A branch, tag or commit of the data set. A report has a fingerprint of the rows, whatever revision it was.
        token (`str` or `bool`, *optional*):
            For a private or gated data set.
        progress (`bool`, *optional*):
            Show the progress bars of a download; by default on a terminal.

    Returns:
        `Benchmark`: Its parts, prompts, generation settings and metrics.

    Raises:
        `MissingNameError`: If there is no such benchmark or prompt form, or a data set lacks a column.
        `MissingFileError`: If there is no such data set, revision, configuration or split on the Hub, or it is empty.
        `HubError`: If the Hub cannot be reached and the data is not in the cache.
        `BadValueError`: If a value is of another type, a file is damaged, or two parts hold the same rows.

    Example:
        >>> books = load_benchmark("muse/books")  # doctest: +SKIP
        >>> books.part("knowmem_forget").items[0].prompt  # a question  # doctest: +SKIP

    """
    definition, form, access = _definition(name), prompt_form(prompt), HubAccess(revision, token, progress)
    parts = tuple(_load_part(part, access) for part in definition.parts)
    check_parts_differ(parts)
    return Benchmark(name, parts, form, definition.training, definition.metrics)


def load_benchmark_part(name: str, part: str, *, prompt: str | PromptForm = "question") -> Benchmark:
    """The benchmark with one of its parts alone: no other data set is fetched. Arguments and errors as above."""
    definition = _definition(name)
    parts = tuple(_load_part(each, HubAccess()) for each in definition.parts if each.name == part)
    found = Benchmark(name, parts, prompt_form(prompt), definition.training, definition.metrics)
    found.part(part)  # there is one
    return found


def check_parts_differ(parts: Sequence[BenchmarkPart]) -> None:
    """Refuse two parts with the same rows: forgetting and keeping the same, or a held-out set that is none."""
    seen: dict[str, BenchmarkPart] = {}
    for part in parts:
        other = seen.setdefault(part.fingerprint, part)
        if other is not part:
            raise BadValueError(
                f"the parts {other.name!r} ({other.source.id}) and {part.name!r} ({part.source.id}) hold the same "
                "rows: one of the two data sets is not what its name says"
            )


def _definition(name: str) -> BenchmarkDefinition:
    if name not in DEFINITIONS:
        raise MissingNameError(
            f"no benchmark {name!r}.{did_you_mean(name, DEFINITIONS)} The benchmarks are {', '.join(DEFINITIONS)}"
        )
    return DEFINITIONS[name]


def _load_part(part: PartDefinition, access: HubAccess) -> BenchmarkPart:
    items = tuple(_item(part, row) for row in load_rows(part.source, access))
    shots = () if part.examples is None else load_rows(part.examples, access)
    examples = tuple((str(row["question"]), str(row["answer"])) for row in shots)
    return BenchmarkPart(part.name, part.kind, part.source, part.protocol, items, examples)


def _item(part: PartDefinition, row: Mapping[str, Any]) -> BenchmarkItem:
    if part.kind == "text":
        return BenchmarkItem("", row["text"])
    if part.kind == "continuation":
        return BenchmarkItem(row["prompt"], row["gt"])
    if part.kind == "truth":
        paraphrase = row.get("paraphrased_answer", row["answer"])
        return BenchmarkItem(row["question"], row["answer"], paraphrase, tuple(row["perturbed_answer"]))
    return BenchmarkItem(row["question"], row["answer"])
