"""Reading a changed file many times: each time the right result or one of our errors, soon and in little memory."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fuzzing.formats import Bytes, Format
from fuzzing.mutations import Edit, damaged, draw, edited

from hf_taskvec.errors import TaskVectorError

CPU_SECONDS = 1.0
SECONDS = 30.0
MEGABYTES = 200


class MeaninglessError(Exception):
    """Raised by what tells the right result: there is none, the file has to be refused."""


@dataclass(frozen=True)
class AnyOf:
    """Several results, each of which is right."""

    results: tuple[Any, ...]


class TookTooLongError(BaseException):
    """Not an `Exception`, so that no reader takes it for its own."""


@dataclass(frozen=True)
class Target:
    """A file that the package reads.

    Args:
        name (`str`):
            What reports call it.
        readers (`tuple[str, ...]`):
            The functions of the package that read it, as `module:function`.
        file (`str`):
            Its name in the folder.
        format (`Format`):
            How it is taken apart.
        make (`Callable`):
            Writes a folder with the valid file into an empty folder.
        read (`Callable`):
            Reads the folder and returns what was found, as plain values and tensors.
        expected (`Callable`, *optional*):
            What reading a changed file should find, worked out by other means from the document (or from the bytes, if
            they were damaged) and the folder; raises `MeaninglessError` for a file that must be refused. Without it
            nothing but the valid file's result is right.
        seal (`Callable`, *optional*):
            The document with its checksums made right again, so that a change reaches what is behind them.
        share (`float`, *optional*):
            How many cases of all it gets, relative to others.
        by_bytes (`float`, *optional*):
            The share of the cases that damage bytes instead of changing the document.
        writes (`bool`, *optional*):
            Whether reading changes the folder, which then is made anew for each case.
    """

    name: str
    readers: tuple[str, ...]
    file: str
    format: Format
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    expected: Callable[[Any, Path], Any] | None = None
    seal: Callable[[Any], Any] | None = None
    share: float = 1.0
    by_bytes: float = 0.15
    writes: bool = False


@dataclass(frozen=True)
class Fault:
    """A case that went wrong, as small as it could be made."""

    target: str
    seed: int
    number: int
    change: str
    problem: str

    def __str__(self) -> str:
        return f"{self.target} case {self.number} of seed {self.seed}: {self.change}\n    {self.problem}"


@dataclass
class Outcome:
    """How the cases of a target ended."""

    target: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        told = ", ".join(f"{self.counts[kind]} {kind}" for kind in ("refused", "harmless", "followed", "wrong"))
        return f"{self.target}: {self.cases} cases, {told}; {self.seconds:.1f} s"


class Fuzzer:
    """A valid file, and what becomes of reading it when it is changed."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.valid, self.work = target, folder / "valid" / "folder", folder / "work" / "folder"
        self.outside = folder / "work" / "outside.json"
        self.valid.mkdir(parents=True)
        target.make(self.valid)
        self.content = (self.valid / target.file).read_bytes()
        self.document = target.format.parse(self.content)
        shutil.copytree(self.valid, self.work)
        self.outside.write_text('{"outside": "nobody may read or write this"}')
        self.right = target.read(self.work)
        self.anew()
        assert self.right is not None
        again = target.read(self.work)
        assert same(self.right, again), f"{target.name}: reading the valid file twice gives two results"

    def run(self, count: int, seed: int = 0, first: int = 0) -> Outcome:
        """The outcome of so many cases."""
        outcome = Outcome(self.target.name)
        begin = time.perf_counter()
        with bounded_memory():
            for number in range(first, first + count):
                kind, fault = self.case(seed, number)
                outcome.counts[kind] += 1
                if fault:
                    outcome.faults.append(fault)
        assert self.outside.read_text().startswith('{"outside"'), f"{self.target.name} wrote outside its folder"
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def case(self, seed: int, number: int) -> tuple[str, Fault | None]:
        """One case, known by its numbers."""
        source = random.Random(f"{self.target.name}/{seed}/{number}")
        if isinstance(self.target.format, Bytes) or source.random() < self.target.by_bytes:
            content, change = damaged(self.content, source, self.target.format.head)
            kind, problem = self._outcome(content, None)
            return kind, Fault(self.target.name, seed, number, change, problem) if problem else None
        edits = draw(self.document, source, self.target.format.extra)
        sealed = self.target.seal is not None and source.random() < 0.9
        kind, problem = self._edited(edits, sealed)
        if problem is None:
            return kind, None
        for edit in edits if len(edits) > 1 else ():
            _, smaller = self._edited([edit], sealed)
            if smaller is not None:
                edits, problem = [edit], smaller
                break
        return kind, Fault(self.target.name, seed, number, "; ".join(map(str, edits)), problem)

    def _edited(self, edits: Sequence[Edit], sealed: bool) -> tuple[str, str | None]:
        document = edited(self.document, edits)
        if sealed and self.target.seal is not None:
            document = self.target.seal(document)
        return self._outcome(self.target.format.build(document, self.content), document)

    def anew(self) -> None:
        """Make the folder as it was, if reading changes it."""
        if self.target.writes:
            shutil.rmtree(self.work)
            shutil.copytree(self.valid, self.work)

    def _outcome(self, content: bytes, document: Any) -> tuple[str, str | None]:
        """`refused`, `harmless`, `followed` or `wrong`, and what was wrong."""
        self.anew()
        path = self.work / self.target.file
        part = path.with_name("new.part")
        part.write_bytes(content)
        part.replace(path)  # a new file: the old one may still be mapped
        forget_peak()
        try:
            with limited_time():
                found = self.target.read(self.work)
        except TaskVectorError as error:
            found = None
            verdict: tuple[str, str | None] = ("refused", None if str(error) else "an error without a word")
        except TookTooLongError as error:
            return "wrong", f"took too long: {error}"
        except (Exception, RecursionError, MemoryError) as error:
            last = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in last if "hf_taskvec" in frame.filename] or last
            where = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"
            return "wrong", f"{type(error).__name__}: {str(error)[:200]} ({where})"
        else:
            verdict = ("", None)
        if verdict[1] is None and (peak := peak_megabytes()) > MEGABYTES:
            return "wrong", f"took {peak} MB"
        return verdict if verdict[0] else self._judged(found, content, document)

    def _judged(self, found: Any, content: bytes, document: Any) -> tuple[str, str | None]:
        if same(found, self.right):
            return "harmless", None
        if self.target.expected is None:
            return "wrong", f"gave another result: {difference(found, self.right)}"
        try:
            expected = self.target.expected(content if document is None else document, self.work)
        except MeaninglessError as error:
            return "wrong", f"was accepted: {error}; {difference(found, self.right)}"
        results = expected.results if isinstance(expected, AnyOf) else (expected,)
        if not any(same(found, result) for result in results):
            return "wrong", f"gave a wrong result: {difference(found, results[0])}"
        return "followed", None


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal: true is not 1 and "1" is not 1, but 1 is 1.0."""
    return difference(one, other) is None


def difference(one: Any, other: Any) -> str | None:
    """Where two results first differ, if they do."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype}{list(one.shape)} instead of {other.dtype}{list(other.shape)}"
        if one.dtype == torch.float64:
            equal = torch.allclose(one, other, rtol=1e-9, atol=1e-300, equal_nan=True)
        else:
            equal = torch.equal(
                one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
            )
        return None if equal else "other numbers"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"keys {sorted(map(str, one.keys() ^ other.keys()))[:4]}"
        pairs: Iterator[tuple[Any, Any, Any]] = ((key, one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{len(one)} items instead of {len(other)}"
        pairs = ((key, *both) for key, both in enumerate(zip(one, other, strict=True)))
    else:
        number = isinstance(one, int | float) and isinstance(other, int | float)
        if number and isinstance(one, bool) == isinstance(other, bool):
            return None if one == other or (one != one and other != other) else f"{one!r} instead of {other!r}"
        equal = type(one) is type(other) and one == other
        return None if equal else f"{_told(one)} instead of {_told(other)}"
    for key, left, right in pairs:
        if inner := difference(left, right):
            return f"{key}: {inner}"
    return None


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:100]}…"


@contextmanager
def limited_time() -> Iterator[None]:
    """Ends what takes more than a second of processor time, or half a minute of any."""

    def stop(number: int, frame: FrameType | None) -> None:
        where = f" in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame else ""
        raise TookTooLongError(f"{CPU_SECONDS if number == signal.SIGPROF else SECONDS} s{where}")

    before = signal.signal(signal.SIGPROF, stop), signal.signal(signal.SIGALRM, stop)
    # Again and again: what is raised in a callback of the interpreter's own is lost.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS, 0.1)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


@contextmanager
def bounded_memory(more: int = 2 << 30) -> Iterator[None]:
    """Addresses for so many more bytes only: what asks for a terabyte gets a MemoryError, not the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_before = 0


def forget_peak() -> None:
    """Measure the peak of memory from here."""
    global _before
    Path("/proc/self/clear_refs").write_text("5")
    _before = _status("VmHWM")


def peak_megabytes() -> int:
    """How much memory was added at most since `forget_peak`."""
    return (_status("VmHWM") - _before) // 1024


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
