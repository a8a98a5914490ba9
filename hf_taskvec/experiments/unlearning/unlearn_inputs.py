"""What the unlearning experiment starts from: books, base model and tokenizer, checked before any long work."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.algebra.sources import sampled_fingerprint
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.asking.batch_plan import tokenize_passages
from hf_taskvec.evaluation.texts.books import Book, Role, Section
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.evaluation.texts.text_overlap import check_books_differ
from hf_taskvec.experiments.book_reading import make_book, read_book, training_blocks
from hf_taskvec.experiments.smollm import SMOLLM, smollm_folder
from hf_taskvec.experiments.synthetic_library.book_writer import Library, WrittenBook, write_library
from hf_taskvec.experiments.synthetic_library.tiny_phi import make_phi, train_tokenizer
from hf_taskvec.experiments.unlearning.memory_check import check_experiment_memory
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
from hf_taskvec.filenames import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hf_taskvec.json_files import json_digest, read_json
from hf_taskvec.models.checkpoint import Checkpoint, open_checkpoint
from hf_taskvec.models.loading import load_tokenizer
from hf_taskvec.models.locations import locate
from hf_taskvec.models.tensor_files import open_files
from hf_taskvec.training.trainable_parts import check_targets
from hf_taskvec.training.trained_model import meta_model, open_base

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class UnlearnInputs:
    """Books, model and tokenizer of a run.

    Args:
        books (`tuple` of `Book`):
            With their roles.
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
        base (`str`, `Path` or `PreTrainedModel`):
            A folder or Hub id, or the embedded model before its pretraining.
        general (`Book`, *optional*):
            What the embedded model is pretrained on.
        inputs (`dict`):
            The fingerprint of everything that was given, for the record.
        read (`dict`):
            The blocks of each book that some stage is trained on, by the book's name.
    """

    books: tuple[Book, ...]
    tokenizer: Any
    base: "str | Path | PreTrainedModel"
    general: Book | None
    inputs: dict[str, str]
    read: "dict[str, datasets.Dataset]"

    def blocks(self, books: Sequence[Book]) -> "datasets.Dataset":
        """The seen text of all these books, in blocks to train on."""
        import datasets

        return datasets.concatenate_datasets([self.read[book.name] for book in books])


def prepare_unlearning(config: UnlearnConfig) -> UnlearnInputs:
    """What a run starts from. Whatever is missing or does not fit is an error here, before the work."""
    general = None
    base: Any
    if config.embedded:
        texts = write_library(config.seed, words=config.words or 10_000, general_words=config.general_words)
        books = _written(texts, config)
        general = Book("general", texts.general, (Section(0, len(texts.general), "seen"),))
        tokenizer = train_tokenizer(texts.general, config.vocabulary)
        base = make_phi(len(tokenizer), hidden=config.hidden_size, layers=config.layers, seed=config.seed)
    else:
        books = tuple(read_book(path, role, config) for role, path in config.roles)
        base = smollm_folder() if config.base_model == SMOLLM else config.base_model
        tokenizer = None
    check_books_differ(books)
    source = open_base(base)
    inputs = _inputs(config, books, base, source.weights)
    if tokenizer is None:
        tokenizer = load_tokenizer(base)
    if "lora" in (config.method, config.joint_method):
        check_targets(meta_model(source.config), config.training("lora"))
    context = source.context
    if context is not None and config.block_length > context:
        raise BadValueError(
            f"block_length={config.block_length}, but the model reads at most {context} tokens. Use --block-length "
            f"{context}."
        )
    check_experiment_memory(config, source.config)
    for book in books:  # too short a book, too long a passage: better now than after the training
        tokenize_passages(find_passages(book, config.asking, tokenizer), config.asking, tokenizer, source.config)
    read = {book.name: training_blocks((book,), tokenizer, config) for book in _trained_on(config, books, general)}
    return UnlearnInputs(books, tokenizer, base, general, inputs, read)


def _trained_on(config: UnlearnConfig, books: tuple[Book, ...], general: Book | None) -> list[Book]:
    """The books that some stage is trained on. Of the others nothing is asked but passages."""
    found = [general] if general is not None else []
    for book in books:
        alone = config.makes_vector if book.role == "forget" else config.makes_reference or config.tunes_others
        if config.makes_joint or alone or config.edits:
            found.append(book)
    return found


def _written(texts: Library, config: UnlearnConfig) -> tuple[Book, ...]:
    first, second = texts.series
    roles: list[tuple[WrittenBook, Role]] = [(first, "forget"), (second, "aligned")]
    roles += [(book, "retain") for book in texts.unrelated]
    return tuple(make_book(book.text, book.name, role, config) for book, role in roles)


def _inputs(config: UnlearnConfig, books: tuple[Book, ...], base: Any, weights: Checkpoint) -> dict[str, str]:
    """The name and fingerprint of everything that was given; what does not fit the base is refused."""
    inputs = {f"book: {book.name} ({book.role})": book.fingerprint for book in books}
    inputs["base_model"] = config.base_model if config.embedded else _identified(weights)
    for name in ("joint_model", "tuned_model", "reference_model"):
        if where := getattr(config, name):
            inputs[name] = _identified(open_checkpoint(where), weights)
    if where := config.adapter or config.task_vector:
        vector = TaskVector.from_adapter(where, base=base) if config.adapter else TaskVector.load(where)
        check_fits(vector, weights)
        content = _adapter_content(where) if config.adapter else vector.fingerprint
        inputs["adapter" if config.adapter else "task_vector"] = f"{Path(where).name} {content[:16]}"
    return inputs


def _adapter_content(where: str) -> str:
    """A digest of an adapter that is the same for each copy; a vector's own fingerprint knows the files' stamps."""
    folder, _, _ = locate(where, None, None, ["adapter_*"])
    settings = read_json(folder / ADAPTER_CONFIG) | {"base_model_name_or_path": None}
    return json_digest(sampled_fingerprint(open_files(folder, ADAPTER_WEIGHTS)), settings)


def _identified(found: Checkpoint, base: Checkpoint | None = None) -> str:
    """A model's name and fingerprint; it must be of the base's shape, if one is given."""
    if base and {n: t.shape for n, t in found.tensors.items()} != {n: t.shape for n, t in base.tensors.items()}:
        raise BadValueError(f"{found.name} and the base {base.name} are not of one shape: they do not fit together.")
    return f"{found.name} {found.sampled_fingerprint[:16]}"
