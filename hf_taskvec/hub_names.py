"""Names on the Hub: `me/model`, `me/model@revision`, `me/model:folder`, and what is a path instead."""

import re
from pathlib import Path

#: a repository with its owner, as cards and pushes need it
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: a repository with or without its owner, as a card's metadata may name it: no path, no revision
CARD_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def split_subfolder(where: str) -> tuple[str, str | None]:
    """`"me/model:checkpoint-100"` as id and the folder in the repository; a colon is in no other part of a name.

    >>> split_subfolder("me/model@v2:runs/checkpoint-100")
    ('me/model@v2', 'runs/checkpoint-100')
    >>> split_subfolder("me/model")
    ('me/model', None)
    """
    where, mark, inside = where.partition(":")
    return where, inside if mark else None


def split_revision(where: str, revision: str | None = None) -> tuple[str, str | None]:
    """`"me/model@v2"` as id and revision; a folder in the repository stays with the id.

    >>> split_revision("me/model@v2")
    ('me/model', 'v2')
    >>> split_revision("me/model@v2:checkpoint-100")
    ('me/model:checkpoint-100', 'v2')
    >>> split_revision("me/model", "v3")
    ('me/model', 'v3')
    """
    name, mark, inside = where.partition(":")
    if revision is None and "@" in name:
        name, revision = name.rsplit("@", 1)
    return f"{name}{mark}{inside}", revision


def may_be_hub_id(name: str) -> bool:
    r"""Whether a text can name a repository on the Hub. A folder of this machine may have the same name.

    >>> may_be_hub_id("gpt2"), may_be_hub_id("me/model"), may_be_hub_id("./model"), may_be_hub_id(r"C:\model")
    (True, True, False, False)
    >>> may_be_hub_id("me/model:runs/checkpoint-100"), may_be_hub_id("me/model:../other"), may_be_hub_id("C:/model")
    (True, False, False)
    """
    where, inside = split_subfolder(name)
    parts = () if inside is None else inside.split("/")
    return (
        where.count("/") <= 1
        and not where.startswith((".", "/", "~"))
        and "\\" not in name
        and not {"", ".", ".."} & set(parts)
    )


def is_folder(where: str | Path) -> bool:
    """Whether there is such a folder on this machine; a name that the system does not even take is none.

    >>> is_folder("."), is_folder("x" * 10_000)
    (True, False)
    """
    try:
        return Path(where).is_dir()
    except (OSError, ValueError):
        return False
