"""Relearning: fine-tune a copy of a model a little, and look how fast the book comes back.

What is relearnt and what is asked are different parts of the book (`split_for_relearning`), else only learning would
be measured. For the same reason the attack means something only beside a model that never saw the book, attacked with
the same settings (arXiv 2406.13356 also relearns on benign text, hence `on`).
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from hf_taskvec.auditing.attacks.copyable_models import check_copyable
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.texts.books import Book, Section
from hf_taskvec.evaluation.texts.leaks import check_leaks
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.models.layout import is_peft_model
from hf_taskvec.models.model_facts import input_device
from hf_taskvec.training.accelerators import SingleProcess
from hf_taskvec.training.settings import Method, TrainingSettings
from hf_taskvec.training.token_blocks import read_blocks
from hf_taskvec.training.trainable_parts import check_targets, make_trainable
from hf_taskvec.training.trained_model import check_weights_finite, open_base
from hf_taskvec.training.training_loop import TrainingLoop, make_optimizer

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

RelearnedText = Literal["forget", "aligned", "unrelated"]
# So many words in a row of an asked answer must not stand in the text that is relearnt.
LEAKED_WORDS = 8


@dataclass(frozen=True)
class Relearning:
    """The budget of a relearning attack, the same for every model that is attacked; checked when it is made.

    Args:
        on (`"forget"`, `"aligned"` or `"unrelated"`, *optional*, defaults to `"forget"`):
            What kind of text is relearnt: a part of the book itself, a related book, or something else. A label only:
            the text is given as blocks.
        method (`"full"` or `"lora"`, *optional*, defaults to `"full"`):
            Train every weight, or low-rank factors beside the frozen ones.
        learning_rate (`float`, *optional*, defaults to 2e-5):
            Constant after a short warm-up, so that the measured steps lie on one curve. The default is that of the
            unlearning depth score's authors for a model of a billion parameters; a tiny model needs about 1e-3.
        epochs (`int`, *optional*, defaults to 1):
            How often each block is seen.
        steps (`int`, *optional*):
            So many steps of the optimiser, instead of whole epochs.
        batch_size (`int`, *optional*, defaults to 8):
            Blocks in one step.
        block_length (`int`, *optional*, defaults to 128):
            Tokens in each block, for whoever makes them: `book.training_blocks(tokenizer, settings.block_length)`.
        points (`int`, *optional*, defaults to 4):
            How often the model is handed over to be measured. What comes back comes back soon, so the steps double
            from point to point; the last one is the last step.
        rank (`int`, *optional*, defaults to 32):
            Of LoRA's factors.
        seed (`int`, *optional*, defaults to 0):
            Of the order of the blocks, dropout and LoRA's first factor.

    Raises:
        `BadValueError`: If a number makes no sense.
        `MissingNameError`: If there is no such text or method.

    Example:
        >>> Relearning(epochs=2).measured_steps(blocks=100)  # 13 steps in an epoch
        (3, 6, 13, 26)

    """

    on: RelearnedText = "forget"
    method: Method = "full"
    learning_rate: float = 2e-5
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 8
    block_length: int = 128
    points: int = 4
    rank: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        known = get_args(RelearnedText)
        if self.on not in known:
            hint = did_you_mean(str(self.on), known)
            raise MissingNameError(f"no text to relearn on called {self.on!r}.{hint} It is one of {', '.join(known)}.")
        for name, least in (("steps", 1), ("block_length", 2), ("points", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise BadValueError(f"{name}={value!r} must be a whole number of at least {least}.")
        self.training  # noqa: B018 - it checks the rest

    @property
    def training(self) -> TrainingSettings:
        """The same for the training loop."""
        return TrainingSettings(
            method=self.method,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            weight_decay=0.0,  # as the unlearning depth score's authors attack
            schedule="constant",
            seed=self.seed,
            rank=self.rank,
        )

    def measured_steps(self, blocks: int) -> tuple[int, ...]:
        """The steps after which the model is measured, for so many blocks; the last one ends the attack."""
        total = self.steps or self.epochs * -(-blocks // self.batch_size)
        return tuple(sorted({max(1, total >> halvings) for halvings in range(self.points)}))


def relearned(
    model: "PreTrainedModel", blocks: "datasets.Dataset", settings: Relearning, *, progress: bool | None = None
) -> "Iterator[tuple[int, PreTrainedModel]]":
    """A copy of the model as it relearns a text, at some steps on the way; the given model stays as it is.

    The copy is trained in fp32, whatever the model's dtype: steps as small as these would be rounded away in 16 bits.
    The same model, blocks and settings give the same bits, with any number of processes: each of them trains, and
    takes over the main process's weights before they are measured. The caller's random numbers are left alone.

    Args:
        model (`PreTrainedModel`):
            A live causal language model.
        blocks (`datasets.Dataset`):
            What it relearns, as `Book.training_blocks` gives it.
        settings (`Relearning`):
            The budget.
        progress (`bool`, *optional*):
            Show a progress bar; by default on a terminal.

    Returns:
        `Iterator[tuple[int, PreTrainedModel]]`: The number of steps done and the live model after them, plain and in
        evaluation mode. It is for measuring only: the full fine-tune's is trained further afterwards. Under several
        processes, all of them must go through the steps together.

    Raises:
        `UnsupportedError`: If the model is wrapped by PEFT, quantised, offloaded, spread over devices, or has hooks (an
            attached edit, for example) that a copy of its weights would lack.
        `MismatchError`: If the blocks are not the model's: other tokens, or longer than its context.
        `DivergedError`: At a step whose loss or weights are not finite.

    Example:
        ```python
        split = split_for_relearning(book, passages)
        blocks = split.text.training_blocks(tokenizer, settings.block_length)
        for step, attacked in relearned(edited, blocks, settings):
            asked = ask(attacked, NoEdit(), [0.0], passages=split.passages, ...)
        ```

    """
    check_copyable(model, "relearning")
    base = open_base(model)
    data = read_blocks(blocks, base.vocabulary, base.context)
    training = settings.training
    check_targets(model, training)
    accelerator = SingleProcess()
    accelerator.device = input_device(model)
    steps = settings.measured_steps(len(data))
    with _training(accelerator.device):
        trained: Any = base.load(torch.float32)
        trained.__dict__.pop("generate", None)  # who has the weights need not keep a filter of what is generated
        trained.generation_config = copy.deepcopy(model.generation_config)  # whose end tokens the harness follows
        trained = make_trainable(trained.requires_grad_(True), training)
        optimizer = make_optimizer(trained, training)
        loop = TrainingLoop(accelerator, trained, optimizer, data, training, "fp32", total=steps[-1])
    return _at_steps(loop, steps, progress)


def _at_steps(
    loop: TrainingLoop, steps: Sequence[int], progress: bool | None
) -> "Iterator[tuple[int, PreTrainedModel]]":
    state = processes()
    for step in steps:

        def advance(until: int = step) -> None:
            loop.run(progress, lambda done: None, until)
            check_weights_finite(dict(loop.model.named_parameters()))

        with _training(loop.accelerator.device):  # not around the yield: the caller has a mode of its own
            state.together(advance)
            for parameter in loop.model.parameters():
                if parameter.requires_grad:
                    state.broadcast(parameter)
            plain = _plain(loop.model)
        yield step, plain


def _plain(model: Any) -> "PreTrainedModel":
    """The model to measure. LoRA is merged into a copy: unmerging would not give the same bits back."""
    model.eval()
    return copy.deepcopy(model).merge_and_unload() if is_peft_model(model) else model


@contextmanager
def _training(device: torch.device) -> Iterator[None]:
    """A block that trains, whatever mode the caller is in, and leaves the caller's random numbers alone."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        yield


@dataclass(frozen=True)
class RelearningSplit:
    """One part of a book to relearn, and passages of the other part to ask for.

    Args:
        text (`Book`):
            The book; only the chosen sections are its training text.
        passages (`tuple[Passage]`):
            Those that lie in the other sections, and of whose answer no eight words in a row stand in that text.
        leaked (`tuple[str]`):
            The ids of passages of the other sections whose answer stands in the text, in part. They are left out.
    """

    text: Book
    passages: tuple[Passage, ...]
    leaked: tuple[str, ...]


def split_for_relearning(book: Book, passages: Sequence[Passage], share: float = 0.5, seed: int = 0) -> RelearningSplit:
    """Divide what a model may have seen of a book: some sections to relearn, passages of the others to ask for.

    Args:
        book (`Book`):
            The book that was to be forgotten.
        passages (`Sequence[Passage]`):
            Those that are asked of the models; of other books and held-out ones are passed over.
        share (`float`, *optional*, defaults to 0.5):
            Of the seen sections that is relearnt.
        seed (`int`, *optional*, defaults to 0):
            Of the choice of sections.

    Returns:
        `RelearningSplit`: The text to relearn, the passages to ask for, and which were left out because of a leak.

    Raises:
        `BadValueError`: If the book has ready-made pairs, too few sections, or no passage is left.

    """
    if book.pairs:
        raise BadValueError(
            f"book {book.name!r} has ready-made pairs, and no text to relearn a part of. Relearn on another text."
        )
    if not 0 < share < 1:
        raise BadValueError(f"share={share!r} must lie between 0 and 1: one part is relearnt, the other asked for.")
    seen = [number for number, section in enumerate(book.sections) if section.split == "seen"]
    if len(seen) < 2:
        raise BadValueError(
            f"book {book.name!r} has {len(seen)} seen section(s); to relearn one and ask for another takes two. Load "
            "it with a smaller block_words."
        )
    count = max(1, min(len(seen) - 1, round(share * len(seen))))
    chosen = set(random.Random(f"{seed}/relearning").sample(seen, count))
    # The other seen sections become held-out ones: if they were left out, their neighbours would be joined over them.
    sections = [s if number in chosen else replace(s, split="held_out") for number, s in enumerate(book.sections)]
    text = replace(book, sections=tuple(sections))
    others = [_plain_text(book, section) for number, section in enumerate(book.sections) if number in {*seen} - chosen]
    apart = [p for p in passages if p.book == book.name and p.split == "seen" and _stands_in(p, others)]
    # `check_leaks` looks for held-out answers in training text: held out is what these are from the relearning.
    report = check_leaks([replace(p, split="held_out") for p in apart], [text.training_text], LEAKED_WORDS)
    kept = tuple(passage for passage in apart if passage.id not in report.in_training)
    if not kept:
        raise BadValueError(
            f"no seen passage of book {book.name!r} is left to ask for: of {len(passages)} given, {len(apart)} lie in "
            f"sections that are not relearnt, and {len(report.in_training)} of these have {LEAKED_WORDS} words of "
            "their answer in a row in the text that is. Use a smaller share, more passages, or a text that repeats "
            "itself less."
        )
    return RelearningSplit(text, kept, report.in_training)


def _plain_text(book: Book, section: Section) -> str:
    return book.text[section.start : section.end].lower()  # some protocols ask in lower case


def _stands_in(passage: Passage, texts: Sequence[str]) -> bool:
    whole = (passage.prompt + passage.gap + passage.answer).lower()
    return any(whole in text for text in texts)
