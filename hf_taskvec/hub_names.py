"""Names on the Hub: `me/model`, `me/model@revision`, and what is a path instead."""

import re
from pathlib import Path

#: a repository with its owner, as cards and pushes need it
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: a repository with or without its owner, as a card's metadata may name it: no path, no revision
CARD_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def split_revision(where: str, revision: str | None = None) -> tuple[str, str | None]:
    """`"me/model@v2"` as id and revision.

    >>> split_revision("me/model@v2")
    ('me/model', 'v2')
    >>> split_revision("me/model", "v3")
    ('me/model', 'v3')
    """
    if revision is None and "@" in where:
        where, revision = where.rsplit("@", 1)
    return where, revision


def may_be_hub_id(name: str) -> bool:
    r"""Whether a text can name a repository on the Hub. A folder of this machine may have the same name.

    >>> may_be_hub_id("gpt2"), may_be_hub_id("me/model"), may_be_hub_id("./model"), may_be_hub_id(r"C:\model")
    (True, True, False, False)
    """
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name


def is_folder(where: str | Path) -> bool:
    """Whether there is such a folder on this machine; a name that the system does not even take is none.

    >>> is_folder("."), is_folder("x" * 10_000)
    (True, False)
    """
    try:
        return Path(where).is_dir()
    except (OSError, ValueError):
        return False
