"""Books and the benchmarks MUSE and TOFU as tasks of lm-eval: what the YAMLs of `lm_eval_yaml/` name.

Passages, prompts, lengths and scores are the harness's own. So a task reports what `sweep` or `run_benchmark` reports
of the same passages.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.batch_plan import TokenizedPassage, tokenize_passages
from hf_taskvec.evaluation.benchmarks import benchmark_metrics as metrics
from hf_taskvec.evaluation.benchmarks.asking_items import prepare
from hf_taskvec.evaluation.benchmarks.named_benchmarks import load_benchmark_part
from hf_taskvec.evaluation.scoring.metrics import score_text
from hf_taskvec.evaluation.texts import protocols
from hf_taskvec.evaluation.texts.books import Split, load_book
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.evaluation.texts.protocols import Protocol

_BOOK = """--metadata '{"book": "hp1.txt"}'"""


class PassageTask(ConfigurableTask):
    """A task whose documents say themselves how many tokens are generated, in the column `new_tokens`.

    Args:
        config (`dict`):
            What the YAML says.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        # lm-eval leaves the YAML's own word for this class among the settings, where it means nothing.
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def construct_requests(
        self, doc: dict[str, Any], ctx: str | list[str], **options: Any
    ) -> list[Instance] | Instance:
        """What lm-eval asks of a model: its own request, for as many tokens as the document says.

        Args:
            doc (`dict`):
                The document.
            ctx (`str`):
                The prompt.
            **options:
                For lm-eval's own method.

        Returns:
            `Instance`: The request.
        """
        request = super().construct_requests(doc, ctx, **options)
        request.arguments[1]["max_gen_toks"] = doc["new_tokens"]
        return request


def book_passages(
    book: str | None = None,
    pretrained: str | None = None,
    protocol: str | None = None,
    passages: Split = "seen",
    book_options: Mapping[str, Any] | None = None,
    protocol_options: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    revision: str = "main",
    **_: Any,
) -> dict[str, Dataset]:
    """The documents of a book's task.

    Args:
        book (`str`):
            What `load_book` takes: a file, a folder or a data set's id.
        pretrained (`str`):
            The model, whose tokens count; `--model_args` has it.
        protocol (`str`, *optional*):
            Its name.
        passages (`"seen"` or `"held_out"`, *optional*, defaults to `"seen"`):
            Which passages.
        book_options (`dict`, *optional*):
            More for `load_book`, such as `held_out`.
        protocol_options (`dict`, *optional*):
            Fields of the protocol to change.
        tokenizer (`str`, *optional*):
            Where it lies, if not beside the model.
        revision (`str`, *optional*):
            Of the model.

    Returns:
        `dict`: The data set `test`.

    Raises:
        `BadValueError`: If no book or model is named, the protocol samples, or the book has no such passages.
    """
    if book is None:
        raise BadValueError(f"this task needs a book: {_BOOK}")
    used = protocols.get(protocol, **(protocol_options or {}))
    if not used.decoding.greedy:
        raise BadValueError(f"protocol {used.name!r} samples, with seeds that lm-eval does not know: use `sweep`.")
    loaded, config = _tokenizer_and_config(pretrained, tokenizer, revision)
    found = [
        passage
        for passage in find_passages(load_book(book, **(book_options or {})), used, loaded)
        if passage.split == passages
    ]
    if not found:
        raise BadValueError(f"no passage of {book!r} is {passages}: see held_out= in book_options.")
    documents = tokenize_passages(found, used, loaded, config)
    return _documents(documents, used.instruction, used.cue, protocol=json.dumps(used.to_dict()))


def benchmark_passages(
    benchmark: str,
    part: str,
    pretrained: str | None = None,
    prompt: str = "question",
    tokenizer: str | None = None,
    revision: str = "main",
    **_: Any,
) -> dict[str, Dataset]:
    """The documents of a task of MUSE or TOFU.

    Args:
        benchmark (`str`):
            Such as `tofu/forget10`.
        part (`str`):
            Such as `forget`.
        pretrained (`str`):
            The model, whose tokens count; `--model_args` has it.
        prompt (`str`, *optional*, defaults to `"question"`):
            How questions are put, as in `load_benchmark`.
        tokenizer (`str`, *optional*):
            Where it lies, if not beside the model.
        revision (`str`, *optional*):
            Of the model.

    Returns:
        `dict`: The data set `test`.
    """
    loaded, config = _tokenizer_and_config(pretrained, tokenizer, revision)
    (prepared,) = prepare(load_benchmark_part(benchmark, part, prompt=prompt), loaded, config)
    return _documents(prepared.generated)


def book_scores(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Rouge-L by the protocol's scorer: F1, precision and recall."""
    protocol = Protocol.from_dict(
        {name: value for name, value in json.loads(doc["protocol"]).items() if name != "hash"}
    )
    score = score_text(results[0], doc["answer"], protocol)
    found = {"rouge_l": score.fmeasure, "rouge_l_precision": score.precision, "rouge_l_recall": score.recall}
    return {name: protocol.score_factor * value for name, value in found.items()}


def verbmem_scores(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """MUSE's VerbMem."""
    return {"rouge_l": metrics.verbmem(results[0], doc["answer"])}


def knowmem_scores(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """MUSE's KnowMem, and the recall beside it."""
    output = metrics.before_stop(results[0])
    return {
        "rouge_l": metrics.knowmem(output, doc["answer"]),
        "rouge_l_recall": metrics.answer_recall(output, doc["answer"]),
    }


def tofu_answer_scores(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """TOFU's Rouge-L recall."""
    return {"rouge_l_recall": metrics.answer_recall(results[0], doc["answer"])}


def _tokenizer_and_config(pretrained: str | None, tokenizer: str | None, revision: str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    if pretrained is None:
        raise BadValueError(
            "this task counts the model's tokens: give pretrained= in --model_args, or in Python "
            "TaskManager(…, metadata={'pretrained': 'me/model'})"
        )
    config = AutoConfig.from_pretrained(pretrained, revision=revision)
    return AutoTokenizer.from_pretrained(tokenizer or pretrained, revision=revision), config


def _documents(
    passages: Sequence[TokenizedPassage], before: str = "", after: str = "", **columns: str
) -> dict[str, Dataset]:
    rows = [
        {
            "id": each.text.id,
            "prompt": before + each.text.prompt + after,
            "answer": each.text.answer,
            "new_tokens": each.new_tokens,
            **columns,
        }
        for each in passages
    ]
    return {"test": Dataset.from_list(rows)}
