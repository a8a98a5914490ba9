"""A collection on the Hub: a base, its vectors, and what was made with them, on one page."""

from collections.abc import Sequence

from hf_taskvec.errors import BadValueError
from hf_taskvec.hub_client import hub_api
from hf_taskvec.hub_names import split_revision
from hf_taskvec.publishing.hub_commit import errors_in_words
from hf_taskvec.publishing.push import check_repository


def push_collection(
    title: str,
    *,
    base: str,
    vectors: Sequence[str] = (),
    models: Sequence[str] = (),
    adapters: Sequence[str] = (),
    description: str | None = None,
    namespace: str | None = None,
    private: bool = False,
    token: str | bool | None = None,
) -> str:
    """Put a base, its vectors, and the models and adapters made with them into a collection on the Hub.

    A collection of that title which you have already gets what it lacks; nothing is removed from it.

    Args:
        title (`str`):
            What the collection is called.
        base (`str`):
            The Hub id of the base.
        vectors (`Sequence[str]`, *optional*):
            Hub ids of task vectors.
        models (`Sequence[str]`, *optional*):
            Hub ids of edited models.
        adapters (`Sequence[str]`, *optional*):
            Hub ids of adapters.
        description (`str`, *optional*):
            A sentence about it.
        namespace (`str`, *optional*):
            Whose it is; by default the login's.
        private (`bool`, *optional*, defaults to `False`):
            Show it to its owner only.
        token (`str` or `bool`, *optional*):
            As in transformers: by default that of the login.

    Returns:
        `str`: The address of its page.

    Raises:
        `BadValueError`: If there is no title, or a name is no Hub id.
        `HubError`: If the Hub refuses, or cannot be reached.

    Example:
        >>> push_collection("Forgotten books", base="me/base", vectors=["me/hp1-vector"])  # doctest: +SKIP
        'https://huggingface.co/collections/me/forgotten-books-64f9a55bb3115b4f513ec026'

    """
    if not title.strip():
        raise BadValueError("a collection needs a title.")
    notes = {"the base": [base], "a task vector": vectors, "an edited model": models, "an adapter": adapters}
    items = [(split_revision(repo_id)[0], note) for note, repos in notes.items() for repo_id in repos]
    for repo_id, _ in items:
        check_repository(repo_id)
    api = hub_api(token)
    with errors_in_words(f"the collection {title!r}"):
        made = api.create_collection(
            title, namespace=namespace, description=description, private=private, exists_ok=True
        )
        present = {item.item_id for item in made.items}
        for repo_id, note in items:
            if repo_id not in present:
                api.add_collection_item(made.slug, repo_id, "model", note=note, exists_ok=True)
    return made.url
