"""A model's weights as they are stored in a folder or on the Hub, under their canonical names.

Everything is mapped; nothing is read until it is used.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_taskvec.algebra.digests import TAG
from hf_taskvec.algebra.provenance import ModelRecord
from hf_taskvec.algebra.rounding import FLOATS
from hf_taskvec.algebra.sources import Source, full_digest, sampled_fingerprint
from hf_taskvec.algebra.views import Joined, Strided
from hf_taskvec.errors import MismatchError, MissingFileError, UnsupportedError, some
from hf_taskvec.filenames import CONFIG, FSDP_FOLDER
from hf_taskvec.hub_names import is_folder
from hf_taskvec.json_files import read_json
from hf_taskvec.models.card_metadata import stated
from hf_taskvec.models.distributed_checkpoint import distributed_index, open_distributed
from hf_taskvec.models.folder_contents import ContentKind, kinds_in, model_weights
from hf_taskvec.models.gguf_files import is_gguf, open_gguf
from hf_taskvec.models.layout import Layout, layout_of_config
from hf_taskvec.models.locations import Location, locate
from hf_taskvec.models.model_classes import named_classes
from hf_taskvec.models.remote_files import open_remote
from hf_taskvec.models.tensor_files import StoredTensor, open_files
from hf_taskvec.models.tokenizer_digest import vocabulary_digest
from hf_taskvec.quantised.reading import UnpackedModel, unpack_model

# What to do with a folder that holds something else than a model's weights.
_NO_MODELS: dict[ContentKind, str] = {
    "adapter": "a PEFT adapter, not a full model: use TaskVector.from_adapter()",
    "vector": "a saved task vector, not a model: use TaskVector.load()",
}


@dataclass(frozen=True)
class Checkpoint:
    """A model's weights under their canonical names, with what is known about the model."""

    name: str
    tensors: Mapping[str, Source]
    layout: Layout = field(default_factory=Layout)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    revision: str | None = None
    files: tuple[tuple[str, str], ...] = ()
    #: the integer buffers among the weights, which no vector changes
    constants: Mapping[str, Source] = field(default_factory=dict)
    #: every tensor of the files under its name there, in their order; whatever transformers leaves out as well. What
    #: the files hold in the form of a live model is here in the form in which it is stored, after all others
    stored: Mapping[str, Source] = field(default_factory=dict)
    #: the same with what is stored in fewer bits put together to weights
    unpacked: UnpackedModel = field(default_factory=lambda: UnpackedModel({}))
    #: name in the files -> canonical name (or tied alias), of everything that a vector can change; of what is stored in
    #: fewer bits the weight's own name
    canonical_of: Mapping[str, str] = field(default_factory=dict)
    #: whether it was put together of layers of several models: `folder`, that of the first, has another config
    is_stacked: bool = False

    @cached_property
    def sampled_fingerprint(self) -> str:
        """The same for each copy of the weights, whatever their sharding, on disk, on the Hub or live.

        Of each tensor a sample is read; see `fingerprints.py` for the fingerprint that reads everything.
        """
        return sampled_fingerprint(self.tensors)

    @cached_property
    def full_digest(self) -> str:
        """The same for each copy of the weights, too, and for nothing else: every byte of them is read."""
        return full_digest(self.tensors)

    def has_digest(self, recorded: str) -> bool:
        """Whether that is its full digest, of one kind or the other."""
        return recorded == (self.full_digest if recorded.startswith(TAG) else full_digest(self.tensors, recorded))

    def record(self) -> ModelRecord:
        """What provenance keeps of the model. Weights in files can be compared by it later on, live ones cannot."""
        stated_license, datasets = stated(self.folder) if self.folder else (None, ())
        return ModelRecord(
            self.name,
            self.revision,
            self.layout.architecture,
            self.sampled_fingerprint,
            self.files,
            stated_license,
            datasets,
            vocabulary_digest(self.folder) if self.folder else None,
            tied=tuple(sorted(self.layout.tied.items())),
            weights=self.tensors if self.folder else None,
            address=self.name if self.revision else str(self.folder.resolve()) if self.folder else None,
        )

    @property
    def where(self) -> str:
        """The model's name, with its commit if it is on the Hub."""
        return f"{self.name}@{self.revision[:12]}" if self.revision else self.name


def open_checkpoint(
    where: str | Path,
    revision: str | None = None,
    token: str | bool | None = None,
    companions: list[str] | None = None,
    stream: bool = False,
) -> Checkpoint:
    """The weights of a model in a folder or on the Hub, under their canonical names.

    Args:
        where (`str` or `Path`):
            A folder, a Hub id (`me/model`, `me/model@revision`, `me/model:folder`), or a GGUF file of this machine.
        revision (`str`, *optional*):
            A branch, tag or commit on the Hub.
        token (`str` or `bool`, *optional*):
            For private repositories, as in transformers.
        companions (`list[str]`, *optional*):
            Patterns of further files to fetch from the Hub: tokenizer and the like (`companions.py`).
        stream (`bool`, *optional*, defaults to `False`):
            Download no weights from the Hub: headers now, each tensor when it is used.

    Raises:
        `MismatchError`: If it is an adapter or a saved vector, if files and config do not belong together, or if a
            tensor is missing.
        `UnsupportedError`: If the weights are quantised in a way that is not read here.
    """
    if is_gguf(where):
        return _open_gguf(Path(where))
    beside = ["*.json", *(companions or [])]
    stream = stream and not is_folder(where)
    folder, name, commit = locate(where, revision, token, beside if stream else [*beside, "*.safetensors"])
    if commit is not None and not stream and "model" not in kinds_in(folder):
        folder, name, commit = locate(where, revision, token, [*beside, "pytorch_model*.bin"])
    weights = _distributed_folder(folder)
    if "model" not in (kinds := kinds_in(folder)) and weights is None and (not stream or kinds):
        _refuse_deepspeed(folder)
        for kind, what in _NO_MODELS.items():
            if kind in kinds:
                raise MismatchError(f"{name} is {what}.")
    if stream and commit is not None:
        config = read_json(folder / CONFIG)
        in_files = open_remote(folder, name, commit, token)
    elif "model" in kinds or weights is None:
        config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
        in_files = open_files(folder, model_weights(folder), Location(name, commit) if commit else None)
    else:
        folder = folder_of_config(folder)
        config, in_files = read_json(folder / CONFIG), open_distributed(weights)
    return _checkpoint(name, folder, commit, config, in_files, unpack_model(in_files, config, name))


def _open_gguf(path: Path) -> Checkpoint:
    found = open_gguf(path)
    return _checkpoint(path.name, path.parent, None, found.config, found.stored, found.unpacked)


def _checkpoint(
    name: str,
    folder: Path,
    commit: str | None,
    config: Mapping[str, Any],
    in_files: Mapping[str, StoredTensor],
    unpacked: UnpackedModel,
) -> Checkpoint:
    layout = layout_of_config(config, {raw: source.shape for raw, source in unpacked.weights.items()})
    weights = in_stored_form(unpacked.weights, layout, name)
    unpacked = UnpackedModel(weights, unpacked.beside)
    stored = in_files if unpacked.packed else weights
    classes = named_classes(config)
    placed = layout.place(weights, name, classes)
    tensors, constants = canonical_tensors(placed, weights, layout, name, classes, layout.constants)
    return Checkpoint(
        name=name,
        tensors=tensors,
        layout=layout,
        config=config,
        folder=folder,
        revision=commit,
        files=_hub_digests(folder, in_files),
        constants=constants,
        stored=stored,
        unpacked=unpacked,
        canonical_of={raw: canonical for canonical, raw in placed.items() if canonical not in constants},
    )


def _distributed_folder(folder: Path) -> Path | None:
    """Where in a folder, or in what accelerate and Trainer put there, torch.distributed.checkpoint wrote."""
    return next((each for each in (folder, folder / FSDP_FOLDER) if distributed_index(each) is not None), None)


def folder_of_config(folder: Path) -> Path:
    """The folder that has the config of a distributed checkpoint: itself, or the one that it lies in.

    Raises:
        `MissingFileError`: If neither has one.
    """
    for each in (folder, folder.resolve().parent):
        if (each / CONFIG).exists():
            return each
    raise MissingFileError(
        f"{folder.name} is a distributed checkpoint, which does not tell what model it is of. Put the model's "
        f"{CONFIG} into it (model.config.save_pretrained(folder))."
    )


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed ZeRO."""
    return (folder / "latest").is_file() and any(folder.glob("*/*zero_pp_rank_*"))


def _refuse_deepspeed(folder: Path) -> None:
    """DeepSpeed's parts are pickles, and its converter runs what they hold: that is the user's to decide."""
    if is_deepspeed(folder):
        raise UnsupportedError(
            f"{folder.name} is a checkpoint of DeepSpeed ZeRO, whose files are pickles that can run code. If you trust "
            "them, convert it first: hf_taskvec.extraction.from_deepspeed.convert_deepspeed(folder, output, "
            "trust_pickles=True), or DeepSpeed's own script that lies there, `python zero_to_fp32.py . weights "
            f"--safe_serialization`, with the model's {CONFIG} put into that folder."
        )


def in_stored_form(found: Mapping[str, Source], layout: Layout, where: str) -> dict[str, Source]:
    """Tensors, those that have the form of a live model's parameters as transformers itself stores them.

    Args:
        found (`Mapping[str, Source]`):
            Some or all of a model's tensors, by the names that they have in files or in the live model.
        layout (`Layout`):
            That of the model.
        where (`str`):
            What the model is called in a message.

    Returns:
        `dict[str, Source]`: The same, and in the place of fused parameters what they are stored as, after all others.
        What cannot be told by parts is as it was.

    Raises:
        `MismatchError`: If one has another shape than in the live model, or is there in both forms.
    """
    live = {form: name for name in found if (form := layout.live_form(name)) is not None}
    made: dict[str, Source] = {}
    used: set[str] = set()
    for name, parts in layout.parts.items():
        if any(part.live not in live for part in parts):
            continue
        views = []
        for part in parts:
            source, expected = found[live[part.live]], layout.restructured[part.live]
            if source.shape != expected:
                raise MismatchError(
                    f"{where}: {live[part.live]} has shape {list(source.shape)}, and a live {layout.architecture} has "
                    f"{list(expected)}. Save the model again with save_pretrained()."
                )
            views.append(Strided(source, part.shape, part.stride, part.offset))
        made[name] = views[0] if len(views) == 1 else Joined(tuple(views), parts[0].dim)
        used |= {live[part.live] for part in parts}
    rest = {layout.canonical(name) if made else name: each for name, each in found.items() if name not in used}
    if twice := sorted(made.keys() & rest.keys()):
        raise MismatchError(
            f"{where} holds {some(twice)} twice, once as transformers stores it and once in the form of a live "
            f"{layout.architecture}. Save the model again with save_pretrained()."
        )
    return {**rest, **made}


def canonical_tensors(
    placed: Mapping[str, str],
    stored: Mapping[str, Source],
    layout: Layout,
    where: str,
    classes: Sequence[str],
    integers: Collection[str],
) -> tuple[dict[str, Source], dict[str, Source]]:
    """The tensors under canonical names, tied weights once; and apart from them the integer buffers.

    Args:
        placed (`Mapping[str, str]`):
            Canonical name (or tied alias) -> the name in `stored`.
        stored (`Mapping[str, Source]`):
            Every tensor of the model.
        layout (`Layout`):
            That of the model.
        where (`str`):
            What the model is called in a message.
        classes (`Sequence[str]`):
            The model's class, as its config or the live model tells it.
        integers (`Collection[str]`):
            The canonical names of the integer buffers.

    Raises:
        `MismatchError`: If one is missing, has another shape than the config says, or differs from what it is tied to.
        `UnsupportedError`: If a weight is quantised.
    """
    tensors: dict[str, Source] = {}
    constants = {canonical: stored[raw] for canonical, raw in placed.items() if canonical in integers}
    for canonical, raw in placed.items():
        source = stored[raw]
        if canonical in constants:
            continue
        if source.dtype not in FLOATS:
            raise _quantised(where, raw, source)
        tensors[canonical] = source
    for alias, owner in layout.tied.items():
        copy = tensors.pop(alias, None)
        if copy is None:
            continue
        if owner not in tensors:
            tensors[owner] = copy
        elif copy != tensors[owner] and not torch.equal(copy.read(), tensors[owner].read()):
            raise MismatchError(
                f"{where}: {alias} differs from {owner}, but the config ties them. If the model was untied on purpose, "
                "set tie_word_embeddings=False in its config."
            )
    if layout.shapes:
        shapes = {canonical: source.shape for canonical, source in (tensors | constants).items()}
        layout.check_whole(shapes, where, classes)
    return tensors, constants


def _quantised(where: str, name: str, source: Source) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: {name} is stored as {source.dtype}. Integer and quantised weights cannot be subtracted; "
        "use the model in bf16, fp16 or fp32."
    )


def file_digests(files: Mapping[str, Path]) -> tuple[tuple[str, str], ...]:
    """The sha256 of whole files, which are read: what `ModelRecord.files` tells of files on the Hub."""

    def digest(path: Path) -> str:
        found = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                found.update(block)
        return found.hexdigest()

    return tuple(sorted((name, digest(path)) for name, path in files.items()))


def _hub_digests(folder: Path, stored: Mapping[str, StoredTensor]) -> tuple[tuple[str, str], ...]:
    """The sha256 of each weight file, where the Hub's cache knows it: its links are named by content."""
    files = {source.file for source in stored.values()}
    return tuple(sorted((file.path.name, digest) for file in files if (digest := file.digest) is not None))
