"""Named, versioned ways to ask a model for a book: lengths, placement, decoding and scorer.

A protocol is a frozen value with a hash over everything that can change a score. Results carry both, and are
put into one table only if they agree. `taskvec-v1` is ours and the default; the others are the literature's:

- `ssu-v1`: Dou et al. 2024, first version, which the main paper used, scored with `rouge_score`;
  `ssu-v1-pypi` is the same with the scorer that its authors ran (the PyPI package `rouge`).
- `ssu-v2`: its second version, sampled. Its authors' default prompt also contains the answer; ours does not.
  In both, a word is what stands between white space, and the answer is what truly follows the prompt.
- `ssu-v1-authors`: the first version as its authors' code builds it (github.com/xz-liu/SSU_Unlearn,
  create_text_complete_data.py and utils_data.py, October 2024): NLTK's tokens, joined by spaces, of which
  punctuation is some; the answer begins at the sentence after the one in which the prompt ends, so a part of a
  sentence is skipped; the question in their template, with "### Answer:" before the output. The first
  version's evaluation also had an instruction before that, whose words are not in those files; to have one:
  `protocols.get("ssu-v1-authors", instruction="Continue the story. ### Question: ")`.
- `muse-verbmem`: Shi et al. 2024, on ready-made prompts. `open-unlearning`: the same pairs, but stemmed words,
  and the target is cut where its tokens follow the prompt's.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean
from hf_taskvec.plugins import plugin, plugin_names
from hf_taskvec.typed_values import typed

Unit = Literal["words", "tokens"]
Placement = Literal["disjoint", "random", "stride", "given"]
Scorer = Literal["rouge_l", "rouge_l_stemmed", "pypi_rouge_l"]
Cut = Literal["alone", "with_specials", "after_prompt"]
WordTokens = Literal["white_space", "nltk"]
AnswerFrom = Literal["prompt", "next_sentence"]
# Fields that were added later, with what they meant before: at that value they leave the hashes of old alone.
_LATER = {
    "cut": "alone",
    "instruction": "",
    "cue": "",
    "word_tokens": "white_space",
    "answer_from": "prompt",
}


@dataclass(frozen=True)
class Decoding:
    """How the continuation is produced. Temperature 0 is greedy.

    Args:
        max_new_tokens (`int`, *optional*):
            At most so many; without it, as many as the true answer has.
        total_length (`int`, *optional*):
            Prompt and continuation together have at most so many tokens.
        temperature (`float`, *optional*, defaults to 0):
            0 takes the most probable token.
        top_p (`float`):
            The nucleus that is sampled from.
    """

    max_new_tokens: int | None = None
    total_length: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def hash(self) -> str:
        """sha256 of the fields."""
        return _digest(asdict(self))


@dataclass(frozen=True)
class Protocol:
    """Everything that decides which text is asked for and how the answer is scored.

    Args:
        name (`str`):
            What results are reported under.
        version (`int`):
            Goes up whenever the same fields would give other numbers.
        unit (`"words"` or `"tokens"`):
            What the lengths count.
        prompt_length, answer_length (`int`):
            Of each passage; for ready-made pairs the answer is cut to it.
        placement (`"disjoint"`, `"random"`, `"stride"` or `"given"`):
            Where passages begin. `"disjoint"`: at sentence starts, none overlapping another;
            `"random"`: at random sentence starts, overlaps allowed; `"stride"`: every `stride` units;
            `"given"`: the pairs come ready-made.
        stride (`int`):
            For `placement="stride"`.
        lower_case (`bool`):
            Lower-case prompt and answer.
        samples (`int`, *optional*):
            At most so many passages of each book and split.
        seed (`int`):
            Of the choice of passages and of sampled decoding.
        leak_free (`bool`):
            Passages whose answer stands elsewhere are left out, and this is checked.
        decoding (`Decoding`):
            Greedy or sampled, and for how long.
        scorer (`"rouge_l"`, `"rouge_l_stemmed"` or `"pypi_rouge_l"`):
            What compares the output with the answer.
        score_factor (`float`):
            Scores are multiplied by it (MUSE reports percent).
        cut (`"alone"`, `"with_specials"` or `"after_prompt"`):
            Which tokens of a ready-made answer count towards `answer_length`. `"alone"`: those of the answer
            by itself; `"with_specials"`: also the beginning-of-text token that the tokenizer puts before it,
            as MUSE counts; `"after_prompt"`: those that follow the prompt's when both are one text.
        instruction (`str`):
            What the model reads before each prompt.
        cue (`str`):
            What it reads after each prompt, right before the answer.
        word_tokens (`"white_space"` or `"nltk"`):
            What a word is, for `unit="words"`: what stands between white space, or a token of NLTK's. The latter
            are joined by single spaces, in the prompt and in the answer, as NLTK writes them.
        answer_from (`"prompt"` or `"next_sentence"`):
            Where the answer begins, for `word_tokens="nltk"`: where the prompt ends, or at the next sentence.
    """

    name: str
    version: int
    unit: Unit
    prompt_length: int
    answer_length: int
    placement: Placement
    stride: int = 0
    lower_case: bool = False
    samples: int | None = None
    seed: int = 0
    leak_free: bool = False
    decoding: Decoding = Decoding()
    scorer: Scorer = "rouge_l"
    score_factor: float = 1.0
    cut: Cut = "alone"
    instruction: str = ""
    cue: str = ""
    word_tokens: WordTokens = "white_space"
    answer_from: AnswerFrom = "prompt"

    def __post_init__(self) -> None:
        if self.prompt_length < 1 or self.answer_length < 1:
            raise BadValueError(
                f"protocol {self.name!r}: prompt_length={self.prompt_length} and answer_length="
                f"{self.answer_length} must both be at least 1"
            )
        if self.samples is not None and self.samples < 1:
            raise BadValueError(f"protocol {self.name!r}: samples={self.samples} must be at least 1, or None for all")
        if self.placement == "stride" and self.stride < 1:
            raise BadValueError(f"protocol {self.name!r}: placement 'stride' needs stride >= 1")
        for name, kind in (("word_tokens", WordTokens), ("answer_from", AnswerFrom)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise BadValueError(f"protocol {self.name!r}: {name}={getattr(self, name)!r} is not one of {known}")
        if self.word_tokens == "nltk" and (self.unit != "words" or self.placement != "random"):
            raise BadValueError(
                f"protocol {self.name!r}: word_tokens='nltk' is for unit='words' and placement='random', as SSU has it"
            )
        if self.answer_from == "next_sentence" and self.word_tokens != "nltk":
            raise BadValueError(f"protocol {self.name!r}: answer_from='next_sentence' needs word_tokens='nltk'")
        if self.decoding.temperature < 0 or not 0 < self.decoding.top_p <= 1:
            raise BadValueError(
                f"protocol {self.name!r}: temperature={self.decoding.temperature} must be >= 0 and "
                f"top_p={self.decoding.top_p} in (0, 1]"
            )

    @property
    def quotes(self) -> bool:
        """Whether passages stand in the book as they are, letter for letter but for their case."""
        return self.word_tokens == "white_space"

    @property
    def hash(self) -> str:
        """sha256 over all fields: two results are comparable only if it is the same."""
        return _digest(asdict(self))

    @property
    def id(self) -> str:
        """The name and the beginning of the hash, as tables show it."""
        return f"{self.name}@{self.hash[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """The fields and the hash, as `report.json` holds them."""
        return {**asdict(self), "hash": self.hash}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Protocol":
        """The protocol that `to_dict` described; the hash is computed anew."""
        return typed(cls, with_later_fields(fields))


def with_later_fields(fields: Any) -> Any:
    """The fields of a protocol of an earlier version, with what it could not say: what was always done then."""
    return {**_LATER, **fields} if isinstance(fields, dict) else fields


def _digest(fields: dict[str, Any]) -> str:
    kept = {name: value for name, value in fields.items() if name not in _LATER or value != _LATER[name]}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


OURS = Protocol(
    name="taskvec-v1",
    version=1,
    unit="words",
    prompt_length=100,
    answer_length=50,
    placement="disjoint",
    samples=100,
    leak_free=True,
)
_SSU_V1 = Protocol(
    name="ssu-v1",
    version=1,
    unit="words",
    prompt_length=200,
    answer_length=150,
    placement="random",
    samples=50,
    decoding=Decoding(total_length=500),
)
_MUSE = Protocol(
    name="muse-verbmem",
    version=1,
    unit="tokens",
    prompt_length=1,
    answer_length=128,
    placement="given",
    decoding=Decoding(max_new_tokens=128),
    score_factor=100.0,
    cut="with_specials",
)
_ALL = {
    protocol.name: protocol
    for protocol in (
        OURS,
        _SSU_V1,
        replace(_SSU_V1, name="ssu-v1-pypi", scorer="pypi_rouge_l"),
        replace(
            _SSU_V1,
            name="ssu-v1-authors",
            scorer="pypi_rouge_l",
            instruction="### Question: ",
            cue="\n ### Answer:",
            word_tokens="nltk",
            answer_from="next_sentence",
        ),
        Protocol(
            name="ssu-v2",
            version=1,
            unit="words",
            prompt_length=100,
            answer_length=100,
            placement="stride",
            stride=200,
            lower_case=True,
            samples=200,
            seed=42,
            decoding=Decoding(temperature=0.4, top_p=0.8),
        ),
        _MUSE,
        replace(_MUSE, name="open-unlearning", scorer="rouge_l_stemmed", score_factor=1.0, cut="after_prompt"),
    )
}


def names() -> list[str]:
    """The names that `get` knows, the default first; those that other packages add at the end."""
    return list(dict.fromkeys([*_ALL, *plugin_names("protocols")]))


def get(protocol: str | Protocol | None = None, **changes: Any) -> Protocol:
    """The protocol of that name, with some fields changed on request.

    A changed protocol keeps its name but has another hash: its results share no table with the original's.

    Args:
        protocol (`str` or `Protocol`, *optional*):
            One of `names()`, or a protocol to change. `taskvec-v1` without it.
        **changes:
            Fields of `Protocol` with their new values.

    Returns:
        `Protocol`: With a hash over everything that can change a score.

    Raises:
        `MissingNameError`: If there is no such protocol or field.
        `BadValueError`: If the fields contradict each other.

    Example:
        >>> get("muse-verbmem").decoding.max_new_tokens
        128
        >>> get(prompt_length=30).hash == get().hash
        False

    """
    if isinstance(protocol, Protocol):
        chosen = protocol
    elif protocol is None:
        chosen = OURS
    elif protocol in _ALL:
        chosen = _ALL[protocol]
    elif protocol in plugin_names("protocols"):
        named = f"a Protocol of the name {protocol!r}"
        chosen = plugin(
            "protocols", protocol, lambda found: isinstance(found, Protocol) and found.name == protocol, named
        )
    else:
        raise MissingNameError(
            f"no protocol {protocol!r}.{did_you_mean(protocol, names())} The protocols are {', '.join(names())}; "
            "another one is a `Protocol(...)` of your own"
        )
    unknown = sorted(set(changes) - set(Protocol.__dataclass_fields__))
    if unknown:
        hint = did_you_mean(unknown[0], Protocol.__dataclass_fields__)
        raise MissingNameError(f"a protocol has no field {unknown[0]!r}.{hint}")
    return replace(chosen, **changes) if changes else chosen
