"""What commands share: options, results as text or JSON, dry runs, and the record of the command beside its output."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_taskvec._version import __version__
from hf_taskvec.errors import BadValueError, MissingFileError, OutputError

if TYPE_CHECKING:
    from hf_taskvec.algebra.task_vector import TaskVector
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be read and written, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Token = Annotated[str | None, typer.Option("--token", metavar="TOKEN", help="Hub token; by default that of the login.")]
Scale = Annotated[float | None, typer.Option("--scale", help="λ; 1 by default.")]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FOLDER", help="A sweep's report: take the λ it chose.")
]
_SECRET_OPTIONS = ("--token",)
STREAMING = 100_000_000  # bytes that a streamed pass holds, at most about: measured, for models of any size


def register(app: typer.Typer, panel: str, commands: Mapping[str, Callable[..., None]]) -> None:
    """Add commands to the application, under one heading of its help."""
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(_interruptible(command))


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, but Ctrl-C ends it with the exit code that shells expect."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            typer.echo("taskvec: interrupted. Finished parts are kept where a run can be resumed.", err=True)
            sys.exit(130)

    return run


# Results.


@dataclass
class Result:
    """What a command has to say: values for scripts, lines and tables for people."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def show(self, as_json: bool) -> None:
        if as_json:
            typer.echo(json.dumps(self.values, ensure_ascii=False, indent=1))
            return
        for line in self.lines:
            typer.echo(line)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as text, drawn by rich; it is as wide as the terminal, or 100 columns without one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        drawn.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 100)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join([title, *(line.rstrip() for line in captured.get().rstrip().splitlines())])


def size(nbytes: float) -> str:
    """
    >>> size(2_840_000_000)
    '2.84 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


# The command, beside its output.


@dataclass
class Running:
    """The command that this process runs."""

    arguments: list[str] = field(default_factory=list)


running = Running()


def remember(output: Path) -> None:
    """Store the command that is running beside what it wrote, so that it can be run again. Tokens are left out."""
    from hf_taskvec.publishing.privacy import without_secrets
    from hf_taskvec.publishing.written_folder import COMMAND

    path = output / COMMAND if output.is_dir() else output.with_name(f"{output.name}.command.json")
    try:
        earlier = json.loads(path.read_text("utf-8"))["commands"]
    except (OSError, ValueError, LookupError, TypeError):
        earlier = []
    command = ["taskvec", *(without_secrets(each) for each in _without_options(running.arguments))]
    commands = [each for each in earlier if each != command] + [command]
    text = json.dumps({"hf_taskvec": __version__, "commands": commands}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", "utf-8")


def _without_options(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for each in arguments:
        if skip:
            skip = False
        elif each in _SECRET_OPTIONS:
            skip = True
        elif not each.startswith(tuple(f"{option}=" for option in _SECRET_OPTIONS)):
            kept.append(each)
    return kept


# Dry runs.


@dataclass
class Plan:
    """What a command would do: the answer to --dry-run."""

    reads: dict[str, int | None] = field(default_factory=dict)
    writes: dict[str, int | None] = field(default_factory=dict)
    memory: int = 0
    notes: list[str] = field(default_factory=list)

    def result(self, output: Path | None) -> Result:
        free = shutil.disk_usage(next(p for p in output.absolute().parents if p.exists())).free if output else None
        values: dict[str, Any] = {"dry_run": True, "reads": self.reads, "writes": self.writes, "memory": self.memory}
        lines = ["Dry run: nothing is written."]
        lines += [f"  read   {name}: {_size(nbytes)}" for name, nbytes in self.reads.items()]
        lines += [f"  write  {name}: {_size(nbytes)}" for name, nbytes in self.writes.items()]
        lines.append(f"  memory about {size(self.memory)}, besides Python and torch themselves (about 0.5 GB)")
        if free is not None:
            values["disk_free"] = free
            lines.append(f"  disk   {size(free)} free")
        if self.notes:
            values["notes"] = self.notes
            lines += [f"  note   {note}" for note in self.notes]
        return Result(values, lines)


def _size(nbytes: int | None) -> str:
    return "size not known before" if nbytes is None else size(nbytes)


def weights_size(where: str, token: str | None = None) -> int | None:
    """The bytes of the weights of a folder or a Hub repository; nothing is downloaded."""
    folder = Path(where)
    if folder.is_dir():
        found = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")]
        return sum(path.stat().st_size for path in found)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    from hf_taskvec.hub_names import split_revision

    name, revision = split_revision(where, None)
    try:
        info = HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    except (HTTPError, HFValidationError, ConnectionError) as error:
        raise MissingFileError(
            f"{where!r} is neither a folder here nor a repository that the Hub gave ({type(error).__name__})."
        ) from None
    return sum(s.size or 0 for s in info.siblings or () if s.rfilename.endswith((".safetensors", ".bin")))


# Inputs.


def load_vector(where: str, name: str | None = None, token: str | None = None) -> "TaskVector":
    """A saved task vector, or that of a LoRA adapter, from a folder or the Hub."""
    from hf_taskvec.extraction.from_any import open_vector

    return open_vector(where, name=name, token=token)


def named_paths(given: Sequence[str]) -> dict[str, str]:
    """`NAME=PATH` arguments as a mapping. A path alone is named by its last part."""
    from hf_taskvec.algebra.provenance import label_for

    found: dict[str, str] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals:
            name, path = label_for(each.partition("@")[0]), each
        if not name.isidentifier():
            raise BadValueError(f"{name!r} cannot name a vector: use letters, digits and _, as in hp1=path/to/vector.")
        if name in found:
            raise BadValueError(f"two vectors are called {name!r}. Name them apart: NAME=PATH.")
        found[name] = path
    return found


def chosen_scale(scale: float | None, report_folder: Path | None) -> "tuple[float, UnlearningReport | None]":
    """λ: as given, else as the report chose it, else 1."""
    if report_folder is None:
        return (1.0 if scale is None else scale), None
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

    report = UnlearningReport.load(report_folder)
    if scale is not None:
        return scale, report
    if report.choice is None or report.choice.scale is None:
        reason = report.choice.reason if report.choice is not None else "no book is marked as one to forget"
        raise BadValueError(f"the report chose no λ ({reason}). Choose one yourself with --scale.")
    if report.choice.scale == 0:
        raise BadValueError(
            f"the report chose λ=0, the model as it is: {report.choice.reason}. To edit it all the same, pass --scale."
        )
    return report.choice.scale, report


def numbers(text: str) -> list[float]:
    """λ from `0,-0.2,-0.4` or `0:-1:-0.2` (both ends included).

    >>> numbers("0:-1:-0.25")
    [0.0, -0.25, -0.5, -0.75, -1.0]
    """
    try:
        if ":" in text:
            start, stop, step = (float(part) for part in text.split(":"))
            count = round((stop - start) / step)
            if step == 0 or count < 0 or count > 1000:
                raise ValueError
            return [round(start + step * k, 12) + 0.0 for k in range(count + 1)]
        return [float(part) for part in re.split(r"[,\s]+", text.strip()) if part]
    except (ValueError, ZeroDivisionError):
        raise BadValueError(f"{text!r} is no list of λ. Write it like 0,-0.2,-0.4 or 0:-1:-0.2.") from None


def check_output(output: Path, marker: str, overwrite: bool) -> None:
    """The library's own check, before any long work; its advice is worded for the command line."""
    from hf_taskvec.files.output_folder import check_replaceable

    try:
        check_replaceable(output.resolve(), marker, overwrite)
    except OutputError as error:
        raise OutputError(str(error).replace("overwrite=True", "--overwrite")) from None


def listed(mapping: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    """The largest entries first."""
    return sorted(mapping.items(), key=lambda item: -abs(item[1]))[:most]
