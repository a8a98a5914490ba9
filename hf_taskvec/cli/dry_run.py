"""What a command would read and write: the answer to `--dry-run`."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_taskvec.cli.results import CommandResult
from hf_taskvec.errors import MissingFileError
from hf_taskvec.hub_names import split_revision
from hf_taskvec.sizes import file_size

#: bytes that a streamed pass holds, at most about: measured, for models of any size
STREAMING_MEMORY = 100_000_000


@dataclass
class DryRun:
    """What a command would do. A size of `None` is not known before.

    Args:
        reads (`dict[str, int | None]`):
            The bytes of what is read.
        writes (`dict[str, int | None]`):
            The bytes of what is written.
        memory (`int`):
            The memory that it takes, in bytes, besides Python and torch themselves.
        notes (`list[str]`):
            Anything else that is worth knowing.
    """

    reads: dict[str, int | None] = field(default_factory=dict)
    writes: dict[str, int | None] = field(default_factory=dict)
    memory: int = 0
    notes: list[str] = field(default_factory=list)

    def result(self, output: Path | None) -> CommandResult:
        """The answer, with the free space of the disk that `output` would be on."""
        free = shutil.disk_usage(next(p for p in output.absolute().parents if p.exists())).free if output else None
        values: dict[str, Any] = {"dry_run": True, "reads": self.reads, "writes": self.writes, "memory": self.memory}
        lines = ["Dry run: nothing is written."]
        lines += [f"  read   {name}: {_size(nbytes)}" for name, nbytes in self.reads.items()]
        lines += [f"  write  {name}: {_size(nbytes)}" for name, nbytes in self.writes.items()]
        lines.append(f"  memory about {file_size(self.memory)}, besides Python and torch themselves (about 0.5 GB)")
        if free is not None:
            values["disk_free"] = free
            lines.append(f"  disk   {file_size(free)} free")
        if self.notes:
            values["notes"] = self.notes
            lines += [f"  note   {note}" for note in self.notes]
        return CommandResult(values, lines)


def _size(nbytes: int | None) -> str:
    return "size not known before" if nbytes is None else file_size(nbytes)


def weights_size(where: str, token: str | None = None) -> int | None:
    """The bytes of the weights of a folder or a Hub repository; nothing is downloaded."""
    folder = Path(where)
    if folder.is_dir():
        found = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")]
        return sum(path.stat().st_size for path in found)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    name, revision = split_revision(where)
    try:
        info = HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    except (HTTPError, HFValidationError, ConnectionError) as error:
        raise MissingFileError(
            f"{where!r} is neither a folder here nor a repository that the Hub gave ({type(error).__name__})."
        ) from None
    return sum(s.size or 0 for s in info.siblings or () if s.rfilename.endswith((".safetensors", ".bin")))
