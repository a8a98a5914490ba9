"""An output is replaced; what others put into it is not removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.edited_model import Edited
from support.launched_training import LORA, QUICK, make_blocks
from support.tiny_books import make_tokenizer
from support.tiny_models import TinyModels

from hf_taskvec import TaskVector
from hf_taskvec.errors import OutputError
from hf_taskvec.publishing import write_card
from hf_taskvec.training import finetune

KINDS = ["save", "apply", "to_adapter", "finetune", "finetune-lora"]


def write(kind: str, models: TinyModels, out: Path) -> None:
    pair = models.pair("phi")
    options = {"overwrite": True}
    if kind == "save":
        pair.vector().save(out, max_shard_size="20KB", **options)
    elif kind == "apply":
        pair.vector().apply(pair.base, out, max_shard_size="20KB", **options)
    elif kind == "to_adapter":
        pair.vector().compress(rank=1).to_adapter(out, base=pair.base, dense="drop", **options)
    else:
        settings = QUICK if kind == "finetune" else LORA
        finetune(pair.base, make_blocks(), settings, out, tokenizer=make_tokenizer(), vectors=True, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_wrote_is_replaced_and_what_others_put_there_is_not(
    models: TinyModels, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    write(kind, models, out)
    if kind.startswith("finetune"):
        (out / "vectors" / "epoch-1" / ".DS_Store").touch()
    write(kind, models, out)  # all of it is known to be ours
    before = sorted(out.rglob("*"))
    foreign = ["notes.txt", "README.md", ".env", "plots/mine.png", "report/mine.md", "extra.safetensors", "mine.json"]
    if kind.startswith("finetune"):
        foreign.append("vectors/epoch-1/mine.txt")
    for name in foreign:
        path = out / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        with pytest.raises(OutputError, match=rf"did not write, or that were changed since: {name}\. .*Move them away"):
            write(kind, models, out)
        assert path.read_text() == "mine"
        path.unlink()
        if path.parent not in (out, *before):
            path.parent.rmdir()
    (out / "empty").mkdir()
    with pytest.raises(OutputError, match="did not write, or that were changed since: empty"):
        write(kind, models, out)
    (out / "empty").rmdir()
    (out / "link").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="did not write, or that were changed since: link"):
        write(kind, models, out)
    (out / "link").unlink()
    write(kind, models, out)
    assert sorted(out.rglob("*")) == [path for path in before if path.name != ".DS_Store"]


def test_the_card_is_ours_until_somebody_changes_it(edited: Edited, tmp_path: Path) -> None:
    out = tmp_path / "out"
    edited.vector.apply(edited.pair.base, out, scale=-0.5)
    edited.report.save(out / "report")
    write_card(out, report=None)
    edited.vector.apply(edited.pair.base, out, scale=-0.5, overwrite=True)
    assert not (out / "README.md").exists() and not (out / "report").exists()
    card = write_card(out)
    card.write_text(card.read_text() + "\nWhat I found out.\n")
    with pytest.raises(OutputError, match=r"were changed since: README\.md"):
        edited.vector.apply(edited.pair.base, out, scale=-0.5, overwrite=True)
    assert "What I found out." in card.read_text()


def test_a_model_of_a_base_without_a_config_is_replaced(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("llama")
    for side in ("base", "tuned"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "model.safetensors").write_bytes((getattr(pair, side) / "model.safetensors").read_bytes())
    vector = TaskVector.from_finetuned(tmp_path / "base", tmp_path / "tuned")
    for _ in range(2):
        vector.apply(tmp_path / "base", tmp_path / "out", overwrite=True)
