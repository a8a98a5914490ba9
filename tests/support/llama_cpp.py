"""llama.cpp, where it was built: its converters, and its logits of a prompt.

`make test-llama-cpp` gets its source out of the package llama-cpp-python and compiles it. The program is small, of one
thread, in fp32.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(os.environ.get("LLAMA_CPP", ROOT / ".llama.cpp"))
DEBUG = next((path for path in (SOURCE / "build" / "bin" / "llama-debug",) if path.is_file()), None)

needs_llama_cpp = pytest.mark.skipif(DEBUG is None, reason="no llama.cpp: make test-llama-cpp builds one")

# A model's weights by llama.cpp's own converter, with a vocabulary of single bytes: the tiny models have none.
_CONVERT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
sys.path.insert(1, sys.argv[1] + "/gguf-py")
import gguf
from conversion import ModelBase, get_model_class
base, output = Path(sys.argv[2]), Path(sys.argv[3])
config = ModelBase.load_hparams(base, False)
kind = get_model_class(config["architectures"][0])

class Bytes(kind):
    model_arch = kind.model_arch
    def set_vocab(self):
        size = config["vocab_size"]
        words = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *(f"[{n}]" for n in range(size - 259))]
        self.gguf_writer.add_tokenizer_model("llama")
        self.gguf_writer.add_token_list(words)
        self.gguf_writer.add_token_scores([0.0] * size)
        self.gguf_writer.add_token_types([2, 3, 3, *[6] * 256, *[5] * (size - 259)])
        self.gguf_writer.add_bos_token_id(1)
        self.gguf_writer.add_eos_token_id(2)
        self.gguf_writer.add_unk_token_id(0)

Bytes(base, gguf.LlamaFileType.ALL_F32, output, is_big_endian=False, use_temp_file=False, eager=True).write()
"""
VOCABULARY = 264  # three words, all bytes, and five that nothing stands for


def convert_model(base: Path, output: Path) -> Path:
    """A model's folder as a GGUF file in fp32."""
    _run([sys.executable, "-c", _CONVERT, SOURCE, base, output])
    return output


def convert_adapter(adapter: Path, base: Path, output: Path) -> Path:
    """A PEFT adapter as a GGUF file, by llama.cpp's own converter."""
    _run([sys.executable, SOURCE / "convert_lora_to_gguf.py", "--base", base, "--outfile", output, adapter])
    return output


def logits(model: Path, folder: Path, adapter: Path | None = None, scale: float = 1.0) -> tuple[list[int], np.ndarray]:
    """The tokens of a prompt, and the logits of what follows it; with an adapter, by `--lora-scaled`."""
    assert DEBUG is not None
    folder.mkdir()
    words = [DEBUG, "-m", model, "-p", "the lamp in this room", "--save-logits", "--logits-output-dir", folder]
    words += ["-t", 1, "-c", 64, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup"]
    words += ["--lora-scaled", f"{adapter}:{scale}"] if adapter is not None else []
    _run(words)
    (tokens,) = folder.glob("*-tokens.bin")
    (values,) = (path for path in folder.glob("*.bin") if path != tokens)
    return np.fromfile(tokens, np.int32).tolist(), np.fromfile(values, np.float32)


def _run(words: list[object]) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-3000:]
