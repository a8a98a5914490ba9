"""A benchmark's items through a model: what is generated, what is only judged by its likelihood, and their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.batch_plan import Row, TokenizedPassage, tokenize_passages
from hf_taskvec.evaluation.asking.batched_asking import Asked, ask_tokenized
from hf_taskvec.evaluation.asking.scalable_edits import NoEdit
from hf_taskvec.evaluation.benchmarks import benchmark_metrics as metrics
from hf_taskvec.evaluation.benchmarks.named_benchmarks import Benchmark, BenchmarkItem, BenchmarkPart
from hf_taskvec.evaluation.scoring.metrics import min_k
from hf_taskvec.evaluation.texts.books import Book, Pair
from hf_taskvec.evaluation.texts.passages import Passage, find_passages
from hf_taskvec.evaluation.texts.protocols import Decoding
from hf_taskvec.models.model_facts import context_length

if TYPE_CHECKING:
    from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages

# open-unlearning reads so many tokens of a text; MUSE reads all. MUSE's texts are about as long.
_MOST_TOKENS = 2048


@dataclass(frozen=True)
class ItemResult:
    """What a model gave for one item.

    Args:
        output (`str`):
            What it generated, cut off where the answer ends; empty where it was asked for a likelihood alone.
        values (`dict[str, float]`):
            The numbers of the item's kind, by `ITEM_VALUES`.
    """

    output: str
    values: dict[str, float]


@dataclass(frozen=True)
class PreparedPart:
    """A part in a model's tokens.

    Args:
        part (`BenchmarkPart`):
            What is asked.
        generated (`tuple[TokenizedPassage]`):
            One for each item that is answered.
        judged (`tuple[tuple[TokenizedPassage]]`):
            For each item, the texts whose likelihood alone is asked for.
    """

    part: BenchmarkPart
    generated: tuple[TokenizedPassage, ...]
    judged: tuple[tuple[TokenizedPassage, ...], ...]


@dataclass(frozen=True)
class AnsweredBenchmark:
    """A model's fingerprint, and its results by part."""

    fingerprint: str
    results: dict[str, tuple[ItemResult, ...]]


def prepare(benchmark: Benchmark, tokenizer: Any, config: Any) -> tuple[PreparedPart, ...]:
    """All parts in the tokens of the model with this configuration.

    Raises:
        `BadValueError`: If an item does not fit into the model's context, the tokenizer has no end token where an
            answer's end counts, or no chat template where the prompt form needs one.
        `MismatchError`: If a token is not in the model's vocabulary.
    """
    prepared = tuple(_prepare(part, benchmark, tokenizer, config) for part in benchmark.parts)
    context = context_length(config)
    for each in prepared:
        for passage in (*each.generated, *(text for texts in each.judged for text in texts)):
            needed = len(passage.prompt_ids) + len(passage.answer_ids)
            if context is not None and needed > context:
                raise BadValueError(
                    f"{benchmark.name}, item {passage.text.id} of {each.part.source.id} has {needed} tokens, but the "
                    f"model's context has {context}; the benchmark needs a model with a longer one"
                )
    return prepared


def ask_benchmark(
    prepared: Sequence[PreparedPart],
    model: Any,
    tokenizer: Any,
    *,
    store: "FinishedPassages",
    batch_size: int | None,
    label: str,
    progress: bool | None,
) -> AnsweredBenchmark:
    """Every item through one model, each from the store if it is there."""
    fingerprint, results = "", {}
    for each in prepared:
        groups = {"generated": each.generated, "judged": tuple(text for texts in each.judged for text in texts)}
        asked: dict[str, Asked] = {}
        for group, passages in groups.items():
            if passages:
                asked[group] = ask_tokenized(
                    model,
                    NoEdit(),
                    (0.0,),
                    passages=passages,
                    protocol=each.part.protocol,
                    tokenizer=tokenizer,
                    store=store,
                    batch_size=batch_size,
                    likelihood=group == "judged" or each.part.kind == "truth",
                    label=f"{label}: {each.part.name}, {group}",
                    progress=progress,
                )
                fingerprint = asked[group].fingerprint
        results[each.part.name] = _results(each, asked)
    return AnsweredBenchmark(fingerprint, results)


def _prepare(part: BenchmarkPart, benchmark: Benchmark, tokenizer: Any, config: Any) -> PreparedPart:
    if part.kind == "continuation":
        pairs = tuple(Pair(item.prompt, item.answer, "seen") for item in part.items)
        passages = find_passages(Book(part.name, "", (), "forget", pairs), part.protocol, tokenizer)
        return PreparedPart(part, tokenize_passages(passages, part.protocol, tokenizer, config), ())
    if part.kind == "text":
        texts = enumerate(part.items)
        return PreparedPart(part, (), tuple((_whole_text(part, i, item, tokenizer),) for i, item in texts))
    prompts = [benchmark.prompt.text(item.prompt, part.examples, tokenizer) for item in part.items]
    ids = [f"{part.name}/{number:04d}" for number in range(len(prompts))]
    answers = [
        Passage(name, part.name, "seen", prompt, "", item.answer)
        for name, prompt, item in zip(ids, prompts, part.items, strict=True)
    ]
    if part.kind == "few_shot":
        return PreparedPart(part, tokenize_passages(answers, part.protocol, tokenizer, config), ())
    # Nothing is generated for these: only their own tokens have to fit.
    alone = replace(part.protocol, decoding=Decoding())
    if part.kind == "answer":
        return PreparedPart(
            part, (), tuple((_judged(each),) for each in tokenize_passages(answers, alone, tokenizer, config))
        )
    end = _end_token(tokenizer, benchmark)
    judged = []
    for answer, item in zip(answers, part.items, strict=True):
        others = [replace(answer, answer=text) for text in (item.paraphrase, *item.wrong)]
        judged.append(tuple(_judged(each, end) for each in tokenize_passages(others, alone, tokenizer, config)))
    generated = tokenize_passages(answers, part.protocol, tokenizer, config)
    return PreparedPart(part, tuple(_ended(each, end) for each in generated), tuple(judged))


def _whole_text(part: BenchmarkPart, number: int, item: BenchmarkItem, tokenizer: Any) -> TokenizedPassage:
    """A text without a prompt: its first token (or the one that begins every text) is given, the others are judged.

    So does MUSE; open-unlearning leaves the last token out as well, which it takes for an end token.
    """
    ids = tokenizer(item.answer, verbose=False)["input_ids"][: _MOST_TOKENS + 1]
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    name = f"{part.name}/{number:04d}"
    if len(ids) < 2:
        raise BadValueError(f"item {name} of {part.source.id} has one token: a likelihood needs two")
    return TokenizedPassage(Passage(name, part.name, "seen", "", "", item.answer), tuple(ids[:1]), tuple(ids[1:]), 0)


def _end_token(tokenizer: Any, benchmark: Benchmark) -> int:
    end = tokenizer.eos_token_id
    if end is None:
        raise BadValueError(
            f"{benchmark.name} counts the token that ends an answer, and the tokenizer has none: set its eos_token"
        )
    return int(end)


def _ended(passage: TokenizedPassage, end: int) -> TokenizedPassage:
    return replace(passage, answer_ids=(*passage.answer_ids, end))


def _judged(passage: TokenizedPassage, end: int | None = None) -> TokenizedPassage:
    return replace(passage if end is None else _ended(passage, end), new_tokens=0)


def _results(prepared: PreparedPart, asked: dict[str, Asked]) -> tuple[ItemResult, ...]:
    part, texts = prepared.part, _continuations(asked.get("generated"))
    judged = iter(log_probs for _, log_probs in _continuations(asked.get("judged")))
    found = []
    for number, item in enumerate(part.items):
        others = [next(judged) for _ in prepared.judged[number]] if prepared.judged else []
        if part.kind in ("text", "answer"):
            found.append(ItemResult("", {"min_k": min_k(others[0])}))
            continue
        output, log_probs = texts[number]
        if part.kind == "continuation":  # the protocol cuts the true text as long as the generated one
            found.append(
                ItemResult(output, {"rouge_l": metrics.verbmem(output, prepared.generated[number].text.answer)})
            )
        elif part.kind == "few_shot":
            output = metrics.before_stop(output)
            values = {
                "rouge_l": metrics.knowmem(output, item.answer),
                "rouge_l_recall": metrics.answer_recall(output, item.answer),
            }
            found.append(ItemResult(output, values))
        else:
            found.append(ItemResult(output, _truth_values(output, item.answer, log_probs, others)))
    return tuple(found)


def _truth_values(
    output: str, answer: str, log_probs: Sequence[float], others: Sequence[Sequence[float]]
) -> dict[str, float]:
    own = metrics.answer_probability(log_probs)
    correct, *wrong = map(metrics.answer_probability, others)
    return {
        "rouge_l_recall": metrics.answer_recall(output, answer),
        "probability": own,
        "normalised_probability": metrics.normalised_probability(own, wrong),
        "min_k": min_k(log_probs[:-1]),  # open-unlearning leaves the end token out here
        "truth_ratio": metrics.tofu_truth_ratio(correct, wrong),
        "truth_ratio_open_unlearning": metrics.open_unlearning_truth_ratio(correct, wrong),
    }


def _continuations(asked: Asked | None) -> list[tuple[str, tuple[float, ...]]]:
    if asked is None:
        return []
    rows = (asked.work.rows[Row(0.0, number)] for number in range(len(asked.passages)))
    return [(row.text, row.log_probs) for row in rows]
