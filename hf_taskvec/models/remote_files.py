"""Files of tensors on the Hub that are not downloaded: of each tensor its byte range, when it is used.

A tensor that is read lies in a temporary file without a name, mapped, and is gone when nobody uses it any more. So
neither memory nor disk holds a model, and what mapped files of this machine give is given here, bit for bit.
"""

import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from hf_taskvec.algebra.sources import sampled_places
from hf_taskvec.errors import CorruptFileError, HubError, MissingFileError
from hf_taskvec.filenames import WEIGHTS, WEIGHTS_INDEX
from hf_taskvec.hub_client import hub_api, hub_headers
from hf_taskvec.models.locations import Location
from hf_taskvec.models.tensor_files import StoredTensor, TensorFile, open_shards

# Bytes that are asked for at a time, how often, and how long is waited before the second time.
_PIECE, _TRIES, _WAIT = 1 << 23, 6, 0.5
_MOST_HEADER = 100_000_000  # what safetensors itself accepts
# Requests at a time, where they are many and small.
_AT_ONCE = 16
# Tensors that are kept for the next rows of them; each is on the disk, not in memory.
_KEPT = 6


@dataclass(frozen=True)
class HubFile:
    """A file on the Hub at one commit, to be read by byte range."""

    repository: str
    commit: str
    name: str
    size: int
    #: of its content, if the Hub tells it
    sha256: str | None
    token: str | bool | None = None

    def read(self, start: int, stop: int) -> bytes:
        """Its bytes `start:stop`. What is dropped on the way is asked for again.

        Raises:
            `HubError`: If the Hub does not give them.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError, HTTPError
        from huggingface_hub.utils import get_session, hf_raise_for_status

        url = hf_hub_url(self.repository, self.name, revision=self.commit)
        headers = {**hub_headers(self.token), "Range": f"bytes={start}-{stop - 1}"}
        reason = ""
        for number in range(_TRIES):
            if number:
                time.sleep(_WAIT * 2 ** (number - 1))
            try:
                answer = get_session().get(url, headers=headers, follow_redirects=True, timeout=60)
                hf_raise_for_status(answer)
            except HfHubHTTPError as error:
                reason = f"{error.response.status_code}"
                if error.response.status_code < 500 and error.response.status_code not in (408, 429):
                    break
            except (HTTPError, ConnectionError, TimeoutError) as error:
                reason = type(error).__name__
            else:
                if len(answer.content) == stop - start:
                    return answer.content
                reason = f"{len(answer.content)} bytes in place of {stop - start}"
        raise HubError(
            f"the Hub did not give a part of {self.name} of {self.repository} ({reason}). Run the same again: what was "
            "uploaded is kept."
        )


class RemoteFile(TensorFile):
    """A safetensors file on the Hub; of it the header is read.

    Args:
        hub_file (`HubFile`):
            The file.
    """

    def __init__(self, hub_file: HubFile) -> None:
        self._hub_file = hub_file
        length = int.from_bytes(hub_file.read(0, min(8, hub_file.size)), "little") if hub_file.size >= 8 else 0
        if not 2 <= length <= min(_MOST_HEADER, hub_file.size - 8):
            raise CorruptFileError(f"{hub_file.name} of {hub_file.repository} is damaged or not a safetensors file.")
        header = b"".join(
            hub_file.read(start, min(start + _PIECE, 8 + length)) for start in range(0, 8 + length, _PIECE)
        )
        # The library checks the header against the file: here against one of that size, with nothing in it.
        with tempfile.TemporaryDirectory(prefix="taskvec-") as folder:
            path = Path(folder) / Path(hub_file.name).name
            with path.open("wb") as file:
                file.write(header)
                file.truncate(hub_file.size)
            super().__init__(path, Location(hub_file.repository, hub_file.commit))
        self._starts = _starts(header)
        self._samples: dict[str, bytes] = {}
        known = hub_file.sha256 or f"{hub_file.repository}@{hub_file.commit}/{hub_file.name}"
        self.stamp = known
        self._identity = ("hub", known)  # type: ignore[assignment]

    @property
    @override
    def digest(self) -> str | None:
        return self._hub_file.sha256

    @override
    def _check_unchanged(self) -> None:
        """A commit does not change."""

    @override
    def tensor(self, name: str) -> torch.Tensor:
        key = (self.stamp, name)
        with _lock:
            mine = _fetching.setdefault(key, threading.Lock())
        with mine:
            with _lock:
                if key in _kept:
                    _kept.move_to_end(key)
                    return _kept[key]
            found = self._fetch(name)
            with _lock:
                _kept[key] = found
                while len(_kept) > _KEPT:
                    _kept.popitem(last=False)
                _fetching.pop(key, None)
            return found

    def _fetch(self, name: str) -> torch.Tensor:
        shape, dtype = self.header(name)
        assert isinstance(dtype, torch.dtype)
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        start, nbytes = self._starts[name], count * dtype.itemsize
        with tempfile.NamedTemporaryFile(prefix="taskvec-") as file:
            for at in range(0, nbytes, _PIECE):
                file.write(self._hub_file.read(start + at, start + min(at + _PIECE, nbytes)))
            file.flush()
            return torch.from_file(file.name, shared=False, size=count, dtype=dtype).view(shape)

    @override
    def sampled(self, name: str) -> bytes:
        if not self._samples:  # those of all tensors will be asked for
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                self._samples.update(zip(self.names, pool.map(self._sampled, self.names), strict=True))
        return self._samples[name]

    def _sampled(self, name: str) -> bytes:
        shape, dtype = self.header(name)
        start, count = self._starts[name], torch.Size(shape).numel()
        size = dtype.itemsize if isinstance(dtype, torch.dtype) else 1
        places = [(a, b) for a, b in sampled_places(count, size) if a < b]
        if count * size <= _PIECE >> 6:  # in one go
            whole = self._hub_file.read(start, start + count * size) if count else b""
            return b"".join(whole[a:b] for a, b in places)
        return b"".join(self._hub_file.read(start + a, start + b) for a, b in places)

    def __reduce__(self) -> "tuple[type[RemoteFile], tuple[HubFile]]":  # type: ignore[override]
        """Pickled as where it is; without the token, which whoever unpickles it has or has not."""
        at = self._hub_file
        return RemoteFile, (HubFile(at.repository, at.commit, at.name, at.size, at.sha256),)


_lock = threading.Lock()
_fetching: dict[tuple[str, str], threading.Lock] = {}
_kept: "OrderedDict[tuple[str, str], torch.Tensor]" = OrderedDict()


def _starts(header: bytes) -> dict[str, int]:
    """Where each tensor begins in the file; the library has checked the header."""
    from hf_taskvec.json_files import parse_json

    told = parse_json(header[8:].decode("utf-8"), "a header of safetensors")
    return {name: len(header) + each["data_offsets"][0] for name, each in told.items() if name != "__metadata__"}


def open_remote(folder: Path, repository: str, commit: str, token: str | bool | None) -> dict[str, StoredTensor]:
    """All tensors of a model on the Hub, of which the headers are read.

    Args:
        folder (`Path`):
            The repository's small files, among them the index of its shards.
        repository (`str`):
            Its id.
        commit (`str`):
            The commit.
        token (`str` or `bool`, *optional*):
            For private repositories.

    Raises:
        `MissingFileError`: If it has no weights in safetensors.
        `CorruptFileError`: If index and shards do not belong together.
        `HubError`: If the Hub does not give the headers.
    """
    info = hub_api(token).model_info(repository, revision=commit, files_metadata=True)
    files: Mapping[str, HubFile] = {
        each.rfilename: HubFile(
            repository, commit, each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None, token
        )
        for each in info.siblings or ()
    }
    if WEIGHTS in files:
        file = RemoteFile(files[WEIGHTS])
        return {name: StoredTensor(file, name) for name in file.names}
    if WEIGHTS_INDEX not in files:
        raise MissingFileError(
            f"{repository} has no weights in safetensors, and others cannot be read by byte range. Download them: "
            "leave out stream=True and push_to=, and push the output."
        )
    return open_shards(folder / WEIGHTS_INDEX, files.keys(), lambda shard: RemoteFile(files[shard]))
