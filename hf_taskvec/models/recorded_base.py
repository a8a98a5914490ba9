"""Where the base of a vector lies, as far as the vector's record tells."""

from collections.abc import Iterable
from pathlib import Path

from hf_taskvec.algebra.provenance import ModelRecord, Provenance
from hf_taskvec.errors import BadValueError, MismatchError, TaskVectorError
from hf_taskvec.hub_names import is_folder
from hf_taskvec.models.checkpoint import open_checkpoint


def find_base(provenance: Provenance, folders: Iterable[Path] = (Path(),)) -> str:
    """The address of the one model that a vector was taken from.

    A record keeps a model's id on the Hub, but of a folder only the name and a fingerprint: then a folder of that name
    is looked for, and taken if its weights have that fingerprint.

    Args:
        provenance (`Provenance`):
            Of the vector.
        folders (`Iterable[Path]`, *optional*):
            Where to look for it; the working directory without them.

    Returns:
        `str`: A Hub id with its revision, or a folder.

    Raises:
        `BadValueError`: If the record tells of no base or of several, or not where it lies.
    """
    bases = _bases(provenance)
    if len(bases) != 1:
        told = f"comes from several bases ({', '.join(map(str, bases))})" if bases else "does not tell its base"
        raise BadValueError(f"the vector {told}: name the model that never saw the books, reference=MODEL")
    (base,) = bases
    if base.address is not None and base.revision is None:
        return base.address
    if base.hub_id is not None:
        return f"{base.hub_id}@{base.revision}" if base.revision else base.hub_id
    for folder in folders:
        if Path(base.name).name == base.name and _holds(folder / base.name, base):
            return str(folder / base.name)
    raise BadValueError(
        f"the vector's base is {base}, and its record does not tell where that lies: there is no folder of that name "
        "and these weights here. Name it: reference=FOLDER"
    )


def check_same_base(own: Provenance, other: Provenance, what: str) -> None:
    """Refuse a vector to be compared with if the records tell that it was taken from other weights.

    A base of which a record has no fingerprint, as an adapter's, is not compared.

    Args:
        own (`Provenance`):
            Of the vector.
        other (`Provenance`):
            Of the one that it is compared with.
        what (`str`):
            What an error calls that one.

    Raises:
        `MismatchError`: If they have no base in common.
    """
    ours, theirs = ([base for base in _bases(each) if base.fingerprint] for each in (own, other))
    if ours and theirs and {base.fingerprint for base in ours}.isdisjoint(base.fingerprint for base in theirs):
        raise MismatchError(
            f"{what} was taken from another base ({', '.join(map(str, theirs))}) than the vector beside it "
            f"({', '.join(map(str, ours))}), so nothing follows from comparing them. Extract it from the same base."
        )


def _bases(provenance: Provenance) -> list[ModelRecord]:
    """Every base once; one that is known by its name only is another base of that name, if there is one."""
    given = [origin.base for origin in provenance.origins if origin.base is not None]
    found = {base.fingerprint: base for base in given if base.fingerprint}
    names = {base.name for base in found.values()}
    return [*found.values(), *{base.name: base for base in given if base.name not in names}.values()]


def _holds(folder: Path, base: ModelRecord) -> bool:
    try:
        return is_folder(folder) and open_checkpoint(folder).sampled_fingerprint == base.fingerprint
    except (TaskVectorError, OSError):  # no model at all
        return False
