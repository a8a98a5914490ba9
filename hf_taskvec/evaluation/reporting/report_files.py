"""Reports as files: a JSON of the report's fields under a schema and a version, and beside it a page and plots.

What is in a report, its dataclass declares; how it is stored, its `ReportFormat` does. `report.json` and `audit.json`
are written and read here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hf_taskvec import atomic
from hf_taskvec.errors import BadValueError, CorruptFileError, MissingFileError
from hf_taskvec.evaluation.texts.protocols import with_later_fields
from hf_taskvec.figures import render
from hf_taskvec.json_files import read_json
from hf_taskvec.typed_values import typed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ReportT = TypeVar("ReportT")


@dataclass(frozen=True)
class ReportFormat:
    """How a kind of report is stored.

    Args:
        schema (`str`):
            What the file says that it is.
        version (`int`):
            Goes up whenever a field changes its meaning.
        json, markdown (`str`):
            The names of the file, and of the page beside it.
        noun (`str`):
            What errors call the report.
        maker (`str`):
            What is to be run again if it is damaged.
        upgrades (`Mapping[int, Callable]`, *optional*):
            For each earlier version that can be read, what brings its fields into those of today.
        later (`Mapping[str, Any]`, *optional*):
            Fields that files of this version may lack, and what it means if they do.
    """

    schema: str
    version: int
    json: str
    markdown: str
    noun: str
    maker: str
    upgrades: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    later: Mapping[str, Any] = field(default_factory=dict)


class _Shown(Protocol):
    def to_dict(self) -> dict[str, Any]: ...
    def to_markdown(self) -> str: ...


@dataclass(frozen=True)
class _Head:
    """What a file says of itself."""

    schema: str
    version: int


def report_to_dict(report: Any, form: ReportFormat) -> dict[str, Any]:
    """The report's fields in their order, after the schema and the version; a protocol with its hash."""
    body = {each.name: _plain(getattr(report, each.name)) for each in fields(report)}
    if "protocol" in body:  # a benchmark has several, one for each of its parts
        body["protocol"] = report.protocol.to_dict()
    return {"schema": form.schema, "version": form.version, **body}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def report_to_json(report: _Shown) -> str:
    """The text of the report's file."""
    return json.dumps(report.to_dict(), ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def save_report(
    report: _Shown,
    form: ReportFormat,
    output: str | Path,
    figures: "Callable[[], dict[str, Figure]] | None" = None,
    pages: Mapping[str, str] | None = None,
) -> Path:
    """Write the file, its pages and, where `figures` gives them, plots; each appears when it is complete.

    Raises:
        `OutputError`: If the folder cannot be written.
        `UnsupportedError`: If there is no matplotlib to draw the plots.
    """
    output = Path(output)
    atomic.ensure_writable(output)
    content = {form.json: report_to_json(report).encode(), form.markdown: report.to_markdown().encode()}
    content |= {name: text.encode() for name, text in (pages or {}).items()}
    if figures is not None:
        content |= render(figures())
    for name, data in content.items():
        atomic.write_bytes(output / name, data, shared=True)
    return output


def load_report(kind: type[ReportT], form: ReportFormat, path: str | Path, check: Callable[[ReportT], None]) -> ReportT:
    """The report in a file, or in the folder that holds it; see `report_from_dict`.

    Raises:
        `MissingFileError`: If there is none.
        `CorruptFileError`: If it is damaged, no such report, or of another version.
    """
    path = Path(path)
    path = path / form.json if path.is_dir() else path
    if not path.is_file():
        raise MissingFileError(f"no {form.noun} at {str(path)!r}: the {form.maker} writes one into its output folder")
    try:
        content = read_json(path)
    except CorruptFileError as error:
        raise _damaged(form, path.name, error) from None
    return report_from_dict(kind, form, content, path.name, check)


def report_from_dict(
    kind: type[ReportT], form: ReportFormat, content: dict[str, Any], name: str, check: Callable[[ReportT], None]
) -> ReportT:
    """The report that `report_to_dict` described.

    Args:
        kind (`type`):
            The report's dataclass.
        form (`ReportFormat`):
            How it is stored.
        content (`dict[str, Any]`):
            Plain values; anybody's.
        name (`str`):
            What an error calls it.
        check (`Callable`):
            Refuses, by a `CorruptFileError`, what is of the right types and yet makes no sense.

    Raises:
        `CorruptFileError`: If it is damaged, no such report, or of another version.
    """
    versions = [*form.upgrades, form.version]
    try:
        head = typed(_Head, content)
        if head.schema == form.schema and head.version in versions:
            if head.version in form.upgrades:
                content = form.upgrades[head.version](content)
            protocol = with_later_fields(content.get("protocol"))
            found: ReportT = typed(kind, {**form.later, **content, "protocol": protocol})
            check(found)
            return found
    except (CorruptFileError, BadValueError) as error:  # of another type; a protocol of senseless numbers
        raise _damaged(form, name, error) from None
    known = f"version{'s' if len(versions) > 1 else ''} {' and '.join(map(str, versions))}"
    raise CorruptFileError(
        f"{name} is {head.schema[:60]!r} version {head.version}; this hf_taskvec reads {form.schema!r} {known}"
    )


def _damaged(form: ReportFormat, name: str, error: Exception) -> CorruptFileError:
    return CorruptFileError(f"{name} is damaged or no {form.noun}: {error} Run the {form.maker} again")
