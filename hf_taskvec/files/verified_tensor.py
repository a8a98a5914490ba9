"""Tensors of a saved task vector, checked against what its record says."""

import threading
from dataclasses import dataclass, field

import torch

from hf_taskvec.algebra.digests import tensor_digest
from hf_taskvec.algebra.sources import Source
from hf_taskvec.errors import ChangedSourceError, CorruptFileError
from hf_taskvec.models.tensor_files import StoredTensor


class _Checked:
    """Whether something was checked; one thread does it, and others wait. A copy knows nothing."""

    def __init__(self) -> None:
        self.lock, self.done = threading.Lock(), False

    def __reduce__(self) -> "tuple[type[_Checked], tuple[()]]":
        return _Checked, ()


@dataclass(frozen=True)
class VerifiedTensor(Source):
    """A stored tensor that is checked against its recorded digest when it is first read."""

    stored: StoredTensor
    digest: str
    is_reference: bool = False
    _checked: _Checked = field(default_factory=_Checked, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.stored.dtype

    @property
    def identity(self) -> str:
        """The recorded digest."""
        return self.digest

    @property
    def handle(self) -> str:
        """The stored tensor's, with the digest that it must have."""
        return f"{self.stored.handle}|{self.digest}"

    def read(self) -> torch.Tensor:
        """The tensor; an error if its content is not what was recorded."""
        tensor = self.stored.read()
        with self._checked.lock:
            if not self._checked.done and tensor_digest(tensor, self.digest) != self.digest:
                raise changed_tensor(self.stored.name, self.stored.file.path.name, self.is_reference)
            self._checked.done = True
        return tensor


def changed_tensor(name: str, file: str, is_reference: bool) -> ChangedSourceError | CorruptFileError:
    """The error for a tensor that is not what the vector's record says, to be raised by the caller."""
    if is_reference:
        return ChangedSourceError(
            f"{name} in {file} is not what it was when this task vector was saved as a reference: the model changed "
            "since. Use the revision that the vector was made from, or extract it again."
        )
    return CorruptFileError(
        f"{name} in {file} does not match its checksum: the file is damaged. Download or save the vector again."
    )
