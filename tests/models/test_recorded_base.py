"""Where a vector's base lies: what its record tells, and what is asked for where it does not."""

from pathlib import Path

import pytest

from hf_taskvec.algebra.provenance import ModelRecord, Origin, Provenance
from hf_taskvec.errors import BadValueError
from hf_taskvec.models.recorded_base import find_base


def of(*bases: ModelRecord | None) -> Provenance:
    labels = "abcd"
    origins = tuple(Origin(labels[i], "full fine-tune", base) for i, base in enumerate(bases))
    return Provenance(tuple((origin.label, 1.0) for origin in origins), origins)


def test_an_id_on_the_hub_is_an_address_with_its_commit() -> None:
    known = ModelRecord("me/base", "c" * 40, fingerprint="f" * 64, address="me/base")
    assert find_base(of(known)) == f"me/base@{'c' * 40}"
    assert find_base(of(ModelRecord("me/base"))) == "me/base"
    assert find_base(of(known, None, ModelRecord("me/base"))) == f"me/base@{'c' * 40}"  # an adapter names no commit


def test_a_folder_that_was_just_opened_is_known() -> None:
    assert find_base(of(ModelRecord("base", fingerprint="f" * 64, address="/somewhere/base"))) == "/somewhere/base"


@pytest.mark.parametrize(
    ("bases", "message"),
    [
        ([], "does not tell its base: name the model that never saw the books, reference=MODEL"),
        ([None], "does not tell its base"),
        ([ModelRecord("me/a"), ModelRecord("me/b")], r"several bases \(me/a, me/b\)"),
        ([ModelRecord("a", fingerprint="1" * 64), ModelRecord("a", fingerprint="2" * 64)], "several bases"),
        ([ModelRecord("..", fingerprint="1" * 64)], "does not tell where that lies"),
        ([ModelRecord("base")], "does not tell where that lies.*Name it: reference=FOLDER"),
    ],
)
def test_what_is_not_told_is_asked_for(bases: list[ModelRecord | None], message: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(BadValueError, match=message):
        find_base(of(*bases), [tmp_path, tmp_path / "nowhere"])
