"""What belongs to a model besides its weights: configs, tokenizer, chat template, code, licence.

Only what transformers itself would read is taken, by the names that it knows: a folder may hold other things, and
nobody asked to have those copied and published.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_taskvec.errors import CorruptFileError, UnsupportedError
from hf_taskvec.filenames import CONFIG
from hf_taskvec.json_files import read_json

# The names of transformers' utils, tokenization_utils_base and, last, of the vocab_files_names of its tokenizers.
_CONFIGS = (CONFIG, "generation_config.json")
_PROCESSORS = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "audio_tokenizer_config.json",
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZERS = (
    *(_TOKENIZER_CONFIG, "tokenizer.json", "tokenizer.*.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "dict.txt", "bpe.codes", "prophetnet.tokenizer"),
    *("*.model", "*.model.v*", "*.tiktoken", "source.spm", "target.spm"),
    *("vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json", "normalizer.json"),
    *("byte_maps.json", "emoji.json", "word_shape.json", "word_pronunciation.json"),
)
_LICENCES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*")  # they ask to stay with the weights
# Code is looked for where an `auto_map` names it, and here.
_CUSTOM_GENERATE = "custom_generate/generate.py"
_NAMED = (*_CONFIGS, *_TOKENIZERS, *_PROCESSORS, *_LICENCES, _CUSTOM_GENERATE)

#: patterns of what to fetch from the Hub; which of the code belongs to the model, the configs tell afterwards.
#: A model's card is not among them: that of a changed model differs.
COMPANIONS = (*_NAMED, "*.py", "custom_generate/*.py")
#: the same of what `tokenizer_files` gives
TOKENIZER_FILES = _TOKENIZERS


def companions(folder: Path) -> list[Path]:
    """The files of a model folder beside its weights: config, tokenizer, code, licence.

    Raises:
        `UnsupportedError`: If one is a link that leads out of the folder: what is there, nobody can tell by its name.
    """
    found = companion_files(folder)
    for path in found:
        if not _is_inside(path, folder):
            raise UnsupportedError(
                f"{path.relative_to(folder).as_posix()} in {folder.resolve().name} is a link that leads out of the "
                "folder, or to nothing. Put the file itself there."
            )
    return found


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that make its tokenizer, templates included, and no code.

    Raises:
        `UnsupportedError`: If one is a link that leads out of the folder.
    """
    return [path for path in companions(folder) if any(path.match(pattern) for pattern in _TOKENIZERS)]


def companion_files(folder: Path) -> list[Path]:
    """The same, links to anywhere included."""
    named = {path for pattern in _NAMED for path in folder.glob(pattern) if path.is_file() or path.is_symlink()}
    return sorted(path for path in named | set(_code(folder)) if not path.name.startswith("."))


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder, or where the Hub's cache keeps the content of that folder's files."""
    real, root = path.resolve(), folder.resolve()
    # Of a repository, or of a folder in one.
    snapshots = next((each for each in root.parents if each.name == "snapshots"), None)
    is_blob = snapshots is not None and real.parent == snapshots.parent / "blobs"
    return real.is_file() and (real.is_relative_to(root) or is_blob)


def _code(folder: Path) -> Iterator[Path]:
    """The Python files that the configs name, and those that they import from the folder."""
    left = [folder / file for file in _modules_named(folder)]
    if (folder / _CUSTOM_GENERATE).is_file():
        left.append(folder / _CUSTOM_GENERATE)
    seen = set()
    while left:
        path = left.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        yield path
        from transformers.dynamic_module_utils import get_relative_imports  # not for a model without code

        try:
            imported = get_relative_imports(path)
        except UnicodeDecodeError:
            raise CorruptFileError(f"{path.name} in {folder.resolve().name} is not Python in UTF-8.") from None
        left += [path.with_name(f"{name}.py") for name in imported if _is_module(name)]


def _modules_named(folder: Path) -> Iterator[str]:
    """The files of the classes in each config's `auto_map`; `repository--module.Class` is in another repository."""
    for config in (*_CONFIGS, _TOKENIZER_CONFIG, *_PROCESSORS):
        if not _is_inside(folder / config, folder):  # a link to elsewhere is refused without having been read
            continue
        for name in _texts(read_json(folder / config).get("auto_map")):
            module = name.rpartition(".")[0]
            if module and "--" not in module:
                if not _is_module(module):
                    raise CorruptFileError(f"auto_map in {config} names no module of its folder: {name!r}.")
                yield f"{module}.py"


def _is_module(name: str) -> bool:
    """Whether a module lies in the folder itself."""
    return re.fullmatch(r"\w[\w.-]{0,200}", name, re.ASCII) is not None


def _texts(value: Any) -> Iterator[str]:
    """The texts in an `auto_map`: one for each class, or for tokenizers a list of two, either of which may be none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
