"""The kinds of edits that a search tries: each proposes edits, one after another, from what the last one did.

What an edit must reach is told by the verdict. What a kind knows is how to get nearer: a negation that leaves the book
known has to be stronger, one that goes beyond never seen weaker, and what it cost the kept books has to be repaired.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.scale_choice import Candidate
from hf_taskvec.forgetting.negation_strength import chance_level, mean_block_loss, strength_for
from hf_taskvec.json_files import json_digest
from hf_taskvec.training.objectives import ForgetObjective
from hf_taskvec.training.repairing import repair
from hf_taskvec.training.scale_fitting import fit_scales
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.training_stages import rows_digest

if TYPE_CHECKING:
    import datasets

EditKind = Literal["negate", "project", "learned", "repair"]
EDIT_KINDS: tuple[EditKind, ...] = get_args(EditKind)

#: what is tried if nobody says so, the cheapest first
DEFAULT_KINDS: tuple[EditKind, ...] = ("negate", "repair")

# How much of the kept books' own vectors is added where some are given.
_ADDED_BACK = 0.5
# A repair brings back a part of what was negated, so it starts beyond the strength at which the book's loss is that of
# never having seen it. (Nearer to chance the loss levels off, and where it reaches a level is uncertain.)
_BEYOND = 1.55
# A projected vector is of another length, and all of it is the book's own: it starts a little below the strength at
# which the loss is this share of chance, where next to nothing is known.
_BEYOND_PROJECTED, _NEAR_CHANCE = 0.9, 0.9
# The next repair, where one forgot too little, too much, or cost the kept books too much.
_STRONGER, _WEAKER, _LONGER = 1.2, 0.85, 1.5
# A finished repair is adjusted by shares of its strength: the first step, the smallest, and how far in all.
_STEP, _SMALLEST, _FARTHEST = 0.05, 0.01, 0.2


@dataclass(frozen=True)
class ForgetCase:
    """What a search for an edit starts from.

    Args:
        address (`str` or `Path`):
            The model that knows the book: a folder or a Hub id.
        model (`PreTrainedModel`):
            The same, live.
        vector (`TaskVector`):
            Of the book to forget.
        keep_vectors (`Mapping[str, TaskVector]`):
            Of books to keep, by name; there may be none.
        forget_blocks (`datasets.Dataset`):
            Packed blocks of the book to forget.
        keep_blocks (`datasets.Dataset`):
            Packed blocks of the text to keep.
        reference (`PreTrainedModel`):
            A live model that never saw the book.
        criteria (`Criteria`):
            What forgotten and kept mean.
        repairing (`TrainingSettings`):
            How a repair is trained.
        repairs (`Path`):
            The folder of all repairs, each known by what made it.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Saved beside what is made.
        progress (`bool`, *optional*):
            Show progress bars; by default on a terminal only.
    """

    address: str | Path
    model: Any
    vector: TaskVector
    keep_vectors: Mapping[str, TaskVector]
    forget_blocks: "datasets.Dataset"
    keep_blocks: "datasets.Dataset"
    reference: Any
    criteria: Criteria
    repairing: TrainingSettings
    repairs: Path
    tokenizer: Any = None
    progress: bool | None = None

    def negation(self, strength: float) -> TaskVector:
        """The book's vector, negated."""
        return -strength * self.vector

    @cached_property
    def own_part(self) -> TaskVector:
        """The book's vector without what it shares with the kept ones; finding it reads all of them, so once."""
        return self.vector.without(list(self.keep_vectors.values()))

    def projected(self, strength: float) -> TaskVector:
        """The book's own part of its vector, negated, and some of the kept ones added back."""
        first, *more = self.keep_vectors.values()
        return -strength * self.own_part + _ADDED_BACK * sum(more, start=first)

    @property
    def own_vector(self) -> TaskVector:
        """What a repair's start subtracts: the book's vector, or its own part where there are kept ones."""
        return self.own_part if self.keep_vectors else self.vector

    @cached_property
    def never_seen(self) -> float:
        """The loss per token on the book of a model that never saw it."""
        return mean_block_loss(self.reference, self.forget_blocks)

    @property
    def near_chance(self) -> float:
        """The loss of a model that knows next to nothing of a text."""
        return _NEAR_CHANCE * chance_level(self.model)

    @property
    def level(self) -> float:
        """What a negation has to bring the book's loss to: that of never having seen it.

        A model that was trained on little else may be beyond chance, where a negation does not get.
        """
        return min(self.never_seen, self.near_chance)

    def strength(self, edit_at: Callable[[float], TaskVector], level: float) -> float:
        """The smallest strength of an edit at which the book's loss reaches a level."""
        return strength_for(self.model, edit_at, self.forget_blocks, level, progress=self.progress)

    @property
    def symbol(self) -> str:
        """What an edit's name calls the vector that a repair's start subtracts."""
        return "forget⊥" if self.keep_vectors else "forget"

    @cached_property
    def forgetting_strength(self) -> float:
        """How often the book's vector has to be subtracted for a loss as of never having seen the book."""
        return self.strength(self.negation, self.level)

    @property
    def start_of_repair(self) -> Callable[[float], TaskVector]:
        """The edit that is repaired, by its strength: as gentle to the kept books as what is given allows."""
        return self.projected if self.keep_vectors else self.negation


@dataclass(frozen=True)
class TriedEdit:
    """An edit of a search, and what it took.

    Args:
        name (`str`):
            What the report calls it.
        kind (`str`):
            Of what kind it is.
        vector (`TaskVector`):
            The whole change.
        strength (`float`, *optional*):
            How often the book's vector was subtracted.
        epochs (`int`, *optional*):
            How often a repair read the kept text.
        after (`float`):
            How often the vector was subtracted once more, after the repair; below 0, how often it was added.
        step (`float`):
            By how much `after` differs from that of the edit before it.
        steps (`int`):
            Steps of an optimiser.
        tokens (`int`):
            Tokens that were trained on.
        seconds (`float`):
            How long that takes.
        peak_bytes (`int`, *optional*):
            The most memory that the steps took beyond the weights; `None` where nothing told.
    """

    name: str
    kind: EditKind
    vector: TaskVector
    strength: float | None = None
    epochs: int | None = None
    after: float = 0.0
    step: float = 0.0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None


#: from the case, the last edit of this kind and what it reached (`None` at first) to the next; `None`: there is none
Proposal = Callable[[ForgetCase, TriedEdit | None, Candidate | None], TriedEdit | None]


def check_kinds(kinds: object, keep_vectors: Mapping[str, object]) -> tuple[EditKind, ...]:
    """The kinds that a caller names, refused if there is no such kind or one lacks what it needs."""
    given = [kinds] if isinstance(kinds, str) else list(kinds)  # type: ignore[call-overload]
    for kind in given:
        if kind not in EDIT_KINDS:
            hint = did_you_mean(str(kind), EDIT_KINDS)
            raise MissingNameError(f"no kind of edit {kind!r}.{hint} Use some of {', '.join(EDIT_KINDS)}.")
    if not given:
        raise BadValueError(f"no kind of edit is to be tried: name some of {', '.join(EDIT_KINDS)}.")
    if "project" in given and not keep_vectors:
        raise BadValueError(
            "the kind 'project' leaves the kept books' own vectors alone: give keep_vectors={'other': ...}."
        )
    if "forget" in keep_vectors:
        raise BadValueError("the name 'forget' is that of the vector to negate: name the kept book's vector otherwise.")
    return tuple(dict.fromkeys(given))


def negate(case: ForgetCase, last: TriedEdit | None, reached: Candidate | None) -> TriedEdit | None:
    """The plain negation at which the book's loss is that of never having seen it. There is only one."""
    if last is not None:
        return None
    strength = case.forgetting_strength
    return TriedEdit(f"{-strength:.3g}*forget", "negate", case.negation(strength), strength)


def project(case: ForgetCase, last: TriedEdit | None, reached: Candidate | None) -> TriedEdit | None:
    """The same without what the book shares with the kept ones, and with some of these added back."""
    if last is not None:
        return None
    strength = case.strength(case.projected, case.level)
    name = f"{-strength:.3g}*forget⊥ + {_ADDED_BACK:g}*kept"
    return TriedEdit(name, "project", case.projected(strength), strength)


def learned(case: ForgetCase, last: TriedEdit | None, reached: Candidate | None) -> TriedEdit | None:
    """One coefficient for each tensor of each vector, learned by gradient until the book's loss is as never seen.

    There is none where learning found nothing better than no edit at all.
    """
    if last is not None:
        return None
    objective = ForgetObjective(case.forget_blocks, case.keep_blocks, target=case.never_seen)
    vectors = {"forget": case.vector, **case.keep_vectors}
    fit = fit_scales(case.model, vectors, objective, seed=case.repairing.seed, progress=case.progress)
    if fit.kept_step == 0:
        return None
    return TriedEdit(
        "learned coefficients", "learned", fit.vector, steps=len(fit.losses), seconds=round(fit.seconds, 1)
    )


def repaired(case: ForgetCase, last: TriedEdit | None, reached: Candidate | None) -> TriedEdit | None:
    """A negation beyond what is left of the book, then a short fine-tune on the kept text."""
    if last is None or last.strength is None or last.epochs is None or reached is None:
        if case.keep_vectors:
            strength = _BEYOND_PROJECTED * case.strength(case.projected, case.near_chance)
        else:
            strength = _BEYOND * case.forgetting_strength
        epochs = case.repairing.epochs
    else:
        begun = last.strength + last.after
        strength, epochs = next_try(reached, case.criteria, begun, last.epochs)
        if (strength, epochs) == (begun, last.epochs):
            return None
    strength = float(f"{strength:.3g}")  # so that the name tells all of it
    settings = replace(case.repairing, epochs=epochs)
    edit = case.start_of_repair(strength)
    key = json_digest(edit.fingerprint, asdict(settings), rows_digest(case.keep_blocks))
    done = repair(
        case.address,
        edit,
        case.keep_blocks,
        settings,
        case.repairs / f"repair-{key[:12]}",
        tokenizer=case.tokenizer,
        progress=case.progress,
    )
    name = f"{-strength:g}*{case.symbol}, repaired ({epochs} epoch{'s' if epochs > 1 else ''})"
    return TriedEdit(
        name,
        "repair",
        done.vector,
        strength,
        epochs,
        steps=done.steps,
        tokens=done.tokens,
        seconds=done.seconds,
        peak_bytes=done.peak_bytes,
    )


def adjusted(case: ForgetCase, last: TriedEdit, reached: Candidate | None) -> TriedEdit | None:
    """The same repair with a little more, or less, of the vector: nothing is trained for it.

    A repair brings a part of the book back, and how much is known only afterwards. There is none where nothing says
    where to go, where the kept books lost too much for a stronger one, or where the steps have become too small.
    """
    if last.strength is None or reached is None:
        return None
    side = direction(reached, case.criteria)
    if not side or (side > 0 and reached.worst_retain > case.criteria.retain_bound):
        return None
    step = side * _STEP * last.strength
    if last.step:  # on in the same direction, or half of the way back
        step = last.step if last.step * side > 0 else -last.step / 2
    step = float(f"{step:.3g}")  # so that the name tells all of it
    after = round(last.after + step, 6)
    if abs(step) < _SMALLEST * last.strength or abs(after) > _FARTHEST * last.strength:
        return None
    name = f"{last.name.partition(', then ')[0]}, then {-after:+g}*{case.symbol}"
    return replace(last, name=name, vector=last.vector - step * case.own_vector, after=after, step=step)


def direction(reached: Candidate, criteria: Criteria) -> int:
    """1 if the book has to be forgotten more, −1 if less, 0 if neither.

    Args:
        reached (`Candidate`):
            What an edit reached on the half of the passages that chooses.
        criteria (`Criteria`):
            What was to be reached.

    Returns:
        `int`: The direction. Still known is worse than beyond never seen, and the membership test counts last.
    """
    relative = list(reached.relative.values())
    apart = reached.membership or 0.0
    if any(value < criteria.low for value in relative):
        return 1
    if any(value > criteria.high for value in relative):
        return -1
    return (apart > criteria.membership) - (apart < -criteria.membership)


def next_try(reached: Candidate, criteria: Criteria, strength: float, epochs: int) -> tuple[float, int]:
    """The strength and the epochs to try next; the same again if nothing says where to go.

    Args:
        reached (`Candidate`):
            What the last try reached on the half of the passages that chooses.
        criteria (`Criteria`):
            What was to be reached.
        strength (`float`):
            Of the last try's negation.
        epochs (`int`):
            Of its repair.

    Returns:
        `tuple[float, int]`: The next ones.
    """
    lost = reached.worst_retain > criteria.retain_bound
    side = direction(reached, criteria)
    if not (lost and all(criteria.low <= value <= criteria.high for value in reached.relative.values())):
        strength *= {1: _STRONGER, -1: _WEAKER, 0: 1.0}[side]
    # else: the noisiest of the tests counts where nothing else does, as a stronger negation costs the kept books.
    if lost:
        epochs = max(epochs + 1, round(_LONGER * epochs))
    return strength, epochs


PROPOSALS: dict[EditKind, Proposal] = {
    "negate": negate,
    "project": project,
    "learned": learned,
    "repair": repaired,
}

#: the kinds whose edits can be brought nearer without training anything
ADJUSTMENTS: dict[EditKind, Callable[[ForgetCase, TriedEdit, Candidate | None], TriedEdit | None]] = {
    "repair": adjusted,
}
