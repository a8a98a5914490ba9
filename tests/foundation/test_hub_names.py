"""What can be a repository on the Hub, and what is a path."""

import pytest

from hf_taskvec.hub_names import HUB_ID, may_be_hub_id, split_revision


@pytest.mark.parametrize(
    ("where", "revision", "expected"),
    [
        ("me/model", None, ("me/model", None)),
        ("me/model@v2", None, ("me/model", "v2")),
        ("me/model@refs/pr/1", None, ("me/model", "refs/pr/1")),
        ("me/model", "v3", ("me/model", "v3")),
        ("odd@name@v1", None, ("odd@name", "v1")),
        ("me/model@v2", "v3", ("me/model@v2", "v3")),  # a revision that is given says that the rest is a name
    ],
)
def test_a_revision_follows_the_last_at_sign(
    where: str, revision: str | None, expected: tuple[str, str | None]
) -> None:
    assert split_revision(where, revision) == expected


@pytest.mark.parametrize("name", ["gpt2", "me/model", "me/my-model.v2"])
def test_a_name_with_or_without_an_owner_may_be_on_the_hub(name: str) -> None:
    assert may_be_hub_id(name)


@pytest.mark.parametrize("path", ["./model", "/models/phi", "~/model", "a/b/c", r"C:\model", "../model", ".hidden"])
def test_a_path_is_not_on_the_hub(path: str) -> None:
    assert not may_be_hub_id(path)


def test_a_push_needs_an_owner() -> None:
    assert HUB_ID.fullmatch("me/my-model.v2")
    for name in ("gpt2", "me/", "/model", "a/b/c", "me/my model", "me/model@v1"):
        assert not HUB_ID.fullmatch(name)
