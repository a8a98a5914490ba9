"""Small models to try things with, made in half a minute and without a download.

    python -m hf_taskvec.experiments.playground play

writes into `play/` three made-up books, two volumes of a series and an unrelated one, and tiny Phis: `base`, which
knows their language; `tuned`, a fine-tune of it on the first volume; `adapter` and `adapter-2`, LoRA on the second
volume and on the unrelated book; `library`, which knows all three; and `without`, which never saw the first volume.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec.atomic import write_text
from hf_taskvec.errors import OutputError
from hf_taskvec.evaluation import Book, load_book
from hf_taskvec.evaluation.texts.books import Role
from hf_taskvec.experiments.synthetic_library.book_writer import write_library
from hf_taskvec.experiments.synthetic_library.tiny_phi import make_phi, train_tokenizer
from hf_taskvec.models.loading import load_tokenizer
from hf_taskvec.training import TrainingSettings, finetune

if TYPE_CHECKING:
    import datasets

_RECORD = "playground.txt"
_LENGTH, _STRIDE, _VOCABULARY = 48, 16, 512
_LANGUAGE = TrainingSettings(epochs=3, learning_rate=3e-3, batch_size=16)
_BOOKS = replace(_LANGUAGE, epochs=24)
_LORA = TrainingSettings(method="lora", rank=16, epochs=6, learning_rate=1e-2, batch_size=16)
_ROLES: tuple[Role, ...] = ("forget", "aligned", "retain")


@dataclass(frozen=True)
class Playground:
    """What `make_playground` has made.

    Args:
        base, tuned, adapter, adapter_2, library, without (`Path`):
            The models and adapters.
        books (`tuple` of `Book`):
            The first volume (to forget), the second one, and the unrelated book (to keep).
        tokenizer (`PreTrainedTokenizerFast`):
            Of all the models.
    """

    base: Path
    tuned: Path
    adapter: Path
    adapter_2: Path
    library: Path
    without: Path
    books: tuple[Book, ...]
    tokenizer: Any

    def blocks(self, *books: Book) -> "datasets.Dataset":
        """Books as packed blocks, as the models were trained on."""
        import datasets

        return datasets.concatenate_datasets([b.training_blocks(self.tokenizer, _LENGTH, _STRIDE) for b in books])


def make_playground(folder: str | Path, *, progress: bool | None = None) -> Playground:
    """Make the models, or open those that are there; an interrupted call goes on where it was.

    Args:
        folder (`str` or `Path`):
            Where to: a new folder, an empty one, or an earlier playground.
        progress (`bool`, *optional*):
            Show progress bars; by default on a terminal only.

    Returns:
        `Playground`: The folders, the books and the tokenizer.

    Raises:
        `OutputError`: If the folder holds something else.
    """
    folder = Path(folder)
    record = folder / _RECORD
    if folder.exists() and not record.exists() and any(folder.iterdir()):
        raise OutputError(f"{folder} holds something else than a playground: name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(record, "Made by python -m hf_taskvec.experiments.playground: small models to try things with.\n")
    texts = write_library(words=700, general_words=4000)
    written = {"one": texts.series[0].text, "two": texts.series[1].text, "other": texts.unrelated[0].text}
    for name, text in {**written, "general": texts.general}.items():
        write_text(folder / f"{name}.txt", text)
    if not (folder / "start" / "model.safetensors").exists():
        tokenizer = train_tokenizer(texts.general, vocabulary=_VOCABULARY)
        model = make_phi(len(tokenizer), hidden=96, layers=2, context=128)
        tokenizer.save_pretrained(folder / "start")
        model.save_pretrained(folder / "start")
    tokenizer = load_tokenizer(folder / "start")
    books = tuple(
        load_book(
            folder / f"{name}.txt",
            role=role,
            block_words=100,
            held_out=0.5 if role == "forget" else 0.25,
            prose=False,  # headings are a part of what is made up
        )
        for name, role in zip(written, _ROLES, strict=True)
    )
    one, two, other = books
    made = Playground(
        base=folder / "base",
        tuned=folder / "tuned",
        adapter=folder / "adapter",
        adapter_2=folder / "adapter-2",
        library=folder / "library",
        without=folder / "without",
        books=books,
        tokenizer=tokenizer,
    )

    def train(base: Path, output: Path, settings: TrainingSettings, *some: Book) -> None:
        finetune(base, made.blocks(*some), settings, output, tokenizer=tokenizer, progress=progress)

    train(folder / "start", made.base, _LANGUAGE, load_book(folder / "general.txt", held_out=0.0, prose=False))
    train(made.base, made.tuned, _BOOKS, one)
    train(made.base, made.adapter, _LORA, two)
    train(made.base, made.adapter_2, _LORA, other)
    train(made.base, made.library, _BOOKS, *books)
    train(made.base, made.without, _BOOKS, two, other)
    return made


def run_playground() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to: a new folder, or an earlier playground")
    made = make_playground(parser.parse_args().folder)
    for path in (made.base, made.tuned, made.adapter, made.adapter_2, made.library, made.without):
        print(path)


if __name__ == "__main__":
    run_playground()
