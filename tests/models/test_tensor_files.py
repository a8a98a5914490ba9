"""Files of tensors: what is read of them is bounded by what they hold."""

import copy
import resource
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from support.tiny_models import TinyModels

from hf_taskvec.errors import CorruptFileError, UnsupportedError
from hf_taskvec.models.checkpoint import open_checkpoint

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("kind", ["deflated", "overlapping", "repeated"])
def test_a_bin_file_holds_no_more_than_its_size(kind: str, models: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(models.pair("llama").base, tmp_path / "bomb")
    (folder / WEIGHTS).unlink()
    path = folder / "pytorch_model.bin"
    if kind == "repeated":
        torch.save({"model.norm.weight": torch.zeros(1).expand(10**12)}, path)
        with pytest.raises(UnsupportedError, match=r"model\.norm\.weight is not a plain dense tensor"):
            open_checkpoint(folder)
        return
    torch.save({"model.norm.weight": torch.zeros(10**7)}, tmp_path / "whole.bin")
    if kind == "deflated":
        with (
            zipfile.ZipFile(tmp_path / "whole.bin") as whole,
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as small,
        ):
            for member in whole.infolist():
                small.writestr(member.filename, whole.read(member))
    else:  # the directory names the same bytes twice
        with zipfile.ZipFile(tmp_path / "whole.bin", "a") as whole:
            twin = copy.copy(next(each for each in whole.infolist() if "data/0" in each.filename))
            twin.filename += "-again"
            whole.filelist.append(twin)
            whole._didModify = True
        (tmp_path / "whole.bin").rename(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin (is compressed|claims to hold more)"):
        open_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # kB
