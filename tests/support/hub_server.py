"""A Hugging Face Hub on loopback: the real client, over real HTTP, against a server that lives in the test.

    with HubServer() as hub:
        os.environ.update(hub.environment())  # before the first import of huggingface_hub
        sha = hub.add_repo("me/model", {"config.json": b"{}"})

`HF_ENDPOINT` is read once, when huggingface_hub is imported. This module therefore imports the standard
library only, so that a conftest.py can start the server before anything else.

There are two origins, as the Hub has: `url` answers the API and serves small files, `cdn_url` takes and
serves LFS content. The second refuses requests with a token, so a client that leaks one there fails its test.
Not here: Xet, multipart LFS, discussions, deleting repos and branches, paging of long listings.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN, OTHER_TOKEN = "hf_test", "hf_other"  # of the users `me` and `other`; a user owns the repos `user/...`
LFS_SUFFIXES = (".arrow", ".bin", ".gguf", ".npy", ".npz", ".parquet", ".pt", ".pth", ".safetensors")
LFS_MIN_SIZE = 10_000_000


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _is_lfs(path: str, sample: bytes, size: int) -> bool:
    # The Hub takes binary content through LFS only; a NUL byte near the start tells, as it does for git.
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > LFS_MIN_SIZE or b"\0" in sample[:512])


@dataclass(frozen=True)
class Blob:
    """The content of one file, kept in git or (`lfs`) beside it."""

    data: bytes
    lfs: bool

    @cached_property
    def etag(self) -> str:
        """What the client compares with its own file: the sha256 of LFS content, else git's hash."""
        return hashlib.sha256(self.data).hexdigest() if self.lfs else _git_oid(self.data)

    @cached_property
    def entry(self) -> dict[str, Any]:
        """Size and hashes in the tree API's words. To git, an LFS file is its three-line pointer."""
        size = len(self.data)
        if not self.lfs:
            return {"size": size, "oid": self.etag}
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.etag}\nsize {size}\n"
        lfs = {"oid": self.etag, "sha256": self.etag, "size": size, "pointerSize": len(pointer)}
        return {"size": size, "oid": _git_oid(pointer.encode()), "lfs": lfs}


@dataclass(frozen=True)
class Commit:
    """An immutable snapshot: every file of the repo at one moment."""

    sha: str
    parent: str | None
    title: str
    message: str
    date: str
    files: Mapping[str, Blob]


@dataclass
class Repo:
    kind: str  # "models", "datasets" or "spaces", as in the API's routes
    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # refs/heads/main, refs/tags/v1, refs/pr/1 -> sha
    lfs: dict[str, bytes] = field(default_factory=dict)  # by sha256: all that was uploaded, committed or not

    @property
    def owner(self) -> str:
        return self.id.split("/")[0]

    @property
    def path(self) -> str:
        """Where the repo is below the endpoint: models have no prefix."""
        return self.id if self.kind == "models" else f"{self.kind}/{self.id}"

    def ref(self, revision: str) -> str | None:
        names = (f"refs/heads/{revision}", f"refs/tags/{revision}", revision)
        return next((name for name in names if name in self.refs), None)

    def commit(self, revision: str) -> Commit:
        sha = self.refs.get(self.ref(revision) or "", revision)
        if sha not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]


@dataclass(frozen=True)
class Request:
    """A request as the log has it."""

    line: str  # method and whole URL
    status: int  # 0 for an upload that was dropped
    received: int
    sent: int
    agent: str = ""  # who asked, by its own words


@dataclass
class Fault:
    text: str
    times: int
    status: int | None = None
    after_bytes: int | None = None


@dataclass
class Call:
    """What a route gets to see of a request."""

    user: str | None
    query: Mapping[str, list[str]]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    def flag(self, name: str) -> bool:
        return self.query.get(name, ["false"])[0].lower() in ("1", "true")


@dataclass
class Reply:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object, status: int = 200) -> Reply:
        return cls(json.dumps(value).encode(), status, {"Content-Type": "application/json"})


class HubError(Exception):
    """Any answer but success. The client chooses its exception by `code`, the header X-Error-Code."""

    def __init__(self, status: int, message: str, code: str = "", **body: str) -> None:
        super().__init__(message)
        self.reply = Reply.of({"error": message, **body}, status)
        ascii_message = message.encode("ascii", "backslashreplace").decode()  # a file may be called λ.json
        self.reply.headers |= {"X-Error-Message": ascii_message, "X-Error-Code": code}


class HubServer:
    """The server, its repos, and its memory of what was asked.

    Tests seed and read back in Python, without a request: `add_repo`, `files`, `history`. What the client did
    is in `log`, `count` and `bytes_served`; `fail_next`, `drop_next_upload` and `drop_next_download` say what
    goes wrong next. All find requests by a text within `"METHOD URL"`: `"POST"`, `"/commit/"`, `hub.cdn_url`.
    """

    def __init__(self) -> None:
        self.tokens = {TOKEN: "me", OTHER_TOKEN: "other"}
        self.log: list[Request] = []
        self.collections: dict[str, dict[str, Any]] = {}
        self.lock = threading.RLock()
        self._repos: dict[tuple[str, str], Repo] = {}
        self._faults: list[Fault] = []
        # Never reset: a sha of an earlier test must not come back with other content, as clients cache by it.
        self._serial = itertools.count()
        self._servers: list[ThreadingHTTPServer] = []

    def start(self) -> HubServer:
        self.home = Path(tempfile.mkdtemp(prefix="hub-server-"))
        for routes in (HUB_ROUTES, CDN_ROUTES):
            handler = type("Handler", (_Handler,), {"hub": self, "routes": routes})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            self._servers.append(server)
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        return self

    def stop(self) -> None:
        while self._servers:
            server = self._servers.pop()
            server.shutdown()
            server.server_close()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> HubServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def environment(self) -> dict[str, str]:
        """What makes the client talk to this server only, whatever the developer's shell has set."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(self.home),
            "HF_HUB_CACHE": str(self.home / "hub"),
            "HF_DATASETS_CACHE": str(self.home / "datasets"),
            "HF_ASSETS_CACHE": str(self.home / "assets"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",  # where both are set, this one wins
        }

    def clear(self) -> None:
        """Forget repos, log and faults, and empty the client's caches on disk; the addresses stay."""
        with self.lock:
            for memory in (self._repos, self._faults, self.log, self.collections):
                memory.clear()
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(exist_ok=True)

    # Seeding and reading back, without HTTP

    def add_repo(
        self,
        repo_id: str,
        files: Mapping[str, bytes] | Path | str,
        *,
        revision: str = "main",
        repo_type: str = "model",
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """The sha of a new commit with exactly `files` (a mapping or a folder); repo and branch may be new.

        A private repo answers 401 to strangers and 404 to other users, the files of a gated one 401 and 403.
        """
        if not isinstance(files, Mapping):
            root = Path(files)
            files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        blobs = {path: Blob(data, _is_lfs(path, data, len(data))) for path, data in files.items()}
        key = (f"{repo_type}s", repo_id)
        with self.lock:
            repo = self._repos.setdefault(key, Repo(*key, private, gated))
            repo.lfs |= {blob.etag: blob.data for blob in blobs.values() if blob.lfs}
            ref = f"refs/heads/{revision}"
            return self._add_commit(repo, ref, repo.refs.get(ref), blobs, "Seed").sha

    def files(self, repo_id: str, revision: str = "main", repo_type: str = "model") -> dict[str, bytes]:
        commit = self._repos[f"{repo_type}s", repo_id].commit(revision)
        return {path: blob.data for path, blob in commit.files.items()}

    def history(self, repo_id: str, revision: str = "main", repo_type: str = "model") -> list[Commit]:
        """The commits that led to a revision, newest first."""
        repo = self._repos[f"{repo_type}s", repo_id]
        commits = [repo.commit(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(repo.commits[parent])
        return commits

    def _add_commit(
        self, repo: Repo, ref: str, parent: str | None, files: Mapping[str, Blob], title: str, text: str = ""
    ) -> Commit:
        sha = hashlib.sha1(f"{next(self._serial)} {repo.path} {ref}".encode()).hexdigest()
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        repo.commits[sha] = commit = Commit(sha, parent, title, text, date, dict(sorted(files.items())))
        repo.refs[ref] = sha
        return commit

    # Counting, and making things go wrong

    def count(self, text: str = "") -> int:
        with self.lock:
            return sum(text in request.line for request in self.log)

    def bytes_served(self, text: str = "") -> int:
        with self.lock:
            return sum(request.sent for request in self.log if text in request.line)

    def fail_next(self, text: str, status: int = 500, times: int = 1) -> None:
        """Answer the next `times` such requests with an error, and do nothing that they ask."""
        self._faults.append(Fault(text, times, status=status))

    def drop_next_upload(self, after_bytes: int = 0, times: int = 1) -> None:
        """Hang up on the next LFS uploads once `after_bytes` have come in, and keep nothing of them."""
        self._faults.append(Fault(f"PUT {self.cdn_url}", times, after_bytes=after_bytes))

    def drop_next_download(self, text: str = "GET ", after_bytes: int = 0, times: int = 1) -> None:
        """Hang up on the next such requests once `after_bytes` of the answer's body have gone out."""
        self._faults.append(Fault(text, times, after_bytes=after_bytes))

    def take_fault(self, line: str) -> Fault | None:
        with self.lock:
            fault = next((fault for fault in self._faults if fault.times > 0 and fault.text in line), None)
            if fault is not None:
                fault.times -= 1
            return fault

    # Who may do what

    def user(self, token: str | None) -> str | None:
        if token is not None and token not in self.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return None if token is None else self.tokens[token]

    def repo(self, call: Call, access: str, kind: str | None, repo_id: str) -> Repo:
        repo = self._repos.get((kind or "models", repo_id))
        if repo is not None and access == "signed":
            # As object stores do: the address is an authorisation already, and there may be only one.
            if call.user is not None:
                raise HubError(400, "The token must not leave the Hub's own origin")
            return repo
        if repo is None or (repo.private and call.user != repo.owner):
            # A private repo looks like one that does not exist, and the Hub asks strangers to log in first.
            raise HubError(404 if call.user else 401, "Repository not found", "RepoNotFound")
        if access == "write" and call.user != repo.owner:
            raise HubError(403 if call.user else 401, f"You don't have the rights to write to {repo_id}")
        return repo

    # Routes without a repo

    def whoami(self, call: Call) -> Reply:
        if call.user is None:
            raise HubError(401, "Invalid username or password.")
        return Reply.of({"type": "user", "name": call.user, "orgs": []})

    def create_repo(self, call: Call) -> Reply:
        kind, owner = call.json.get("type", "model") + "s", call.json.get("organization") or call.user
        if call.user is None or owner != call.user:
            raise HubError(403 if call.user else 401, f"You don't have the rights to create repos for {owner}")
        repo = Repo(kind, f"{owner}/{call.json['name']}", private=call.json.get("visibility") == "private")
        url = f"{self.url}/{repo.path}"
        if (kind, repo.id) in self._repos:
            raise HubError(409, f"You already created this repo: {repo.path}", url=url)
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        files = {".gitattributes": Blob(attributes.encode(), lfs=False)}
        self._add_commit(repo, "refs/heads/main", None, files, "initial commit")
        self._repos[kind, repo.id] = repo
        return Reply.of({"url": url, "name": repo.id, "id": repo.id})

    def create_collection(self, call: Call) -> Reply:
        if call.user is None or call.json["namespace"] != call.user:
            raise HubError(403 if call.user else 401, "You don't have the rights to create this collection")
        slug = f"{call.user}/{re.sub('[^a-z0-9]+', '-', call.json['title'].lower())}-{'0' * 24}"
        if slug in self.collections:
            raise HubError(409, "You already have a collection of this title", slug=slug)
        told = {key: call.json.get(key) for key in ("title", "description", "private")}
        fixed = {"owner": {"name": call.user}, "position": 0, "theme": "green", "upvotes": 0, "items": []}
        made = {"slug": slug, "lastUpdated": "2026-01-01T00:00:00.000Z", **fixed, **told}
        self.collections[slug] = made
        return Reply.of(made)

    def get_collection(self, call: Call, slug: str) -> Reply:
        if slug not in self.collections:
            raise HubError(404, "Collection not found")
        return Reply.of(self.collections[slug])

    def add_collection_item(self, call: Call, slug: str) -> Reply:
        collection, item = self.collections[slug], call.json["item"]
        if call.user is None or not slug.startswith(f"{call.user}/"):
            raise HubError(403 if call.user else 401, "You don't have the rights to change this collection")
        if (f"{item['type']}s", item["id"]) not in self._repos:
            raise HubError(404, f"{item['id']} not found", "RepoNotFound")
        note = {"note": {"text": call.json["note"], "html": ""}} if call.json.get("note") else {}
        place = len(collection["items"])
        collection["items"].append({"_id": f"{place:024}", "position": place, **item, **note})
        return Reply.of(collection)

    def validate_card(self, call: Call) -> Reply:
        card = _read_card(call.json["content"])
        if isinstance(card, str):
            return Reply.of({"errors": [{"message": card}], "warnings": []}, 400)
        warnings = [] if card else [{"message": "empty or missing yaml metadata in repo card"}]
        return Reply.of({"errors": [], "warnings": warnings})

    # Routes that read

    def repo_info(self, call: Call, repo: Repo, revision: str | None = None) -> Reply:
        commit = repo.commit(revision or "main")
        siblings = [{"rfilename": path} for path in commit.files]
        if call.flag("blobs"):
            siblings = [{"rfilename": p, **b.entry, "blobId": b.entry["oid"]} for p, b in commit.files.items()]
        card = _read_card(commit.files["README.md"].data.decode()) if "README.md" in commit.files else {}
        info = {
            "id": repo.id,
            "author": repo.owner,
            "sha": commit.sha,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "lastModified": commit.date,
            "createdAt": next(iter(repo.commits.values())).date,
            "tags": card.get("tags", []) if isinstance(card, dict) else [],
            "cardData": card if isinstance(card, dict) else {},
            "siblings": siblings,
        }
        return Reply.of(info)

    def refs(self, call: Call, repo: Repo) -> Reply:
        def listing(prefix: str) -> list[dict[str, str]]:
            found = [(ref, sha) for ref, sha in repo.refs.items() if ref.startswith(prefix)]
            return [{"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": sha} for ref, sha in found]

        kinds = {"branches": "refs/heads/", "tags": "refs/tags/", "pullRequests": "refs/pr/", "converts": "-"}
        return Reply.of({name: listing(prefix) for name, prefix in kinds.items()})

    def tree(self, call: Call, repo: Repo, revision: str, folder: str | None = None) -> Reply:
        prefix = f"{folder}/" if folder else ""
        inside = [e for e in _entries(repo.commit(revision)) if e["path"].startswith(prefix)]
        if folder and not inside:
            raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        if not call.flag("recursive"):
            inside = [e for e in inside if "/" not in e["path"].removeprefix(prefix)]
        return Reply.of(inside)

    def paths_info(self, call: Call, repo: Repo, revision: str) -> Reply:
        wanted = parse_qs(call.body.decode()).get("paths", [])
        return Reply.of([entry for entry in _entries(repo.commit(revision)) if entry["path"] in wanted])

    def resolve(self, call: Call, repo: Repo, revision: str, path: str) -> Reply:
        if repo.gated and call.user != repo.owner:
            raise HubError(403 if call.user else 401, f"Access to {repo.id} is restricted", "GatedRepo")
        commit = repo.commit(revision)
        if path not in commit.files:
            missing = HubError(404, "Entry not found", "EntryNotFound").reply
            missing.headers["X-Repo-Commit"] = commit.sha  # with it, the client remembers what is not there
            return missing
        blob = commit.files[path]
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if not blob.lfs:
            return Reply(blob.data, headers=headers)
        # The client takes hash and size from here, and goes on to the other origin without its token.
        headers |= {"X-Linked-ETag": f'"{blob.etag}"', "X-Linked-Size": str(len(blob.data))}
        return Reply(status=302, headers=headers | {"Location": self._blob_url(repo, blob.etag)})

    def _blob_url(self, repo: Repo, oid: str) -> str:
        return f"{self.cdn_url}/{repo.kind}/{repo.id}/{oid}"

    # Routes that write

    def create_branch(self, call: Call, repo: Repo, name: str) -> Reply:
        return self._create_ref(repo, f"refs/heads/{name}", call.json.get("startingPoint", "main"))

    def create_tag(self, call: Call, repo: Repo, revision: str) -> Reply:
        return self._create_ref(repo, f"refs/tags/{call.json['tag']}", revision)

    def _create_ref(self, repo: Repo, ref: str, revision: str) -> Reply:
        if ref in repo.refs:
            raise HubError(409, f"Reference already exists: {ref}")
        repo.refs[ref] = repo.commit(revision).sha
        return Reply.of({}, 201)

    def preupload(self, call: Call, repo: Repo, revision: str) -> Reply:
        present, answers = repo.commit(revision).files, []
        for file in call.json["files"]:
            path = file["path"]
            lfs = _is_lfs(path, base64.b64decode(file["sample"]), file["size"])
            # The hash of what is there now: if the new file has the same, the client does not commit it.
            oid = present[path].etag if path in present else None
            mode = "lfs" if lfs else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return Reply.of({"files": answers})

    def lfs_batch(self, call: Call, repo: Repo) -> Reply:
        objects = []
        for wanted in call.json["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in repo.lfs:  # without "actions" the client knows that it is stored already
                upload, verify = self._blob_url(repo, wanted["oid"]), f"{self.url}/{repo.path}.git/verify"
                answer["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(answer)
        return Reply.of({"transfer": "basic", "objects": objects})

    def lfs_verify(self, call: Call, repo: Repo) -> Reply:
        if call.json["oid"] not in repo.lfs:
            raise HubError(404, f"LFS object {call.json['oid']} was not uploaded")
        return Reply.of({})

    def create_commit(self, call: Call, repo: Repo, revision: str) -> Reply:
        ref, head = repo.ref(revision), repo.commit(revision)
        if ref is None or ref.startswith("refs/tags/"):
            raise HubError(400, f"Cannot commit to {revision}: it is not a branch or a pull request")
        header, *operations = (json.loads(line) for line in call.body.splitlines())
        title, message = header["value"]["summary"], header["value"]["description"]
        if header["value"].get("parentCommit", head.sha) != head.sha:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for operation in operations:
            _apply(repo, files, operation["key"], operation["value"])
        answer = {"success": True, "hookOutput": ""}
        if call.flag("create_pr"):
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.refs)
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.url}/{repo.path}/discussions/{number}"
        # The first change to the repo: a commit that was refused above has left no trace.
        sha = self._add_commit(repo, ref, head.sha, files, title, message).sha
        return Reply.of(answer | {"commitOid": sha, "commitUrl": f"{self.url}/{repo.path}/commit/{sha}"})

    # Routes of the second origin

    def cdn_get(self, call: Call, repo: Repo, oid: str) -> Reply:
        if oid not in repo.lfs:
            raise HubError(404, f"No LFS object {oid}")
        return Reply(repo.lfs[oid], headers={"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def cdn_put(self, call: Call, repo: Repo, oid: str) -> Reply:
        if hashlib.sha256(call.body).hexdigest() != oid:
            raise HubError(400, f"The content that came in does not have the sha256 {oid}")
        repo.lfs[oid] = call.body
        return Reply()


def _apply(repo: Repo, files: dict[str, Blob], key: str, value: Mapping[str, str]) -> None:
    """Carry out one line of a commit on `files`."""
    path = value["path"]
    if key == "file":
        files[path] = Blob(base64.b64decode(value["content"]), lfs=False)
    elif key == "lfsFile":
        if value["oid"] not in repo.lfs:
            raise HubError(400, f"{path} points to LFS object {value['oid']}, which was not uploaded")
        files[path] = Blob(repo.lfs[value["oid"]], lfs=True)
    elif key in ("deletedFile", "deletedFolder"):
        folder = path.rstrip("/") + "/"
        gone = [name for name in files if (name == path if key == "deletedFile" else name.startswith(folder))]
        if not gone:
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for name in gone:
            del files[name]
    else:
        raise HubError(400, f"Unknown operation in a commit: {key}")


def _entries(commit: Commit) -> list[dict[str, Any]]:
    """Every file and every folder, as the tree API lists them."""
    folders = {str(parent) for path in commit.files for parent in PurePosixPath(path).parents} - {"."}
    # git has an oid for a folder; the client wants one, and compares it with nothing.
    entries = [{"type": "directory", "path": path, "size": 0, "oid": _git_oid(path.encode())} for path in folders]
    entries += [{"type": "file", "path": path, **blob.entry} for path, blob in commit.files.items()]
    return sorted(entries, key=lambda entry: str(entry["path"]))


def _read_card(readme: str) -> dict[str, Any] | str:
    """The metadata on top of a model card, or what the Hub would say is wrong with it."""
    # Not in the standard library, so imported only when the first card comes in. The client needs it, too.
    import yaml

    match = re.match(r"---\r?\n(.*?)^---\s*$", readme, re.DOTALL | re.MULTILINE)
    try:
        metadata = (yaml.safe_load(match[1]) if match else None) or {}
    except yaml.YAMLError as error:
        return f"YAML Metadata Error: {error}"
    if not isinstance(metadata, dict):
        return "YAML Metadata Error: it is not a mapping"
    bases = metadata.get("base_model") or []
    for base in [bases] if isinstance(bases, str) else bases:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(base)):
            return f'"base_model" with value "{base}" is not valid. Use a model id from the Hub.'
    return metadata


_REPO = r"((?:[^/]+/)?[^/]+)"  # old repos have no namespace: `gpt2`
_API = rf"/api/(models|datasets|spaces)/{_REPO}"
_PAGE = rf"/(?:(datasets|spaces)/)?{_REPO}"
_BLOB = r"/(models|datasets|spaces)/([^/]+/[^/]+)/([0-9a-f]{64})"

# Method, pattern, answer, and the access to the repo that the pattern's first two groups name. The bare
# `_API` comes last, as it also matches the sub-routes of repos without a namespace.
Route = tuple[str, str, Callable[..., Reply], str]
HUB_ROUTES: list[Route] = [
    ("GET", "/api/whoami-v2", HubServer.whoami, "none"),
    ("POST", "/api/repos/create", HubServer.create_repo, "none"),
    ("POST", "/api/validate-yaml", HubServer.validate_card, "none"),
    ("POST", "/api/collections", HubServer.create_collection, "none"),
    ("GET", "/api/collections/([^/]+/[^/]+)", HubServer.get_collection, "none"),
    ("POST", "/api/collections/([^/]+/[^/]+)/items", HubServer.add_collection_item, "none"),
    ("GET", rf"{_API}/revision/([^/]+)", HubServer.repo_info, "read"),
    ("GET", rf"{_API}/refs", HubServer.refs, "read"),
    ("GET", rf"{_API}/tree/([^/]+)(?:/(.+))?", HubServer.tree, "read"),
    ("POST", rf"{_API}/paths-info/([^/]+)", HubServer.paths_info, "read"),
    ("GET", rf"{_PAGE}/resolve/([^/]+)/(.+)", HubServer.resolve, "read"),
    ("POST", rf"{_API}/branch/([^/]+)", HubServer.create_branch, "write"),
    ("POST", rf"{_API}/tag/([^/]+)", HubServer.create_tag, "write"),
    ("POST", rf"{_API}/preupload/([^/]+)", HubServer.preupload, "write"),
    ("POST", rf"{_PAGE}\.git/info/lfs/objects/batch", HubServer.lfs_batch, "write"),
    ("POST", rf"{_PAGE}\.git/verify", HubServer.lfs_verify, "write"),
    ("POST", rf"{_API}/commit/([^/]+)", HubServer.create_commit, "write"),
    ("GET", _API, HubServer.repo_info, "read"),
]
CDN_ROUTES: list[Route] = [
    ("GET", _BLOB, HubServer.cdn_get, "signed"),
    ("PUT", _BLOB, HubServer.cdn_put, "signed"),
]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer  # this and the routes are set on a subclass, since http.server makes the handlers
    routes: list[Route]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else Nagle and delayed acknowledgements make an answer 40 ms late

    def answer(self) -> None:
        origin = self.hub.url if self.routes is HUB_ROUTES else self.hub.cdn_url
        line = f"{self.command} {origin}{self.path}"
        fault = self.hub.take_fault(line)
        drop_after = fault.after_bytes if fault else None
        length = int(self.headers.get("Content-Length", 0))
        if drop_after is not None and self.command == "PUT":
            received = len(self.rfile.read(min(drop_after, length)))
            self.hub.log.append(Request(line, 0, received, 0))
            return self.hang_up()
        # All of it, even if the answer is an error: what is left would be taken for the next request.
        body = self.rfile.read(length)
        if fault and fault.status:
            reply = HubError(fault.status, "Injected by the test").reply
        elif "Transfer-Encoding" in self.headers:  # no client of ours sends chunks
            reply = HubError(411, "Content-Length is required").reply
            self.close_connection = True
        else:
            reply = self.dispatch(body)
        content = self.cut_to_range(reply)
        sent = b"" if self.command == "HEAD" else content[:drop_after]
        with self.hub.lock:  # before the answer is out, since a test may count as soon as its call returns
            agent = self.headers.get("User-Agent", "")
            self.hub.log.append(Request(line, reply.status, length, len(sent), agent))
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)
        return None if drop_after is None else self.hang_up()

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815 (http.server looks for these names)

    def dispatch(self, body: bytes) -> Reply:
        url = urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for route_method, pattern, route, access in self.routes:
                match = re.fullmatch(pattern, url.path)
                if match is None or method != route_method:
                    continue
                # Unquoted only now, since `refs%2Fpr%2F1` is one part of a path.
                parts: list[Any] = [part if part is None else unquote(part) for part in match.groups()]
                with self.hub.lock:
                    call = Call(self.hub.user(token), parse_qs(url.query), body)
                    if access != "none":
                        parts[:2] = [self.hub.repo(call, access, *parts[:2])]
                    return route(self.hub, call, *parts)
            raise HubError(404, f"This server has no route for {method} {url.path}")
        except HubError as error:
            return error.reply
        except (KeyError, ValueError) as error:  # not a 500, which clients would repeat for half a minute
            return HubError(400, f"Malformed request: {error!r}").reply

    def cut_to_range(self, reply: Reply) -> bytes:
        size = len(reply.body)
        match = re.fullmatch(r"bytes=(?=.*\d)(\d*)-(\d*)", self.headers.get("Range", ""))
        if match is None or "Accept-Ranges" not in reply.headers or reply.status != 200:
            return reply.body
        first, last = match.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(int(last) + 1, size) if first and last else size
        reply.status, span = (206, f"{start}-{stop - 1}") if start < stop else (416, "*")
        reply.headers["Content-Range"] = f"bytes {span}/{size}"
        return reply.body[start:stop]

    def hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):  # the client may have been faster
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: `HubServer.log` has it all."""
