"""Which tokens a fine-tune's tokenizer has beside its base's, and a tokenizer that has them as well.

Tokenizers are read and written by transformers; code that lies beside a model is not run.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_taskvec.errors import BadValueError, MismatchError, some
from hf_taskvec.models.loading import load_tokenizer, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: a tokenizer, a folder that holds one, or a Hub id
Tokenizer = Any

# What is said of how a token is found in a text, as the fields of transformers' `AddedToken` are called.
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@dataclass(frozen=True)
class AddedTokens:
    """What a fine-tune's tokenizer has beside its base's.

    Args:
        shared (`frozenset[int]`):
            The numbers of the tokens that both have.
        ids (`Mapping[str, int]`):
            Token -> its number, in the order of the numbers.
        said (`Mapping[str, str]`):
            Token -> what is said of how it is found in a text: those of `AddedToken`'s fields that are true.

    """

    shared: frozenset[int]
    ids: Mapping[str, int]
    said: Mapping[str, str]


def open_tokenizer(given: Tokenizer | None, model: Any, token: str | bool | None = None) -> Any:
    """A tokenizer that was given, or the one that lies beside a model.

    Args:
        given (`Any`):
            A tokenizer of transformers, a folder, a Hub id, or None.
        model (`Path` or `torch.nn.Module`):
            The model's folder; or a live model, which says what it was loaded from.
        token (`str` or `bool`, *optional*):
            For private repositories.

    Raises:
        `MissingFileError`: If there is none.
        `BadValueError`: If what was given is no tokenizer, or the model does not say where it came from.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if given is None:
        return load_tokenizer(model) if isinstance(model, Path) else tokenizer_of(model)
    if not isinstance(given, str | Path):
        raise BadValueError(f"a tokenizer, a folder or a Hub id is needed, not {type(given).__name__}.")
    return load_tokenizer(given, token=token)


def added_tokens(base: "PreTrainedTokenizerBase", tuned: "PreTrainedTokenizerBase", where: str) -> AddedTokens:
    """The tokens that the fine-tune's tokenizer has beside its base's.

    Args:
        base (`PreTrainedTokenizerBase`):
            The base's tokenizer.
        tuned (`PreTrainedTokenizerBase`):
            The fine-tune's.
        where (`str`):
            What the two are called in a message.

    Raises:
        `MismatchError`: If they number tokens otherwise, or differ in tokens that were not added.
    """
    old, new = (dict(sorted(each.get_vocab().items(), key=lambda one: one[1])) for each in (base, tuned))
    moved = [token for token, number in old.items() if new.get(token, number) != number]
    added = {token: number for token, number in new.items() if token not in old}
    of_base, of_tuned = ({str(each) for each in one.added_tokens_decoder.values()} for one in (base, tuned))
    others = [token for token in added if token not in of_tuned] + [
        token for token in old if token not in new and token not in of_base
    ]
    if moved or others:
        wrong = "number" if moved else "have other"
        raise MismatchError(
            f"the tokenizers of {where} {wrong} tokens ({some([repr(each) for each in moved or others])}): they may "
            "differ in added tokens alone. Give the tokenizers that belong to the two models."
        )
    known = {str(each): each for each in tuned.added_tokens_decoder.values()}
    said = {token: " ".join(flag for flag in _FLAGS if getattr(known[token], flag)) for token in added}
    return AddedTokens(frozenset(number for token, number in old.items() if token in new), added, said)


def with_tokens(
    tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[str], said: Mapping[str, str]
) -> "tuple[PreTrainedTokenizerBase, dict[str, int], list[str]]":
    """A tokenizer that has some more tokens, as far as it lacks them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            It stays as it is.
        tokens (`Sequence[str]`):
            In the order in which they get their numbers.
        said (`Mapping[str, str]`):
            What `AddedTokens.said` says of them; of one that is not in it nothing.

    Returns:
        `tuple`: The tokenizer, the number of each of the tokens, and those that it did not have before.

    Raises:
        `MismatchError`: If it cannot take one of them.
    """
    grown = copy.deepcopy(tokenizer)
    had = grown.get_vocab()
    new = [token for token in tokens if token not in had]
    add_to(grown, new, said)
    has = grown.get_vocab()
    if refused := [token for token in tokens if token not in has]:
        raise MismatchError(f"{type(tokenizer).__name__} does not take the tokens {some(map(repr, refused))}.")
    return grown, {token: has[token] for token in tokens}, new


def add_to(tokenizer: "PreTrainedTokenizerBase", tokens: Iterable[str], said: Mapping[str, str]) -> None:
    """Add tokens to a tokenizer, in this order."""
    from transformers import AddedToken

    for token in tokens:
        flags = said.get(token, "").split()
        tokenizer.add_tokens([cast("Any", AddedToken)(token, **{flag: flag in flags for flag in _FLAGS})])
