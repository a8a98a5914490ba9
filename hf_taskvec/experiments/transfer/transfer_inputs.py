"""What the transfer experiment starts from: books, base model and tokenizer, checked before any long work."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.token_rows import TokenRows
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.errors import BadValueError, MissingFileError
from hf_taskvec.evaluation.texts.books import Book, Section
from hf_taskvec.evaluation.texts.text_overlap import find_overlap, word_runs
from hf_taskvec.experiments.book_reading import make_book, read_book
from hf_taskvec.experiments.smollm import SMOLLM, smollm_folder
from hf_taskvec.experiments.synthetic_library.book_writer import write_library
from hf_taskvec.experiments.synthetic_library.tiny_phi import make_phi, train_tokenizer
from hf_taskvec.experiments.transfer.transfer_config import TransferConfig
from hf_taskvec.extraction.from_any import open_vector
from hf_taskvec.models.loading import load_tokenizer
from hf_taskvec.training.trainable_parts import check_targets
from hf_taskvec.training.trained_model import meta_model, open_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# More rows narrow the intervals little, and each is read by every model that is compared.
_MOST_TEST_ROWS = 128


@dataclass(frozen=True)
class BookRows:
    """A book's text in rows of tokens of one length.

    Args:
        sample (`list` of `list` of `int`):
            Of its seen text: what is looked at of a new book.
        test (`list` of `list` of `int`):
            Of its held-out text: what the models are judged by, and what is compared of a book that has a vector.
    """

    sample: TokenRows
    test: TokenRows


@dataclass(frozen=True)
class TransferInputs:
    """Books, model and tokenizer of a run.

    Args:
        books (`tuple` of `Book`):
            Those that have a vector, or get one.
        new (`tuple` of `Book`):
            Those that are to be reached; empty if each of `books` is in turn.
        rows (`dict`):
            Of each book, by its name.
        given (`dict`):
            The vectors that were given, by the book's name.
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
        base (`str`, `Path` or `PreTrainedModel`):
            θ_0, or the embedded model before its pretraining.
        general (`Book`, *optional*):
            What the embedded model is pretrained on.
        inputs (`dict`):
            The fingerprint of everything that was given, for the record.
    """

    books: tuple[Book, ...]
    new: tuple[Book, ...]
    rows: dict[str, BookRows]
    given: dict[str, TaskVector]
    tokenizer: Any
    base: "str | Path | PreTrainedModel"
    general: Book | None
    inputs: dict[str, str]


def prepare_transfer(config: TransferConfig) -> TransferInputs:
    """What a run starts from. Whatever is missing or does not fit is an error here, before the work."""
    general, base = None, config.base_model
    made: Any = None
    new: tuple[Book, ...] = ()
    if config.embedded:
        library = write_library(
            config.seed,
            words=config.words or 6000,
            general_words=config.general_words,
            unrelated=config.unrelated,
        )
        general = Book("general", library.general, (Section(0, len(library.general), "seen"),))
        tokenizer = train_tokenizer(library.general, config.vocabulary)
        made = make_phi(len(tokenizer), hidden=config.hidden_size, layers=config.layers, seed=config.seed)
        written = (*library.series, *library.unrelated)
        books = tuple(make_book(each.text, each.name, "retain", config) for each in written)
    else:
        base = str(smollm_folder()) if config.base_model == SMOLLM else config.base_model
        books, new = _read(config.books, config), _read(config.new_books, config)
        _check_differ((*books, *new))
        tokenizer = load_tokenizer(base)
    source = open_base(base if made is None else made)
    if source.context is not None and config.block_length > source.context:
        raise BadValueError(
            f"block_length={config.block_length}, but the model reads at most {source.context} tokens. Use "
            f"--block-length {source.context}."
        )
    given: dict[str, TaskVector] = {}
    for book, where in zip(books, config.vectors or (), strict=False):
        given[book.name] = open_vector(where, base, name=label_for(book.name))
        check_fits(given[book.name], source.weights)
    if config.method == "lora" and not given:
        check_targets(meta_model(source.config), config.training)
    rows = {book.name: _rows(book, tokenizer, config) for book in (*books, *new)}
    inputs = {f"book: {book.name}": book.fingerprint for book in books}
    inputs |= {f"new book: {book.name}": book.fingerprint for book in new}
    inputs |= {f"vector: {name}": vector.fingerprint for name, vector in given.items()}
    weights = source.weights
    inputs["base_model"] = "embedded" if made is not None else f"{weights.name} {weights.sampled_fingerprint[:16]}"
    return TransferInputs(books, new, rows, given, tokenizer, base if made is None else made, general, inputs)


def _read(paths: list[str] | None, config: TransferConfig) -> tuple[Book, ...]:
    for path in paths or ():
        if not Path(path).exists() and Path(path).suffix:
            raise MissingFileError(f"there is no book at {path!r}.")
    return tuple(read_book(path, "retain", config) for path in paths or ())


def _check_differ(books: tuple[Book, ...]) -> None:
    names = [book.name for book in books]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise BadValueError(f"two books are called {twice!r}. Rename one of the files.")
    if pair := find_overlap([word_runs(book.text) for book in books]):
        one, other = (names[place] for place in pair)
        raise BadValueError(
            f"{one} and {other} are the same text, or mostly: what is known of the one would be no transfer. Leave one "
            "of them out."
        )


def _rows(book: Book, tokenizer: Any, config: TransferConfig) -> BookRows:
    """Rows of one length; what is left at the end of a section is not used."""
    found: dict[str, TokenRows] = {"seen": [], "held_out": []}
    length = config.block_length
    for section in book.sections:
        ids = tokenizer(book.text[section.start : section.end].strip(), verbose=False)["input_ids"]
        found[section.split] += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    for split, rows in found.items():
        if len(rows) < 4:
            raise BadValueError(
                f"the {split.replace('_', '-')} text of {book.name!r} gives {len(rows)} rows of {length} tokens, and 4 "
                "are needed. Use a longer book (--words), longer sections (--section-words) or a smaller "
                "--block-length."
            )
    return BookRows(_spread(found["seen"], config.rows), _spread(found["held_out"], _MOST_TEST_ROWS))


def _spread(rows: TokenRows, most: int) -> TokenRows:
    """So many rows, from all over the text."""
    step = max(1.0, len(rows) / most)
    return [rows[int(number * step)] for number in range(min(most, len(rows)))]
