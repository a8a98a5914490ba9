"""Forgetting a book in one call: the edit is made, chosen by evidence, attacked and written.

- `forget_run`: `forget`, all of it.
- `forget_inputs`: what it is given, checked.
- `edit_search`: kinds of edits in the order of what they cost, tried until one qualifies.
- `edit_kinds`: how each kind proposes its next edit from what the last one did.
- `negation_strength`: how strong a negation has to be.
- `forgotten`: `Forgotten`, what is left behind.

The public names are listed here and imported when first used.

    from hf_taskvec import forget

    done = forget("me/books-model", "hp1.txt", ["hp2.txt", "pp.txt"], "out/", base="microsoft/phi-1_5")
    print(done.sentence)
"""

from typing import TYPE_CHECKING

from hf_taskvec.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_taskvec.forgetting.edit_kinds import EDIT_KINDS, ForgetCase, TriedEdit
    from hf_taskvec.forgetting.edit_search import EditSearch, search_edits
    from hf_taskvec.forgetting.forget_run import forget
    from hf_taskvec.forgetting.forgotten import Forgotten

_HOMES = {
    "EDIT_KINDS": "edit_kinds",
    "EditSearch": "edit_search",
    "ForgetCase": "edit_kinds",
    "Forgotten": "forgotten",
    "TriedEdit": "edit_kinds",
    "forget": "forget_run",
    "search_edits": "edit_search",
}

__all__ = ["EDIT_KINDS", "EditSearch", "ForgetCase", "Forgotten", "TriedEdit", "forget", "search_edits"]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
