"""What must never be published: tokens, paths of this machine, the name of its user.

Provenance stores no path to begin with. This is the last check before a card or a file is published: it
refuses, and says what to change, since cutting something out of a text could leave a wrong one.
"""

import getpass
import os
import re
from collections.abc import Iterable
from pathlib import Path

from hf_taskvec.errors import LeakError

# Tokens by their look: Hugging Face, OpenAI, GitHub, AWS.
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{20,}"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})\b"
)
_SECRET_NAMES = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY)$", re.IGNORECASE)
_ROOTS = (
    "root|home|Users|tmp|var|mnt|media|opt|srv|usr|etc|dev|proc|data|work|workspace|scratch|content|private|Volumes"
)
_PATHS = re.compile(
    rf"""(?<![\w:/.\-<])/(?:[\w.@+~%-]+(?:/[\w.@+~%-]+)+|(?:{_ROOTS})\b)  # absolute
    | (?<![\w/])~[\w.-]*/\w                                              # below a home folder
    | \bfile://
    | \b[A-Za-z]:\\\w                                                    # Windows""",
    re.VERBOSE,
)


def known_secrets() -> set[str]:
    """The tokens that this process knows: in its environment, and the Hub's that was stored at login."""
    from huggingface_hub import get_token

    found = {value for name, value in os.environ.items() if _SECRET_NAMES.search(name)}
    return {value for value in (*found, get_token() or "") if len(value) >= 6}


def without_secrets(text: str) -> str:
    """The text with `***` in place of every token, for whatever is shown or stored."""
    for secret in sorted(known_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _TOKENS.sub("***", text)


def check_text(text: str, where: str) -> None:
    """Refuse a text with a token or a path of this machine in it."""
    _check_tokens(text, where)
    found = _PATHS.search(text)
    if found or _in_home(text):
        shown = f" (it ends with {found[0].rstrip('/').rsplit('/', 1)[-1]!r})" if found else ""
        raise LeakError(f"{where} holds a path of this machine{shown}. Use a Hub id or a plain name instead.")


def check_secrets(text: str, where: str) -> None:
    """Refuse a text with a token or the user's home folder in it: for files that are not of our making."""
    _check_tokens(text, where)
    if _in_home(text):
        raise LeakError(f"{where} holds a path in your home folder. Remove it, or leave the file out of the folder.")


def check_names(values: Iterable[str], where: str, public: Iterable[str] = ()) -> None:
    """Refuse values that hold the name of this machine's user; `public` are Hub ids, where it may be the namespace."""
    users = {name for name in (_user(), Path.home().name) if name}
    for value in values:
        rest = value
        for each in sorted(public, key=len, reverse=True):
            rest = rest.replace(each, " ")
        for user in users:
            if re.search(rf"(?<![^\W_]){re.escape(user)}(?![^\W_])", rest, re.IGNORECASE):
                raise LeakError(
                    f"{where} would show {value[:60]!r}, in which this machine's user name stands. Rename that folder, "
                    "label or book, or use a Hub id."
                )


def _check_tokens(text: str, where: str) -> None:
    if _TOKENS.search(text) or any(secret in text for secret in known_secrets()):
        raise LeakError(f"{where} holds a token or password. Remove it, and revoke it if it was ever shown.")


def _in_home(text: str) -> bool:
    home = str(Path.home())
    return len(home) > 2 and re.search(rf"(?<![\w.]){re.escape(home)}(?![\w.-])", text) is not None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return ""
