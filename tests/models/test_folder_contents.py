"""What is in a folder."""

from pathlib import Path

import pytest

from hf_taskvec.models.folder_contents import kind_of, record_in


@pytest.mark.parametrize(
    ("files", "with_base", "without_base"),
    [
        (["taskvec.json", "adapter_config.json", "model.safetensors"], "vector", "vector"),
        (["adapter_config.json"], "adapter", "adapter"),
        (["adapter_config.json", "config.json", "model.safetensors"], "model", "adapter"),
        (["adapter_config.json", "pytorch_model.bin.index.json"], "model", "adapter"),
        (["config.json", "model.safetensors"], "model", "model"),
        ([], "model", "model"),
    ],
)
def test_the_kind_of_a_folder(files: list[str], with_base: str, without_base: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert kind_of(tmp_path, "base") == (with_base, tmp_path.name)
    assert kind_of(tmp_path) == (without_base, tmp_path.name)


def test_a_record_tells_what_this_library_wrote(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert record_in(tmp_path) is None
    (tmp_path / "taskvec_apply.json").touch()
    assert record_in(tmp_path) == "taskvec_apply.json"
