"""Books: loaded from anywhere, cleaned, and split into what may be trained on and what is held out."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_taskvec.errors import BadValueError, CorruptFileError, MissingFileError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.texts import cleaning
from hf_taskvec.hub_names import HUB_ID, split_revision
from hf_taskvec.models.trained_books import book_mark
from hf_taskvec.progress import library_bars

if TYPE_CHECKING:
    import datasets

    from hf_taskvec.evaluation.texts.protocols import Protocol

Split = Literal["seen", "held_out"]
Role = Literal["forget", "aligned", "retain", "unseen"]
SplitBy = Literal["blocks", "chapters"]
SPLITS: tuple[Split, Split] = ("seen", "held_out")
ROLES: tuple[Role, ...] = ("forget", "aligned", "retain", "unseen")
# The column pairs of ready-made data sets: MUSE's verbatim and knowledge sets, and the usual alternatives.
_PAIR_COLUMNS = (("prompt", "gt"), ("question", "answer"), ("prompt", "answer"), ("prompt", "completion"))


@dataclass(frozen=True)
class Section:
    """A chapter or block of the text, and whether a model may be trained on it."""

    start: int
    end: int
    split: Split


@dataclass(frozen=True)
class Pair:
    """A ready-made prompt and its answer."""

    prompt: str
    answer: str
    split: Split


@dataclass(frozen=True)
class Book:
    """A book ready for evaluation; made by `load_book`.

    Args:
        name (`str`):
            What tables call it.
        text (`str`):
            The clean text; empty for ready-made pairs.
        sections (`tuple[Section]`):
            Its chapters or blocks, each seen or held out.
        role (`"forget"`, `"aligned"`, `"retain"` or `"unseen"`, *optional*, defaults to `"retain"`):
            What the sweep expects of it: `"forget"` should fall to the level of a model that never saw it, `"retain"`
            should stay, `"aligned"` (same author, say) is reported but not held against an edit. `"unseen"` is text
            like the forget book's that no model was trained on: without a reference model it gives that level.
        pairs (`tuple[Pair]`, *optional*):
            Ready-made prompts and answers instead of text.
        seed (`int`, *optional*, defaults to 0):
            Of the choice of held-out sections.
    """

    name: str
    text: str = field(repr=False)
    sections: tuple[Section, ...] = field(repr=False)
    role: Role = "retain"
    pairs: tuple[Pair, ...] = field(default=(), repr=False)
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """sha256 of the clean text, its split and its pairs: what the book *is*, not where it was."""
        return hashlib.sha256(repr((self.text, self.sections, self.pairs)).encode()).hexdigest()

    @property
    def training_text(self) -> str:
        """The seen sections, in order: all that a model may be trained on."""
        return "\n\n".join(self._runs())

    def passages(self, protocol: "str | Protocol | None" = None, tokenizer: Any = None) -> "datasets.Dataset":
        """The prompts and true continuations of both splits.

        Args:
            protocol (`str` or `Protocol`, *optional*):
                `taskvec-v1` by default.
            tokenizer (*optional*):
                Needed by protocols that count tokens.

        Returns:
            `datasets.Dataset`: With the columns `id`, `book`, `split`, `prompt`, `gap` (the white space between the
            two) and `answer`.

        Raises:
            `BadValueError`: If the book is too short for the protocol, or of a kind that it cannot use.
        """
        from dataclasses import asdict

        import datasets

        from hf_taskvec.evaluation.texts.passages import find_passages

        return datasets.Dataset.from_list([asdict(p) for p in find_passages(self, protocol, tokenizer)])

    def training_blocks(self, tokenizer: Any, length: int, stride: int | None = None) -> "datasets.Dataset":
        """The seen text as blocks of exactly `length` tokens, ready for a causal-language-model trainer.

        Sections that do not follow one another in the book are separated by the tokenizer's end token; the last,
        incomplete block is left out.

        Args:
            tokenizer (`PreTrainedTokenizerBase`):
                Of the model.
            length (`int`):
                Of each block.
            stride (`int`, *optional*):
                Tokens from the start of one block to that of the next; `length` without it. A smaller one gives
                overlapping blocks, so that each sentence is also learnt in its context.

        Returns:
            `datasets.Dataset`: With the columns `input_ids`, `attention_mask` and `labels`.

        Raises:
            `BadValueError`: If the lengths cannot be used, or the book has less than one block.
        """
        import datasets

        if length < 2:
            raise BadValueError(f"training blocks of length={length} hold nothing to predict; use at least 2")
        step = length if stride is None else stride
        if not 1 <= step <= length:
            raise BadValueError(
                f"stride={stride} must lie between 1 and the blocks' length={length}: no token is left out"
            )
        stream: list[int] = []
        for run in self._runs():
            # The whole run is longer than any context by design: no warning about that.
            stream += tokenizer(run, verbose=False)["input_ids"]
            if tokenizer.eos_token_id is not None and stream[-1] != tokenizer.eos_token_id:
                stream.append(tokenizer.eos_token_id)
        blocks = [stream[i : i + length] for i in range(0, len(stream) - length + 1, step)]
        if not blocks:
            raise BadValueError(
                f"book {self.name!r} has {len(stream)} tokens of seen text, less than one block of "
                f"length={length}; use a smaller length or a longer book"
            )
        made = datasets.Dataset.from_dict(
            {"input_ids": blocks, "attention_mask": [[1] * length for _ in blocks], "labels": blocks}
        )
        # `finetune` records it: so a sweep knows later that the held-out part was left out.
        made.info.description = book_mark(self.fingerprint)
        return made

    def _runs(self) -> list[str]:
        """The text of the seen sections, those that follow one another joined."""
        runs: list[list[int]] = []
        for before, section in zip((None, *self.sections), self.sections, strict=False):
            if section.split == "seen":
                if before is not None and before.split == "seen":
                    runs[-1][1] = section.end
                else:
                    runs.append([section.start, section.end])
        return [self.text[start:end].strip() for start, end in runs]


def load_book(
    source: "str | Path | datasets.Dataset",
    name: str | None = None,
    *,
    role: Role = "retain",
    split_by: SplitBy = "blocks",
    block_words: int = 1000,
    held_out: float = 0.3,
    seed: int = 0,
    prose: bool = True,
    encoding: str | None = None,
    config: str | None = None,
    split: str = "train",
    pairs_are: Split = "seen",
    progress: bool | None = None,
) -> Book:
    """A `Book` from a text file, a folder of text files, a `datasets.Dataset` or a data set on the Hub.

    Args:
        source (`str`, `Path` or `datasets.Dataset`):
            A `.txt` file; a folder (its `.txt` files in order of name, or what `Dataset.save_to_disk` wrote); a data
            set with a `text` column, or with ready-made pairs in MUSE's columns (`prompt`/`gt`, `question`/`answer`);
            or the id of such a data set on the Hub, also `id@revision`.
        name (`str`, *optional*):
            What tables call the book; the file's name without one.
        role (`"forget"`, `"aligned"`, `"retain"` or `"unseen"`, *optional*, defaults to `"retain"`):
            What an edit is meant to do to it. Of `"unseen"` text, which no model was trained on, all is held out.
        split_by (`"blocks"` or `"chapters"`, *optional*, defaults to `"blocks"`):
            What is seen or held out as a whole. Both end with a sentence.
        block_words (`int`, *optional*, defaults to 1000):
            The length of a block, about.
        held_out (`float`, *optional*, defaults to 0.3):
            The share of the sections that is held out from training. 0: the model was trained on the whole book.
        seed (`int`, *optional*, defaults to 0):
            Of the choice of held-out sections.
        prose (`bool`, *optional*, defaults to `True`):
            Leave out what is no running text in a file: the title page, the table of contents, headings of chapters,
            captions. A data set is taken as it is.
        encoding (`str`, *optional*):
            Of the files; detected without it.
        config (`str`, *optional*):
            The configuration of a data set on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            The split of a data set on the Hub.
        pairs_are (`"seen"` or `"held_out"`, *optional*, defaults to `"seen"`):
            What ready-made pairs are to the model.
        progress (`bool`, *optional*):
            Show the progress bars of a download; by default on a terminal.

    Returns:
        `Book`: Cleaned, and split into what may be trained on and what is held out.

    Raises:
        `MissingFileError`: If there is no book at `source`.
        `MissingNameError`: If there is no such role, or a data set lacks the columns.
        `BadValueError`: If the book is empty, too short to split, or in an unknown encoding.

    Example:
        >>> alice = load_book("alice.txt", "Alice", role="forget", split_by="chapters")  # doctest: +SKIP
        >>> alice.passages()  # what a model will be asked  # doctest: +SKIP
        >>> alice.training_blocks(tokenizer, 512)  # what it may be trained on  # doctest: +SKIP

    """
    if role not in ROLES:
        hint = did_you_mean(role, ROLES)
        raise MissingNameError(f"no role {role!r}.{hint} A book's role is one of {', '.join(ROLES)}")
    if not 0 <= held_out < 1:
        raise BadValueError(f"held_out={held_out} must be at least 0 and less than 1: it is the share not trained on")
    from_file = isinstance(source, str | Path) and Path(source).exists()
    label, raw, pairs = _read(source, encoding, config, split, progress)
    label = name or label
    if pairs:
        kind: Split = "held_out" if role == "unseen" else pairs_are
        found = tuple(Pair(prompt, answer, kind) for prompt, answer in pairs)
        return Book(label, "", (), role, found, seed)
    text = cleaning.mend(cleaning.strip_gutenberg(raw))
    text, chapters = cleaning.prose(text) if prose and from_file else (text, cleaning.chapters(text))
    if not text:
        raise BadValueError(f"book {label!r} is empty; check the source for text beside the Gutenberg licence")
    spans = chapters if split_by == "chapters" else _blocks(text, block_words)
    if len(spans) < 2 and held_out and role != "unseen":
        remedy = "use a smaller block_words or more text"
        if split_by == "chapters":
            remedy = "split_by='blocks' needs no headings"
        raise BadValueError(
            f"book {label!r} is too short to split: {len(spans)} {split_by[:-1]}(s) in "
            f"{len(text.split())} words; {remedy}"
        )
    if role == "unseen":
        away = len(spans)
    else:
        away = max(1, min(len(spans) - 1, round(held_out * len(spans)))) if held_out else 0
    chosen = set(random.Random(f"{seed}/split").sample(range(len(spans)), away))
    sections = tuple(Section(start, end, "held_out" if i in chosen else "seen") for i, (start, end) in enumerate(spans))
    return Book(label, text, sections, role, (), seed)


def all_kept(books: Sequence[Book]) -> tuple[Book, ...]:
    """The same books where an aligned one is to be kept, too: a verdict bounds what retained books lose."""
    return tuple(replace(book, role="retain") if book.role == "aligned" else book for book in books)


def check_book_names(books: Sequence[Book]) -> None:
    """Refuse two books of one name: tables and passages know a book by it."""
    names = [book.name for book in books]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadValueError(f"two books are called {twice[0]!r}; name them apart: load_book(..., name=...)")


def _blocks(text: str, size: int) -> list[cleaning.Span]:
    """Blocks of whole sentences with about `size` words each; a short rest joins the last block."""
    spans: list[cleaning.Span] = []
    begin, count = 0, 0
    for start, end in cleaning.sentences(text):
        if count == 0:
            begin = start
        count += len(text[start:end].split())
        if count >= size:
            spans.append((begin, end))
            count = 0
    if count:
        if spans and count < size / 2:
            spans[-1] = (spans[-1][0], len(text))
        else:
            spans.append((begin, len(text)))
    return spans


def _read(
    source: "str | Path | datasets.Dataset",
    encoding: str | None,
    config: str | None,
    split: str,
    progress: bool | None,
) -> tuple[str, str, list[tuple[str, str]]]:
    """A name for the book, its raw text, and its ready-made pairs (one of the two is empty)."""
    if not isinstance(source, str | Path):
        return _read_dataset(source, "book")
    path = Path(source)
    if path.is_file():
        return path.stem, cleaning.decode(path.read_bytes(), path.name, encoding), []
    if path.is_dir():
        if (path / "dataset_info.json").is_file():
            return _read_dataset(_dataset_on_disk(path), path.name)
        files = sorted(path.glob("*.txt"))
        if not files:
            raise MissingFileError(f"the folder {path.name!r} holds no .txt file and no saved data set")
        cleaned = (cleaning.strip_gutenberg(cleaning.decode(f.read_bytes(), f.name, encoding)) for f in files)
        return path.name, "\n\n".join(cleaned), []
    name, revision = split_revision(str(source))
    if not HUB_ID.fullmatch(name) or path.suffix == ".txt":
        raise MissingFileError(f"no book at {str(source)!r}: it is neither a file, a folder nor the id of a data set")
    import datasets
    from huggingface_hub import utils

    try:
        with library_bars(progress, datasets, utils):
            loaded = datasets.load_dataset(name, config, split=split, revision=revision or None)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise MissingFileError(f"no book at {str(source)!r}, here or on the Hub (split {split!r}): {error}") from error
    return _read_dataset(loaded, name.split("/")[-1])


def _dataset_on_disk(folder: Path) -> "datasets.Dataset":
    """What `Dataset.save_to_disk` wrote; its tables are mapped, so they are checked before they are believed."""
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, datasets.Dataset):
            found.data.table.validate(full=True)
            found = found.with_format(None)
    except Exception as error:  # datasets and Arrow raise whatever the damaged files lead them to
        raise CorruptFileError(
            f"the data set in {folder.name!r} is damaged ({type(error).__name__}: {str(error)[:200]}). Save it again"
        ) from None
    return found


def _read_dataset(dataset: "datasets.Dataset", name: str) -> tuple[str, str, list[tuple[str, str]]]:
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        raise BadValueError(f"a book is one datasets.Dataset, not a {type(dataset).__name__}; choose a split of it")
    columns = dataset.column_names
    for prompt, answer in _PAIR_COLUMNS:
        if prompt in columns and answer in columns:
            pairs = list(zip(dataset[prompt], dataset[answer], strict=True))
            if not pairs:
                raise BadValueError(f"book {name!r} is empty: its data set has no rows")
            return name, "", pairs
    if "text" not in columns:
        raise MissingNameError(
            f"book {name!r}: the data set has the columns {', '.join(columns)}; a book needs `text`, "
            f"or a pair such as {' / '.join(_PAIR_COLUMNS[0])}"
        )
    return name, "\n\n".join(dataset["text"]), []
