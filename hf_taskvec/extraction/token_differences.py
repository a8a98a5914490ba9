"""A fine-tune with other tokens than its base: the changes of a vocabulary, row by row and token by token."""

from collections.abc import Iterator
from typing import Any

from hf_taskvec.algebra.deltas import Delta, Dense, Difference, Rows
from hf_taskvec.algebra.sources import RowsOf, Source, runs_without
from hf_taskvec.algebra.token_rows import TokenRow
from hf_taskvec.errors import MismatchError
from hf_taskvec.models.added_tokens import AddedTokens, added_tokens, open_tokenizer
from hf_taskvec.models.checkpoint import Checkpoint


def tokens_between(
    models: tuple[Any, Any], base: Checkpoint, tuned: Checkpoint, given: tuple[Any, Any], token: str | bool | None
) -> AddedTokens:
    """The tokens that the fine-tune has beside its base, from tokenizers that were given or lie beside the models."""
    places = (opened.folder or model for model, opened in zip(models, (base, tuned), strict=True))
    one, other = (open_tokenizer(each, place, token) for each, place in zip(given, places, strict=True))
    return added_tokens(one, other, f"{base.where} and {tuned.where}")


def token_changes(name: str, base: Source, tuned: Source, added: AddedTokens) -> Iterator[tuple[str, list[Delta]]]:
    """The changes of one weight over a vocabulary, each under its parameter's name.

    Rows of tokens that both models have are compared; those of added tokens are changes from zero, each a parameter of
    its own. Rows that stand for no token are left out.

    Args:
        name (`str`):
            The weight.
        base (`Source`):
            Its rows in the base.
        tuned (`Source`):
            Its rows in the fine-tune.
        added (`AddedTokens`):
            Which rows stand for which tokens.

    Raises:
        `MismatchError`: If there is no row for a token.
    """
    rows, common = base.shape[0], min(base.shape[0], tuned.shape[0])
    for token, number in added.ids.items():
        if number >= tuned.shape[0]:
            raise MismatchError(
                f"{name} has {tuned.shape[0]} rows in the fine-tune, but its tokenizer calls {token!r} {number}. Give "
                "the tokenizer that the model was trained with."
            )
    shared = runs_without(common, set(range(common)) - added.shared)
    if shared == [range(rows)] and tuned.shape == base.shape:
        yield name, [Difference(base, tuned)]
    elif shared:
        yield name, [Rows(run, Difference(RowsOf(base, run), RowsOf(tuned, run)), rows) for run in shared]
    for token, number in added.ids.items():
        yield TokenRow(name, token).name, [Dense((RowsOf(tuned, range(number, number + 1)),))]
