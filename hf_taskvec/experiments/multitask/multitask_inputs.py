"""What the multi-task experiment starts from: tasks, base model and tokenizer, checked before any long work."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, MissingFileError
from hf_taskvec.evaluation.texts.books import Book, Section
from hf_taskvec.evaluation.texts.text_overlap import find_overlap, word_runs
from hf_taskvec.experiments.book_reading import make_book, read_book, training_blocks
from hf_taskvec.experiments.multitask.multitask_config import MultitaskConfig
from hf_taskvec.experiments.multitask.rounds import Task, check_rounds_memory
from hf_taskvec.experiments.multitask.task_exchange import gather_values_by_task, owns_task
from hf_taskvec.experiments.multitask.token_accuracy import HeldOutBlocks, held_out
from hf_taskvec.experiments.smollm import SMOLLM, smollm_folder
from hf_taskvec.experiments.synthetic_library.book_writer import write_library
from hf_taskvec.experiments.synthetic_library.tiny_phi import make_phi, train_tokenizer
from hf_taskvec.models.loading import load_tokenizer
from hf_taskvec.training.trainable_parts import check_targets
from hf_taskvec.training.trained_model import meta_model, open_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MultitaskInputs:
    """Tasks, model and tokenizer of a run.

    Args:
        tasks (`tuple` of `Task`):
            All of them; those of other processes without their blocks.
        held (`dict`):
            The held-out text of this process's tasks, by the task's number.
        tokenizer (`PreTrainedTokenizerBase`):
            The base's.
        base (`str`, `Path` or `PreTrainedModel`):
            θ_0, or the untrained embedded model.
        general (`Book`, *optional*):
            What the embedded model is pretrained on.
        inputs (`dict`):
            The fingerprint of everything that was given, for the record.
    """

    tasks: tuple[Task, ...]
    held: dict[int, HeldOutBlocks]
    tokenizer: Any
    base: "str | Path | PreTrainedModel"
    general: Book | None
    inputs: dict[str, str]


@dataclass(frozen=True)
class _Own:
    """What one process brings: model and tokenizer as all have them, and the books of its own tasks."""

    names: list[str]
    books: dict[int, Book]
    held: dict[int, HeldOutBlocks]
    blocks: dict[int, Any]
    tokenizer: Any
    base: "str | Path | PreTrainedModel"
    general: Book | None
    record: str


def prepare_multitask(config: MultitaskConfig) -> MultitaskInputs:
    """What a run starts from. What is missing or does not fit is an error here, in all processes, before the work."""
    own = processes().together(lambda: _own(config))
    assert own is not None  # every process has worked
    names = own.names
    prints = gather_values_by_task({n: book.fingerprint for n, book in own.books.items()}, len(names))
    runs = gather_values_by_task({n: word_runs(book.text, one_in=8) for n, book in own.books.items()}, len(names))
    if pair := find_overlap(runs):  # whichever processes have read them
        one, other = names[pair[0]], names[pair[1]]
        raise BadValueError(
            f"{one} and {other} are the same text, or mostly: that is one task, not two. Give each task a book of its "
            "own."
        )
    inputs = {f"book: {name}": found for name, found in zip(names, prints, strict=True)}
    inputs["base_model"] = own.record
    tasks = tuple(Task(name, own.blocks.get(number)) for number, name in enumerate(names))
    return MultitaskInputs(tasks, own.held, own.tokenizer, own.base, own.general, inputs)


def _own(config: MultitaskConfig) -> _Own:
    """This process's part, checked as far as that can be done alone."""
    general, base = None, config.base_model
    made: Any = None
    if config.embedded:
        texts = write_library(
            config.seed, words=config.words or 6000, general_words=config.general_words, unrelated=config.tasks
        )
        general = Book("general", texts.general, (Section(0, len(texts.general), "seen"),))
        tokenizer = train_tokenizer(texts.general, config.vocabulary)
        made = make_phi(len(tokenizer), hidden=config.hidden_size, layers=config.layers, seed=config.seed)
        names = [book.name for book in texts.unrelated]
        mine = {n: make_book(b.text, b.name, "retain", config) for n, b in enumerate(texts.unrelated) if owns_task(n)}
    else:
        base = str(smollm_folder()) if config.base_model == SMOLLM else config.base_model
        tokenizer = load_tokenizer(base)
        names = [Path(path).stem for path in config.books or ()]
        mine = _read(config)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise BadValueError(f"two books are called {twice!r}. Rename one of the files.")
    source = open_base(made if made is not None else base)
    if source.context is not None and config.block_length > source.context:
        raise BadValueError(
            f"block_length={config.block_length}, but the model reads at most {source.context} tokens. Use "
            f"--block-length {source.context}."
        )
    if config.method == "lora":
        check_targets(meta_model(source.config), config.training)
    check_rounds_memory(source.config, config.training, config.block_length, len(names))
    held = {n: held_out(book, tokenizer, config.block_length) for n, book in mine.items()}
    blocks = {n: training_blocks((book,), tokenizer, config) for n, book in mine.items()}
    if made is not None:
        return _Own(names, mine, held, blocks, tokenizer, made, general, config.base_model)
    found = source.weights
    return _Own(names, mine, held, blocks, tokenizer, base, general, f"{found.name} {found.sampled_fingerprint[:16]}")


def _read(config: MultitaskConfig) -> dict[int, Book]:
    """This process's own books; the others' files need not be here."""
    found = {}
    for number, path in enumerate(config.books or ()):
        if owns_task(number):
            if not Path(path).exists() and Path(path).suffix:
                raise MissingFileError(f"there is no book at {path!r}.")
            found[number] = read_book(path, "retain", config)
    return found
