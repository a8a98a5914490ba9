"""GGUF files are what transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import tiny_quantised
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import CorruptFileError, UnsupportedError
from hf_taskvec.models.checkpoint import open_checkpoint

pytest.importorskip("gguf")

NAME = "model.layers.0.self_attn.q_proj.weight"  # whose rows llama.cpp has in another order


def loaded(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).state_dict())


@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "Q4_K", "Q6_K"])
def test_a_gguf_file_is_what_transformers_loads(tmp_path: Path, kind: str) -> None:
    path = tiny_quantised.gguf(tmp_path / "model.gguf", kind)
    expected = loaded(path)
    found = open_checkpoint(path).tensors
    assert set(found) == set(expected)
    for name, source in found.items():
        assert torch.equal(source.read(), expected[name]), name
    assert torch.equal(found[NAME].readable().rows(2, 5), expected[NAME][2:5])  # type: ignore[union-attr]


def test_a_vector_is_applied_to_a_gguf_file_without_its_quantisation(tmp_path: Path) -> None:
    path = tiny_quantised.gguf(tmp_path / "model.gguf", "Q8_0")
    vector = TaskVector.from_tensors({NAME: torch.full((256, 256), 0.25)})
    with pytest.raises(UnsupportedError, match=rf"{NAME} is stored as GGUF Q8_0, .* requantise='bf16'"):
        vector.apply(path, tmp_path / "same", requantise="same")
    plain = vector.apply(path, tmp_path / "plain", requantise="bf16")
    model = AutoModelForCausalLM.from_pretrained(plain)
    for name, before in loaded(path).items():
        exact = before.double() + (0.25 if name == NAME else 0.0)
        assert torch.equal(model.state_dict()[name], exact.float().bfloat16()), name
    back = TaskVector.from_finetuned(path, plain)
    assert back[NAME].dense(dtype=torch.float64).mean().item() == pytest.approx(0.25, abs=1e-3)


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tiny_quantised.gguf(tmp_path / "model.gguf", "Q8_0")
    whole = path.read_bytes()
    at = whole.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8  # how long that list is
    endless = whole[:at] + (2**60).to_bytes(8, "little") + whole[at + 8 :]
    for content in (
        b"",
        b"GGUF",
        whole[: len(whole) // 2],
        b"XXXX" + whole[4:],
        whole[:8] + b"\xff" * 16 + whole[24:],
        endless,
    ):
        path.write_bytes(content)
        with pytest.raises((CorruptFileError, UnsupportedError), match=r"model\.gguf"):
            open_checkpoint(path)
