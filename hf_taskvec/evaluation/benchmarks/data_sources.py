"""Data sets on the Hub, and their rows: checked when they are loaded, before any long work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_taskvec.errors import BadValueError, HubError, MissingFileError, MissingNameError, did_you_mean, some
from hf_taskvec.progress import library_bars


@dataclass(frozen=True)
class DataSource:
    """One split of a data set on the Hub.

    Args:
        repo (`str`):
            Its id, such as `muse-bench/MUSE-Books`.
        config (`str`):
            The configuration, such as `verbmem`.
        split (`str`):
            The split, such as `forget`.
        columns (`tuple[str]`):
            The columns that are needed, with a text in each row.
        lists (`tuple[str]`, *optional*):
            The columns that are needed with a list of texts in each row.
    """

    repo: str
    config: str
    split: str
    columns: tuple[str, ...]
    lists: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The data set, its configuration and its split, as messages and reports call it."""
        return f"{self.repo} ({self.config}, split {self.split})"


@dataclass(frozen=True)
class HubAccess:
    """How data sets are fetched.

    Args:
        revision (`str`, *optional*):
            A branch, tag or commit of the data set.
        token (`str` or `bool`, *optional*):
            For a private or gated data set.
        progress (`bool`, *optional*):
            Show the progress bars of a download; by default on a terminal.
    """

    revision: str | None = None
    token: str | bool | None = None
    progress: bool | None = None


def load_rows(source: DataSource, access: HubAccess) -> tuple[Mapping[str, Any], ...]:
    """The rows of a split, each with the source's columns and no others.

    Raises:
        `MissingFileError`: If there is no such data set, revision, configuration or split, or it is empty.
        `HubError`: If the Hub cannot be reached and the data set is not in the cache.
        `MissingNameError`: If a column is missing.
        `BadValueError`: If a value is of another type or blank, or a file is damaged.
    """
    loaded = _load(source, access)
    wanted = (*source.columns, *source.lists)
    for column in wanted:
        if column not in loaded.column_names:
            raise MissingNameError(
                f"{source.id} has no column {column!r}.{did_you_mean(column, loaded.column_names)} It has "
                f"{some(loaded.column_names, 8)}: it is another data set, or another revision of it"
            )
    if not len(loaded):  # some versions of datasets raise an error instead, see `_load`
        raise MissingFileError(f"no rows in {source.id}: name a revision= that has some")
    rows = tuple({column: row[column] for column in wanted} for row in loaded.select_columns(list(wanted)))
    for number, row in enumerate(rows):
        for column in source.columns:
            _check_text(row[column], source, column, number)
        for column in source.lists:
            if not isinstance(row[column], list) or not row[column]:
                raise BadValueError(_wrong(source, column, number, "a list of texts", row[column]))
            for text in row[column]:
                _check_text(text, source, column, number)
    return rows


def _check_text(value: Any, source: DataSource, column: str, number: int) -> None:
    if not isinstance(value, str) or not value.strip():
        raise BadValueError(_wrong(source, column, number, "a text", value))


def _wrong(source: DataSource, column: str, number: int, expected: str, value: Any) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
    return f"{source.id}, column {column!r}, row {number}: {expected} is expected, not {shown}"


def _load(source: DataSource, access: HubAccess) -> Any:
    import datasets
    from huggingface_hub import utils
    from huggingface_hub.errors import HTTPError  # of the HTTP client that it uses, which changes with its version

    at = f" at revision {access.revision!r}" if access.revision else ""
    try:
        with library_bars(access.progress, datasets, utils):
            return datasets.load_dataset(
                source.repo, source.config, split=source.split, revision=access.revision, token=access.token
            )
    # A data set or revision that is not there; a ValueError for a configuration or split that is missing or empty.
    except (FileNotFoundError, ValueError) as error:
        raise MissingFileError(
            f"no data set {source.id}{at} on the Hub, or no rows in it: {_first_line(error)} Check revision=; if it is "
            "private or gated, accept its terms on the Hub and pass token="
        ) from error
    except (OSError, HTTPError) as error:
        raise HubError(
            f"the data set {source.id}{at} cannot be fetched: {_first_line(error)} Try again with a network, or load "
            "it once on a machine that has one and copy the cache of datasets (HF_DATASETS_CACHE)"
        ) from error
    except datasets.exceptions.DatasetsError as error:
        raise BadValueError(
            f"the data set {source.id}{at} cannot be read: {_first_line(error)} Its files are damaged or of another "
            "form: try another revision="
        ) from error


def _first_line(error: BaseException) -> str:
    error = error.__cause__ or error  # datasets says only that an error occurred
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
    return f"{text}."
