"""What a push sends: a folder's files with their card and report, checked for tokens and paths of this machine."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_taskvec import filenames
from hf_taskvec.errors import LeakError
from hf_taskvec.hub_names import may_be_hub_id, split_revision
from hf_taskvec.json_files import read_json
from hf_taskvec.publishing.card_evaluation import find_report, published_report
from hf_taskvec.publishing.model_card import card_for, check_card
from hf_taskvec.publishing.privacy import check_secrets, check_text
from hf_taskvec.publishing.written_folder import Artifact

if TYPE_CHECKING:
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

# Where transformers and PEFT note the path that something was loaded from.
_ORIGINS = ("_name_or_path", "name_or_path", "base_model_name_or_path")
_NOTED_IN = (filenames.CONFIG, "tokenizer_config.json", filenames.ADAPTER_CONFIG, "generation_config.json")
_READABLE = {".json", ".md", ".txt", ".yaml", ".yml", ".toml", ".cfg", ".py", ".csv", ".jinja", ".svg", ".html"}
_VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")  # pieces of any text, none of them ours
_LARGEST_READ = 5_000_000


def files_to_push(
    artifact: Artifact,
    repo_id: str,
    *,
    report: "UnlearningReport | str | Path | None" = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    purpose: str | None = None,
    token: str | bool | None = None,
) -> dict[str, Path | bytes]:
    """Path in the repository -> a file or its content: all that `push_folder` would push, checked; nothing is sent."""
    _check_portable(artifact)
    found = find_report(artifact, report)
    files: dict[str, Path | bytes] = {}
    for path in sorted(artifact.folder.rglob("*")):
        below = path.relative_to(artifact.folder)
        if path.is_file() and not any(part.startswith(".") or part == "store" for part in below.parts):
            files[below.as_posix()] = path
    for name in [name for name in files if name.split("/")[0] == filenames.REPORT_FOLDER]:
        del files[name]  # published anew, without texts
    if found is not None:
        files |= {f"{filenames.REPORT_FOLDER}/{name}": content for name, content in published_report(found).items()}
    if filenames.MODEL_CARD in files:
        card = (artifact.folder / filenames.MODEL_CARD).read_text("utf-8")
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
    _check_readable(files)
    return files


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
    return not may_be_hub_id(name) or Path(name).is_dir()


def _is_clean(path: Path) -> bool:
    try:
        check_text(path.read_text("utf-8"), path.name)
    except LeakError:
        return False
    return True


def _check_readable(files: Mapping[str, Path | bytes]) -> None:
    for name, content in files.items():
        if Path(name).suffix not in _READABLE or name.rsplit("/", 1)[-1] in _VOCABULARIES:
            continue
        if isinstance(content, Path) and content.stat().st_size > _LARGEST_READ:
            continue
        data = content.read_bytes() if isinstance(content, Path) else content
        check_secrets(data.decode("utf-8", "replace"), name)
