"""Shards of a model that are uploaded one by one while it is written, and forgotten: one commit names them at the end.

In a shard's place a small file stays that tells what was uploaded, so that an interrupted push goes on after it.
"""

import base64
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_taskvec.atomic import write_text
from hf_taskvec.errors import HubError
from hf_taskvec.json_files import parse_json
from hf_taskvec.publishing.hub_commit import errors_in_words, open_branch
from hf_taskvec.publishing.privacy import check_file
from hf_taskvec.typed_values import typed

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_KIND = "uploaded by hf_taskvec"
_MOST = 2000  # bytes of what stays
_TRIES, _WAIT = 4, 1.0


@dataclass(frozen=True)
class UploadedShard:
    """What was uploaded: the content's sha256, its size and its first bytes."""

    kind: str
    sha256: str
    size: int
    sample: str


@dataclass
class ShardUploads:
    """Uploads shards as they are written.

    Args:
        api (`HfApi`):
            The client.
        repo_id (`str`):
            Where to.
        private (`bool`, *optional*):
            As in `push_folder`.
        revision (`str`, *optional*):
            The branch.
        create_pr (`bool`, *optional*, defaults to `False`):
            Whether the commit will be a pull request.
    """

    api: "HfApi"
    repo_id: str
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False
    _is_open: bool = False

    def take(self, path: Path) -> None:
        """Upload a shard and leave the note of it in its place.

        Raises:
            `LeakError`: If its header holds a token or a path.
            `HubError`: If the Hub does not take it, asked several times.
        """
        from huggingface_hub import CommitOperationAdd

        check_file(path, path.name)
        if not self._is_open:
            with errors_in_words(self.repo_id):
                open_branch(self.api, self.repo_id, self.private, self.revision)
            self._is_open = True
        shard = CommitOperationAdd(path.name, path)
        for number in range(_TRIES):
            try:
                with errors_in_words(self.repo_id):
                    self.api.preupload_lfs_files(
                        self.repo_id, [shard], revision=self.revision, create_pr=self.create_pr, num_threads=1
                    )
                break
            except HubError:
                if number == _TRIES - 1:
                    raise
                time.sleep(_WAIT * 2**number)
        if not shard._is_uploaded:  # too small for that: it goes with the commit
            return
        info = shard.upload_info
        sample = base64.b64encode(info.sample).decode()
        note = UploadedShard(_KIND, info.sha256.hex(), info.size, sample)
        write_text(path, json.dumps(vars(note)))


def uploaded_shard(path: Path) -> UploadedShard | None:
    """What stays of a shard that was uploaded; None for any other file."""
    if path.suffix != ".safetensors" or path.stat().st_size > _MOST:
        return None
    content = path.read_bytes()
    if not content.startswith(b'{"kind"'):  # safetensors begin with a number
        return None
    found = typed(UploadedShard, parse_json(content.decode("utf-8", "replace"), path.name))
    return found if found.kind == _KIND else None


def uploaded_additions(
    api: "HfApi", repo_id: str, revision: str | None, shards: Mapping[str, UploadedShard]
) -> Iterator["CommitOperationAdd"]:
    """The operations that add what was uploaded before."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.lfs import UploadInfo

    if not shards:
        return
    there = {
        each.path: each.lfs.sha256
        for each in api.get_paths_info(repo_id, list(shards), revision=revision)
        if isinstance(each, RepoFile) and each.lfs is not None
    }
    for name, shard in shards.items():
        addition = CommitOperationAdd(name, b"")
        addition.upload_info = UploadInfo(
            size=shard.size, sample=base64.b64decode(shard.sample), sha256=bytes.fromhex(shard.sha256)
        )
        addition._upload_mode, addition._is_uploaded, addition._should_ignore = "lfs", True, False
        addition._remote_oid = there.get(name)  # the same content makes no commit
        yield addition
