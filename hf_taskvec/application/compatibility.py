"""Does a vector fit a model? The checks that every way of applying one makes first, on names and shapes alone."""

from collections.abc import Mapping

import torch

from hf_taskvec.algebra.provenance import ModelRecord
from hf_taskvec.algebra.sources import Source, same_bytes
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.algebra.token_rows import rows_of_tokens
from hf_taskvec.errors import ChangedSourceError, MismatchError, UnsupportedError, some
from hf_taskvec.models.checkpoint import Checkpoint, file_digests
from hf_taskvec.models.layout import how_to_untie, layout_of_model
from hf_taskvec.models.live_model import LiveWeight, class_name
from hf_taskvec.models.tensor_files import file_of


def check_fits(vector: TaskVector, model: Checkpoint, strict_base: bool = False, may_grow: bool = False) -> None:
    """Refuse a vector with a parameter that the model does not have, or has in another shape.

    Args:
        vector (`TaskVector`):
            What is to be applied.
        model (`Checkpoint`):
            What it is to be applied to.
        strict_base (`bool`, *optional*, defaults to `False`):
            Also refuse a model that is not, byte for byte, the one that the vector was made from.
        may_grow (`bool`, *optional*, defaults to `False`):
            A vector made with `vocabulary="extend"` may have more embedding rows than the model.

    Raises:
        `MismatchError`: If a name or a shape differs.
        `ChangedSourceError`: If `strict_base` and the model is another one, or the vector does not tell its base.

    """
    _refuse_token_rows(vector)
    _check_names(vector, model)
    _check_ties(vector, model)
    for name in vector:
        shape, found = vector.shape(name), model.tensors[name].shape
        grows = may_grow and model.layout.is_vocabulary(name) and shape[1:] == found[1:] and shape[:1] > found[:1]
        if not (grows and all(term.delta.is_partial for term in vector[name].terms)):
            _check_shape(name, shape, model)
    if strict_base:
        _check_base(vector, model)


def check_fits_live(vector: TaskVector, model: torch.nn.Module, weights: Mapping[str, LiveWeight]) -> None:
    """Refuse a vector that does not fit a live model, or that changes what the live model does not use.

    Args:
        vector (`TaskVector`):
            What is to be applied.
        model (`torch.nn.Module`):
            What it is to be applied to.
        weights (`Mapping[str, LiveWeight]`):
            Those of the model, by their canonical names.

    Raises:
        `MismatchError`: If a name or a shape differs.
        `UnsupportedError`: If the live model holds a parameter in another form than the files, or trains a copy of it.

    """
    layout = layout_of_model(model)
    restructured = [name for name in vector if name in layout.restructured_stored and name not in weights]
    if restructured:
        raise UnsupportedError(
            f"{some(restructured)}: the live {layout.architecture} has no such parameters, and no parts that are them: "
            "transformers puts the elements of these stored tensors in another order when it loads them, or processes "
            "hold shards of them. Use vector.apply(base, output=...) and load the result."
        )
    shadowed = [name for name in vector if name in weights and weights[name].is_shadowed]
    if shadowed:
        raise UnsupportedError(
            f"{some(shadowed)}: PEFT trains a copy of it (modules_to_save or trained tokens), and the model uses the "
            "copy, so an edit of the base would do nothing. Edit the plain model, or merge the adapter first."
        )
    shapes: dict[str, Source] = {name: weight.as_source() for name, weight in weights.items()}
    check_fits(vector, Checkpoint(f"the live {class_name(model)}", shapes, layout))


def _refuse_token_rows(vector: TaskVector) -> None:
    """Rows that are known by tokens have to be placed before; `token_rows.py` does it."""
    if rows := rows_of_tokens(vector):
        raise UnsupportedError(
            f"this vector has rows of added tokens ({some(repr(row.token) for row in rows.values())}), and nothing "
            "says which rows of the model these are. For a live model use hf_taskvec.application.token_rows.add_tokens("
            "vector, model, tokenizer); a folder is written by apply(). Or leave them out with vector.filter(exclude="
            "...)."
        )


def _check_names(vector: TaskVector, model: Checkpoint) -> None:
    missing = [name for name in vector if name not in model.tensors]
    if not missing:
        return
    untied = [name for name in missing if name in model.layout.tied]
    if untied and len(untied) == len(missing):
        raise MismatchError(
            f"the vector changes {some(untied)} alone, but {model.where} ties it to "
            f"{some(model.layout.tied[name] for name in untied)}. Leave the head out with vector.filter(exclude=...), "
            f"or untie the model first. {how_to_untie(model.layout.live(untied[0]))}"
        )
    made_for = vector.provenance.architectures
    source = " and ".join(sorted(made_for)) or "another model"
    matching = len(vector) - len(missing)
    if made_for == {model.layout.architecture}:
        raise MismatchError(
            f"{model.where} does not have {some(missing)}, which this vector changes ({matching} of {len(vector)} "
            "names match). Is its head tied, or was the vector's model saved with other parts?"
        )
    way_out = "Apply it to a model of its own architecture"
    if matching and made_for:
        way_out += ", or leave the others out: extract it with heads='exclude', or use vector.filter(exclude=...)"
    raise MismatchError(
        f"this vector was made for {source}; {model.where} is "
        f"{model.layout.architecture or 'of unknown architecture'}: {matching} of {len(vector)} names match (missing: "
        f"{some(missing)}). {way_out}."
    )


def _check_ties(vector: TaskVector, model: Checkpoint) -> None:
    """Refuse to change one of two weights that are the same one where the vector comes from."""
    bases = [origin.base for origin in vector.provenance.origins if origin.base]
    for alias, owner in dict.fromkeys(pair for base in bases for pair in base.tied):
        is_apart = alias in model.tensors and alias not in model.layout.tied
        if owner in vector and alias not in vector and is_apart:
            raise MismatchError(
                f"the vector changes {owner}, which is {alias} as well in its own base; {model.where} has them apart, "
                f"and would get half of the change. Apply it to a model that ties them, or leave {owner} out with "
                "vector.filter(exclude=...)."
            )


def _check_shape(name: str, shape: tuple[int, ...], model: Checkpoint) -> None:
    found = model.tensors[name].shape
    if found == shape:
        return
    if model.layout.is_vocabulary(name) and found[1:] == shape[1:]:
        raise MismatchError(
            f"{name}: the vocabulary sizes differ, {found[0]} in the model and {shape[0]} in the vector. Extract the "
            "vector with vocabulary='truncate'. (One that was extracted with vocabulary='extend' can be applied to a "
            "checkpoint, which then gets the additional rows.)"
        )
    if name in model.layout.head:
        raise MismatchError(
            f"{name}: the heads differ, {list(found)} in the model and {list(shape)} in the vector, as those of other "
            "tasks do. Extract the vector with heads='exclude', or leave the head out with vector.filter(exclude=...)."
        )
    raise MismatchError(
        f"{name}: the model has shape {list(found)}, the vector {list(shape)}. They are models of different sizes."
    )


def _check_base(vector: TaskVector, model: Checkpoint) -> None:
    """Every byte of the base must be known, and be the model's."""
    bases = {origin.label: origin.base for origin in vector.provenance.origins if origin.base}
    if not bases:
        raise ChangedSourceError(
            "this vector recorded no base, so strict_base cannot be checked. Leave it out, or extract the vector from "
            "models or an adapter."
        )
    for label, base in bases.items():
        is_other = base.fingerprint is not None and base.fingerprint != model.sampled_fingerprint
        is_same = False if is_other else _is_same(base, model)
        if is_same is None:
            raise ChangedSourceError(
                f"{label} has recorded no more of its base than its name{' and samples' if base.fingerprint else ''}, "
                f"so strict_base cannot tell whether {model.where} is that base, byte by byte. Extract it again from "
                "its base in a folder and apply it at once; a full fine-tune that is saved whole records every byte "
                "for later. Or leave strict_base out."
            )
        if not is_same:
            raise ChangedSourceError(
                f"{model.where} is not the base that this vector was made from: the base of {label} has other weights. "
                "Leave out strict_base to apply it to another model of the same architecture."
            )


def _is_same(base: ModelRecord, model: Checkpoint) -> bool | None:
    """Whether a model has the recorded base's bytes; None if the record does not tell."""
    if base.weights is not None:
        return same_bytes(base.weights, model.tensors)
    if base.sha256 is not None:
        return model.has_digest(base.sha256)
    paths = {file_of(source).path for source in model.stored.values()}
    files = {path.name: path for path in paths}
    if dict(base.files).keys() == files.keys():  # as the Hub told them: of whole files, so equal only as they are
        return True if base.files == file_digests(files) else None
    return None
