"""JSON files that hold one object, as configs, indices and records do."""

import json
from pathlib import Path
from typing import Any

from hf_taskvec.errors import CorruptFileError, MissingFileError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an error that names the file if it is missing or holds something else."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path.name} is missing in {path.parent.name}.") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path.name} is not valid JSON ({error}).") from None
    if not isinstance(data, dict):
        raise CorruptFileError(f"{path.name} must hold a JSON object.")
    return data
