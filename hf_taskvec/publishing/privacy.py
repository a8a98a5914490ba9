"""What must never be published: tokens, keys, paths of this machine, the name of its user.

Provenance stores no path to begin with. This is the last check before a card or a file is published: it
refuses, and says what to change, since cutting something out of a text could leave a wrong one.

Tokens are known by their look: by the detectors of `detect-secrets` that go by a form, and by forms of our own. Those
of its detectors that go by entropy or by a word such as "secret" are left out: fingerprints, checksums and vocabularies
are full of both.
"""

import getpass
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from hf_taskvec.errors import LeakError

# Tokens by their look: Hugging Face, OpenAI, GitHub, AWS, GitLab, npm, Slack, Google, PyPI.
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{20,}"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}|gl[a-z]{2,7}-[\w-]{20,}|npm_[A-Za-z0-9]{36}"
    r"|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|AIza[\w-]{35}|GOCSPX-[\w-]{20,}|ya29\.[\w-]{20,}|pypi-AgE[\w-]{20,})"
)
# A secret by its name: as an environment file, a config or a log-in to Weights & Biases has it.
_ASSIGNED = re.compile(
    r"""(?<![A-Za-z0-9_])(?:[A-Z0-9]+_)*
      (?:(?:ACCESS|API|AUTH|BEARER|BOT|HF|HUB|REFRESH)_?TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|SECRET_?KEY)
      [ ]?=[ ]?["']?(?!os\.|getenv|None\b)[^\s"'<${]{8,}
    | ["'](?:\w*[_-])?(?:api_?key|access_?key|secret(?:_?key)?|password|passwd|(?:auth|access|refresh|hf|hub)_?token)
      ["'][ ]?:[ ]?["'][^\s"'<${]{8,}["']
    | \bwandb\b\W[^\n]{0,60}\b[0-9a-f]{40}\b
    | ^machine[ ]\S+\s+login[ ]\S+\s+password[ ]\S+""",
    re.VERBOSE | re.MULTILINE,
)
# A module of detect-secrets and its detector: those that go by a form.
_DETECTORS = {
    "aws": "AWSKeyDetector",
    "azure_storage_key": "AzureStorageKeyDetector",
    "basic_auth": "BasicAuthDetector",  # as in DATABASE_URL=postgres://user:password@host
    "discord": "DiscordBotTokenDetector",
    "github_token": "GitHubTokenDetector",
    "gitlab_token": "GitLabTokenDetector",
    "jwt": "JwtTokenDetector",
    "mailchimp": "MailchimpDetector",
    "npm": "NpmDetector",
    "openai": "OpenAIDetector",
    "private_key": "PrivateKeyDetector",
    "pypi_token": "PypiTokenDetector",
    "sendgrid": "SendGridDetector",
    "slack": "SlackDetector",
    "square_oauth": "SquareOAuthDetector",
    "stripe": "StripeDetector",
    "twilio": "TwilioKeyDetector",
}
_PRIVATE_KEY = re.compile(r"BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY|PuTTY-User-Key-File-\d")
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


def check_file(path: Path, where: str, *, is_vocabulary: bool = False) -> None:
    """Refuse a file of any size and kind with a token, a key or the user's home folder in it.

    Args:
        path (`Path`):
            The file. Of safetensors the header is read: tensors are numbers.
        where (`str`):
            How an error calls it.
        is_vocabulary (`bool`, *optional*, defaults to `False`):
            Whether it holds pieces of any text, such as "/root", none of which means a place.
    """
    check = _check_tokens if is_vocabulary else check_secrets
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            size = int.from_bytes(file.read(8), "little")
            check(_text(file.read(min(size, path.stat().st_size))), where)
            return
        before = b""
        while piece := file.read(_PIECE):
            check(_text(before + piece), where)
            before = piece[-_OVERLAP:]


_PIECE, _OVERLAP = 1 << 22, 1 << 13  # bytes; no token is longer than the overlap


def _text(data: bytes) -> str:
    """What can be read in bytes of any kind; without zeros, which UTF-16 has between letters."""
    return data.replace(b"\0", b"").decode("utf-8", "replace")


def _check_tokens(text: str, where: str) -> None:
    kind = _secret_in(text)
    if kind:
        raise LeakError(f"{where} holds a token or password ({kind}). Remove it, and revoke it if it was ever shown.")


def _secret_in(text: str) -> str | None:
    """The kind of the first secret that a text has; never the secret itself."""
    if any(secret in text for secret in known_secrets()):
        return "one that this process knows"
    if _TOKENS.search(text):
        return "by its form"
    if _PRIVATE_KEY.search(text):
        return "a private key"
    if _ASSIGNED.search(text):
        return "by its name"
    return next((kind for kind, find in _detectors() if any(True for _ in find(text))), None)


@cache
def _detectors() -> tuple[tuple[str, Callable[[str], Iterable[str]]], ...]:
    found = []
    for module, name in _DETECTORS.items():
        detector = getattr(import_module(f"detect_secrets.plugins.{module}"), name)()
        found.append((str(detector.secret_type), detector.analyze_string))
    return tuple(found)


def _in_home(text: str) -> bool:
    home = str(Path.home())
    return len(home) > 2 and re.search(rf"(?<![\w.]){re.escape(home)}(?![\w.-])", text) is not None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return ""
