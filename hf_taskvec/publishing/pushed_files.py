"""What a push sends: the files of a model, an adapter or a vector, with their card and report, all of them checked.

A folder may hold other things as well, and nobody asked to have those published: they are left out, and named. No link
is followed, and nothing leaves that holds a token, a key or a path of this machine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from hf_taskvec import filenames
from hf_taskvec.errors import CorruptFileError, LeakError, MissingFileError
from hf_taskvec.hub_names import is_folder, may_be_hub_id, split_revision
from hf_taskvec.json_files import read_json
from hf_taskvec.models.companions import companion_files
from hf_taskvec.models.folder_contents import ContentKind
from hf_taskvec.publishing.card_evaluation import find_report, published_report, reported_scale
from hf_taskvec.publishing.eval_results import HubScores, eval_result_files
from hf_taskvec.publishing.model_card import card_for, check_card
from hf_taskvec.publishing.privacy import check_file, check_secrets, check_text
from hf_taskvec.publishing.written_folder import Artifact

if TYPE_CHECKING:
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

# Where transformers and PEFT note the path that something was loaded from.
_ORIGINS = ("_name_or_path", "name_or_path", "base_model_name_or_path")
_NOTED_IN = (filenames.CONFIG, "tokenizer_config.json", filenames.ADAPTER_CONFIG, "generation_config.json")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")  # pieces of any text, none of them ours
# What `apply`, `to_adapter` and `save` write themselves; the rest of a model is what transformers knows by its name.
_OWN: dict[ContentKind, tuple[str, ...]] = {
    "model": ("model*.safetensors", filenames.WEIGHTS_INDEX, filenames.MODEL_RECORD),
    "adapter": (
        filenames.ADAPTER_SAFETENSORS,
        filenames.ADAPTER_CONFIG,
        filenames.ADAPTER_RECORD,
        filenames.ADAPTER_GGUF,
    ),
    "vector": ("taskvec*.safetensors", filenames.VECTOR_RECORD),
}
_BESIDE = (filenames.MODEL_CARD, filenames.COMMAND_RECORD)


@dataclass(frozen=True)
class FilesToPush:
    """What a push sends, and what of the folder it does not.

    Args:
        files (`Mapping[str, Path | bytes]`):
            For each path in the repository a file or its content.
        left_out (`tuple[str, ...]`, *optional*):
            Files of the folder that are no part of a model, an adapter or a vector.
    """

    files: Mapping[str, Path | bytes]
    left_out: tuple[str, ...] = ()


def files_to_push(
    artifact: Artifact,
    repo_id: str,
    *,
    report: "UnlearningReport | str | Path | None" = None,
    benchmarks: Sequence[HubScores] = (),
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    purpose: str | None = None,
    include: Sequence[str] = (),
    token: str | bool | None = None,
) -> FilesToPush:
    """All that `push_folder` would push, checked; nothing is sent."""
    _check_portable(artifact)
    found = find_report(artifact, report)
    files, left_out = _chosen(artifact, include)
    if found is not None:
        files |= {f"{filenames.REPORT_FOLDER}/{name}": content for name, content in published_report(found).items()}
    if artifact.kind != "vector":
        files |= eval_result_files(found, reported_scale(artifact, found), benchmarks)
    if filenames.MODEL_CARD in files:
        try:
            card = (artifact.folder / filenames.MODEL_CARD).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{filenames.MODEL_CARD} is not text in UTF-8 ({error}). Save it as such.") from None
        check_card(card, artifact)
    else:
        card = card_for(
            artifact,
            repo_id=repo_id,
            report=found,
            base_model=base_model,
            datasets=datasets,
            purpose=purpose,
            token=token,
        )
        files[filenames.MODEL_CARD] = card.encode()
    for name in _NOTED_IN:
        if name in files:
            files[name] = _without_paths(artifact.folder / name, base_model)
    if filenames.COMMAND_RECORD in files and not _is_clean(artifact.folder / filenames.COMMAND_RECORD):
        del files[filenames.COMMAND_RECORD]
    _check_content(files)
    return FilesToPush(files, left_out)


def _chosen(artifact: Artifact, include: Sequence[str]) -> tuple[dict[str, Path | bytes], tuple[str, ...]]:
    """The folder's files that belong to what it holds, or that were asked for; and the names of the others."""
    folder = artifact.folder
    belonging = {path.relative_to(folder).as_posix() for path in companion_files(folder)}
    patterns = (*_OWN[artifact.kind], *_BESIDE, *include)
    files: dict[str, Path | bytes] = {}
    left_out, unused = [], set(include)
    for path in _below(folder):
        name = path.relative_to(folder).as_posix()
        unused -= {pattern for pattern in unused if fnmatch(name, pattern)}
        if name not in belonging and not any(fnmatch(name, pattern) for pattern in patterns):
            left_out.append(name)
        elif path.is_symlink():
            raise LeakError(
                f"{name} in {folder.name} is a link, and a push follows none: what it leads to may be private. Put the "
                "file itself there, or remove the link."
            )
        else:
            files[name] = path
    if unused:
        raise MissingFileError(f"{folder.name} has no file that include={sorted(unused)[0]!r} names.")
    return files, tuple(left_out)


def _below(folder: Path) -> Iterator[Path]:
    """Files and links below a folder. Hidden ones, the report, which is published anew, and a sweep's store are not."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in (filenames.REPORT_FOLDER, "store"):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)
        else:
            yield path


def _check_portable(artifact: Artifact) -> None:
    """Refuse a vector that refers to folders of this machine: nobody else could load it, and it names their paths."""
    if local := artifact.local_references:
        raise LeakError(
            f"{artifact.folder.name} is saved as a reference to folders of this machine ({', '.join(local)}), which "
            "nobody else has. Save the vector without reference=True, or push its models first and extract it from "
            "their Hub ids."
        )


def _without_paths(path: Path, base_model: str | None) -> Path | bytes:
    """A config, without the note of a folder that it was loaded from; an adapter names the base's Hub id instead."""
    config = read_json(path)
    noted = [key for key in _ORIGINS if isinstance(config.get(key), str) and _is_folder(config[key])]
    if path.name == filenames.ADAPTER_CONFIG and not config.get("base_model_name_or_path"):
        noted.append("base_model_name_or_path")
    if not noted:
        return path
    for key in noted:
        if key == "base_model_name_or_path":
            config[key], config["revision"] = split_revision(base_model) if base_model else (None, None)
        else:
            del config[key]
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _is_folder(name: str) -> bool:
    return not may_be_hub_id(name) or is_folder(name)


def _is_clean(path: Path) -> bool:
    try:
        check_text(path.read_text("utf-8"), path.name)
    except (LeakError, UnicodeDecodeError):
        return False
    return True


def _check_content(files: Mapping[str, Path | bytes]) -> None:
    for name, content in files.items():
        if isinstance(content, Path):
            check_file(content, name, is_vocabulary=content.name in _VOCABULARIES)
        else:
            check_secrets(content.decode("utf-8", "replace"), name)
