"""What the Space does, step by step and without a browser: headers, extraction, a look, λ, the card, the push.

Everything is read without a token: what a visitor may not see on the Hub, the Space does not see either. The one token
that there is, the visitor's own, goes to the push and nowhere else.
"""

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from hf_taskvec import TaskVector
from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.parameter_names import layer_of
from hf_taskvec.analysis import cosine_matrix, stable_ranks
from hf_taskvec.application.attached_edit import AttachedEdit
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.application.to_checkpoint import apply
from hf_taskvec.application.to_live_model import check_editable
from hf_taskvec.cli.dry_run import STREAMING_MEMORY, weights_size
from hf_taskvec.errors import BadValueError, OutputError, UnsupportedError
from hf_taskvec.extraction.from_any import open_vector
from hf_taskvec.hub_names import is_folder
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.folder_contents import kind_of
from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer
from hf_taskvec.models.recorded_base import find_base
from hf_taskvec.publishing import Pushed, card_for, open_artifact
from hf_taskvec.publishing.notation import evaluate_expression
from hf_taskvec.sizes import file_size, memory_size
from hf_taskvec.training.memory_estimate import free_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: what can be pushed
Product = Literal["the merged model", "the task vector", "an adapter"]
PRODUCTS: tuple[Product, ...] = ("the merged model", "the task vector", "an adapter")
MOST_VECTORS = 4
_NETWORK = 50_000_000  # bytes a second, by which times are told
_OUTSIDE = "outside"


@dataclass(frozen=True)
class Opened:
    """A base and what was made from it, of which headers were read and nothing else.

    Args:
        base (`str`):
            The Hub id, or the folder.
        sources (`Mapping[str, str]`):
            Where each vector comes from, by the vector's name.
        vectors (`Mapping[str, TaskVector]`):
            The vectors, which read tensors from the Hub by byte range where they are used.
        parameters (`int`):
            Of the base.
        download (`int`):
            The bytes of all weights that are on the Hub.
        text (`str`):
            What there is to tell, as Markdown.
    """

    base: str
    sources: Mapping[str, str]
    vectors: Mapping[str, TaskVector]
    parameters: int
    download: int
    text: str

    @property
    def fits_on_disk(self) -> bool:
        """Whether the weights can be downloaded; else they are read where they are."""
        return self.download < _free_disk()

    @property
    def expression(self) -> str:
        """The sum of all vectors."""
        return " + ".join(self.vectors)


def compare_headers(base: str, tuned: str, folders: bool = False) -> Opened:
    """Open a base and its fine-tunes, adapters or vectors, one a line; nothing but headers and adapters is read.

    Args:
        base (`str`):
            A Hub id; it may be empty for adapters, which name theirs.
        tuned (`str`):
            Hub ids, one a line.
        folders (`bool`, *optional*, defaults to `False`):
            Whether folders of this machine are taken, too.

    Raises:
        `TaskVectorError`: If something is missing, or does not fit.
    """
    base, lines = base.strip(), [line.strip() for line in tuned.splitlines() if line.strip()]
    if not lines:
        raise BadValueError("name a fine-tune, a LoRA adapter or a saved task vector: one Hub id a line.")
    if len(lines) > MOST_VECTORS:
        raise BadValueError(f"{len(lines)} are too many here: name {MOST_VECTORS} at most.")
    for where in filter(None, (base, *lines)):
        _check_place(where, folders)
    sources = {_name(where, i, lines): where for i, where in enumerate(lines)}
    kinds = {name: kind_of(where, base or None, False).kind for name, where in sources.items()}
    vectors = {name: _open(where, base or None, name, stream=True) for name, where in sources.items()}
    if not base:
        try:
            base = find_base(next(iter(vectors.values())).provenance)
        except BadValueError:
            raise BadValueError(f"{lines[0]} does not tell where its base lies: name the base.") from None
        _check_place(base, folders)
    checkpoint = open_checkpoint(base, token=False, stream=True)
    for vector in vectors.values():
        check_fits(vector, checkpoint)
    parameters = sum(math.prod(source.shape) for source in checkpoint.tensors.values())
    remote = [where for where in dict.fromkeys((base, *sources.values())) if not is_folder(where)]
    download = sum(weights_size(where, False) or 0 for where in remote)
    rows = [f"| {name} | {kinds[name]} | {_changed(vector, checkpoint.tensors)} |" for name, vector in vectors.items()]
    text = "\n".join(
        [
            f"The headers fit: **{checkpoint.name}** has {_count(parameters)} parameters in "
            f"{len(checkpoint.tensors)} tensors.",
            "",
            "| vector | from a | changes |",
            "|---|---|---|",
            *rows,
            "",
            *_costs(parameters, download),
        ]
    )
    return Opened(base, sources, vectors, parameters, download, text)


def extract(opened: Opened) -> Opened:
    """The same with its weights on this machine, if they fit on the disk; what is here already is not read again."""
    if not opened.fits_on_disk:
        return opened
    vectors = {name: _open(where, opened.base, name, stream=False) for name, where in opened.sources.items()}
    return Opened(opened.base, opened.sources, vectors, opened.parameters, opened.download, opened.text)


def look_at(opened: Opened) -> tuple[list[str], list[list[str]], "list[Figure]"]:
    """Norms, stable ranks and cosines by layer: the head and the rows of a table, and figures."""
    vectors = opened.vectors
    pairs = list(itertools.combinations(vectors, 2))
    cosines = cosine_matrix(vectors, progress=False) if pairs else None
    norms = {name: _by_layer(vector) for name, vector in vectors.items()}
    ranks = {}
    for name, vector in vectors.items():
        try:
            ranks[name] = stable_ranks(vector, progress=False)
        except BadValueError:  # no matrix that is known by its name: the norms stand alone
            continue
    found = {layer for each in norms.values() for layer in each}
    layers = sorted(found, key=lambda each: (not each.isdigit(), int(each) if each.isdigit() else 0))
    head = ["layer", *(f"‖{name}‖" for name in vectors), *(f"stable rank of {name}" for name in ranks)]
    head += [f"cos({one}, {other})" for one, other in pairs]
    rows = []
    for layer in layers:
        row = [layer, *(f"{each.get(layer, 0.0):.4g}" for each in norms.values())]
        for each in ranks.values():
            of_layer = [m.stable_rank for m in each.matrices if str(m.layer) == layer and m.spectral]
            row.append(f"{len(of_layer) / sum(1 / rank for rank in of_layer):.2f}" if of_layer else "–")
        for one, other in pairs:
            assert cosines is not None
            i, j = cosines.names.index(one), cosines.names.index(other)
            value = cosines.by_layer[layer][i][j] if layer in cosines.by_layer else math.nan
            row.append("–" if math.isnan(value) else f"{value:+.3f}")
        rows.append(row)
    figures = [] if cosines is None else [cosines.figure("layers")]
    return head, rows, [*figures, *(each.figure() for each in ranks.values())]


def combined(opened: Opened, expression: str) -> TaskVector:
    """What an expression of the vectors' names stands for; it is parsed, and never evaluated as code."""
    return evaluate_expression(expression.strip() or opened.expression, opened.vectors)


class LiveModel:
    """One model in memory, with an edit on it whose λ can be moved.

    A vector of low-rank changes is attached beside the weights, so that both answers are one batch; any other is
    written into the weights, and taken out again.
    """

    def __init__(self) -> None:
        self.close()

    def answers(self, opened: Opened, expression: str, prompt: str, scale: float, words: int) -> tuple[str, str]:
        """How the untouched model and the edited one go on with a prompt, greedily."""
        vector = combined(opened, expression)
        self._load(opened)
        self._put(vector)
        ids = self._tokenizer(prompt, return_tensors="pt").input_ids
        if not ids.shape[1]:
            raise BadValueError("write the beginning of a text.")
        room = getattr(self._model.config, "max_position_embeddings", None) or ids.shape[1] + words
        ids = ids[:, -max(1, room - words) :]
        if isinstance(self._edit, AttachedEdit):
            self._edit.set_row_scales([0.0, scale])
            both = self._generate(ids.repeat(2, 1), words)
        else:
            both = []
            for each in (0.0, scale):
                self._edit.set_scale(each)
                both += self._generate(ids, words)
        before, after = both
        return before, after

    def close(self) -> None:
        """Forget the model."""
        self._base = self._fingerprint = ""
        self._model = self._tokenizer = self._edit = None

    def _load(self, opened: Opened) -> None:
        if self._base == opened.base:
            return
        self.close()
        needed = 2 * 4 * opened.parameters  # in fp32; an edit of the weights keeps the originals
        free = free_memory(torch.device("cpu"))
        if needed > free or not opened.fits_on_disk:
            raise UnsupportedError(
                f"this model is too large to be tried here: it takes {memory_size(needed)}, and {memory_size(free)} "
                "are free. Merging it works all the same: that reads and writes one shard after another."
            )
        self._tokenizer = load_tokenizer(opened.base, token=False)
        self._model = load_for_evaluation(opened.base, device="cpu", token=False)
        self._base = opened.base

    def _put(self, vector: TaskVector) -> None:
        if self._fingerprint == vector.fingerprint:
            return
        if self._edit is not None:
            self._edit.restore()
            self._edit, self._fingerprint = None, ""
        try:
            check_editable(vector, self._model, merge=False)
            self._edit = vector.edit(self._model, 0.0, merge=False)
        except UnsupportedError:
            self._edit = vector.edit(self._model, 0.0)
        self._fingerprint = vector.fingerprint

    def _generate(self, ids: torch.Tensor, words: int) -> list[str]:
        pad = self._tokenizer.pad_token_id
        pad = self._tokenizer.eos_token_id if pad is None else pad
        with torch.inference_mode():
            whole = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=words,
                do_sample=False,
                pad_token_id=pad,
            )
        return self._tokenizer.batch_decode(whole[:, ids.shape[1] :], skip_special_tokens=True)


def card(opened: Opened, expression: str, scale: float, product: Product, repo_id: str, purpose: str) -> str:
    """The card that a push would make: what is pushed is computed once, and thrown away, file by file."""
    with tempfile.TemporaryDirectory(prefix="taskvec-space-") as temporary:
        folder = Path(temporary) / "card"
        _write(product, combined(opened, expression), opened, scale)(folder)
        return card_for(open_artifact(folder), repo_id=repo_id.strip() or None, purpose=purpose.strip() or None)


def push(
    opened: Opened,
    expression: str,
    scale: float,
    product: Product,
    repo_id: str,
    purpose: str,
    private: bool,
    token: str,
) -> Pushed:
    """Push with a visitor's own token, and with no other.

    Raises:
        `TaskVectorError`: If there is no token, or the Hub refuses.
    """
    if not token.strip():
        raise BadValueError("a push needs your own token, one that may write: huggingface.co/settings/tokens")
    if not repo_id.strip():
        raise BadValueError("name the repository: me/model")
    vector = combined(opened, expression)
    options: Any = {"token": token.strip(), "private": private, "purpose": purpose.strip() or None, "progress": False}
    if product == "the merged model":
        return vector.apply(opened.base, push_to=repo_id.strip(), scale=scale, **options)
    if product == "the task vector":
        _check_disk(2 * vector.nbytes)
        return vector.push_to_hub(repo_id.strip(), **options)
    return vector.push_adapter_to_hub(repo_id.strip(), scale=scale, base=opened.base, **options)


def _write(product: Product, vector: TaskVector, opened: Opened, scale: float) -> Callable[[Path], object]:
    if product == "the merged model":
        stream = not opened.fits_on_disk

        def forget(path: Path) -> None:
            path.write_bytes(b"")

        return lambda folder: apply(
            vector, opened.base, folder, scale=scale, stream=stream, token=False, progress=False, take=forget
        )
    if product == "the task vector":
        _check_disk(2 * vector.nbytes)
        return lambda folder: vector.save(folder, progress=False)
    return lambda folder: vector.to_adapter(folder, base=opened.base, scale=scale, progress=False)


def _open(where: str, base: str | None, name: str, stream: bool) -> TaskVector:
    if stream and base and kind_of(where, base, False).kind == "model":
        return TaskVector.from_finetuned(base, where, name=name, stream=True, token=False, progress=False)
    return open_vector(where, base, name=name, token=False)


def _check_place(where: str, folders: bool) -> None:
    if not folders and ("/" not in where or is_folder(where) or where.startswith((".", "/", "~"))):
        raise BadValueError(f"{where[:100]!r} is no Hub id: write it as owner/name, or owner/name@revision.")


def _name(where: str, number: int, lines: list[str]) -> str:
    label = label_for(where.partition("@")[0])
    return label if [label_for(each.partition("@")[0]) for each in lines].count(label) == 1 else f"{label}_{number + 1}"


def _changed(vector: TaskVector, tensors: Mapping[str, Any]) -> str:
    kind = "low-rank factors" if vector.is_low_rank else "dense differences"
    return f"{len(vector)} of {len(tensors)} tensors, {kind}, {file_size(vector.nbytes)}"


def _costs(parameters: int, download: int) -> list[str]:
    lines = [
        f"- **Extract and look**: {file_size(download)} to download, {file_size(_free_disk())} of disk free, about "
        f"{_minutes(download)}."
        if download
        else "- **Extract and look**: everything is on this machine already."
    ]
    if download >= _free_disk():
        lines[0] += " Too much for this disk: tensors are read from the Hub one by one."
    free = free_memory(torch.device("cpu"))
    live = 2 * 4 * parameters
    lines.append(
        f"- **Try λ**: {memory_size(live)} of memory at most, {memory_size(free)} are free"
        + (": too large for here, but it can be merged." if live > free else ".")
    )
    written = 4 * parameters
    lines.append(
        f"- **Merge**: {memory_size(STREAMING_MEMORY)} of memory and the disk of one shard; up to {file_size(written)} "
        f"to upload, about {_minutes(download + written)}."
    )
    return [*lines, "", f"Times are told for {file_size(_NETWORK)} a second."]


def _minutes(nbytes: int) -> str:
    seconds = nbytes / _NETWORK
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{max(2, round(seconds))} seconds"


def _count(parameters: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if parameters >= size:
            return f"{parameters / size:.3g} {word}"
    return f"{parameters:,}"


def _free_disk() -> int:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = next(each for each in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if each.exists())
    return shutil.disk_usage(place).free


def _check_disk(nbytes: int) -> None:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if nbytes > free:
        raise OutputError(f"the vector takes {file_size(nbytes)} of disk at most, and {file_size(free)} are free here.")


def _by_layer(vector: TaskVector) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, norm in vector.norms().items():
        layer = layer_of(name)
        key = _OUTSIDE if layer is None else str(layer)
        squares[key] = squares.get(key, 0.0) + norm**2
    return {layer: square**0.5 for layer, square in squares.items()}
