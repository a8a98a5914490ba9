"""Books as the config of an experiment describes them."""

from typing import TYPE_CHECKING, Any

from hf_taskvec.evaluation.texts.books import Book, Role, load_book
from hf_taskvec.experiments.experiment_config import ExperimentConfig

if TYPE_CHECKING:
    import datasets


def read_book(path: str, role: Role, config: ExperimentConfig) -> Book:
    """A book from a file, cut to the number of words that the config asks for."""
    book = load_book(
        path,
        role=role,
        block_words=config.section_words,
        held_out=config.held_out,
        seed=config.seed,
        prose=config.prose,
    )
    if config.words is None or book.pairs:
        return book
    return make_book(" ".join(book.text.split(" ")[: config.words]), book.name, role, config)


def make_book(text: str, name: str, role: Role, config: ExperimentConfig) -> Book:
    """A book from its text, split as the config says."""
    import datasets

    data = datasets.Dataset.from_dict({"text": [text]})
    return load_book(
        data, name, role=role, block_words=config.section_words, held_out=config.held_out, seed=config.seed
    )


def training_blocks(books: tuple[Book, ...], tokenizer: Any, config: ExperimentConfig) -> "datasets.Dataset":
    """The seen text of all these books, in blocks."""
    import datasets

    stride = config.block_stride or config.block_length
    return datasets.concatenate_datasets(
        [book.training_blocks(tokenizer, config.block_length, stride) for book in books]
    )
