"""How alike the books are to the model, before anything is edited: α̂ of eq. (11) between the book to forget and the others."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_taskvec.analysis import Edited, correlation_matrix
from hf_taskvec.evaluation.books import Book
from hf_taskvec.evaluation.passages import find_passages
from hf_taskvec.evaluation.protocols import Protocol
from hf_taskvec.vector import TaskVector

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def correlations(
    base: "PreTrainedModel",
    vectors: Mapping[str, TaskVector],
    books: Sequence[Book],
    protocol: Protocol,
    tokenizer: Any,
) -> dict[str, float]:
    """α̂ of the first book with each other, on held-out passages.

    Args:
        base: θ_0, live.
        vectors: for each book's name the vector of θ_0 fine-tuned on that book alone.
        books: the one to forget first.
        protocol, tokenizer: which passages, and in which tokens.
    """
    first, *others = (book.name for book in books)
    data = {
        book.name: [
            p.prompt + p.gap + p.answer for p in find_passages(book, protocol, tokenizer) if p.split == "held_out"
        ]
        for book in books
    }
    models = {name: Edited(base, vectors[name]) for name in data}
    # A handful of passages each: several positions of each are compared, not its last one alone.
    found = correlation_matrix(models, data, tokenizer=tokenizer, pooling="sample")
    return {f"{first} and {other}": found[first, other] for other in others}
