"""What is published: model cards, pushes to the Hub, and the checks that nothing private goes along.

- `push`: a folder that holds a model, an adapter or a vector, pushed in one commit.
- `push_without_folder`: what the methods of `TaskVector` push: a vector, an adapter, a merged model.
- `pushed_files`: what a push sends, checked.
- `hub_commit`: how it is sent, and the Hub's errors in words.
- `written_folder`: a folder that this library wrote, and what it holds (`Artifact`).
- `model_card`: the card of an artifact, from the templates in `model_cards/`.
- `card_front_matter`: a card's metadata, and the schema that it must meet.
- `card_evaluation`: what a card shows of a sweep's report, and what of the report is published.
- `eval_results`: scores on data sets of the Hub, for its leaderboards.
- `collection`: a base, its vectors, and what was made with them, in a collection.
- `notation`: the algebra's notation, read safely, and written as code and as a formula.
- `privacy`: what must never be published: tokens, paths of this machine, the name of its user.

The public names are listed here and imported when first used: `import hf_taskvec.publishing` costs no torch.

    from hf_taskvec.publishing import push_folder, write_card
"""

from typing import TYPE_CHECKING

from hf_taskvec.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_taskvec.publishing.collection import push_collection
    from hf_taskvec.publishing.model_card import card_for, write_card
    from hf_taskvec.publishing.push import Pushed, push_folder
    from hf_taskvec.publishing.written_folder import Artifact, open_artifact

_HOMES = {
    "Artifact": "written_folder",
    "Pushed": "push",
    "card_for": "model_card",
    "open_artifact": "written_folder",
    "push_collection": "collection",
    "push_folder": "push",
    "write_card": "model_card",
}

__all__ = [
    "Artifact",
    "Pushed",
    "card_for",
    "open_artifact",
    "push_collection",
    "push_folder",
    "write_card",
]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
