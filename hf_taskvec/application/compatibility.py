"""Does a vector fit a model? The checks that every way of applying one makes first."""

from collections.abc import Mapping

from hf_taskvec.algebra.deltas import Rows
from hf_taskvec.algebra.parameter_names import is_vocabulary
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import ChangedSourceError, MismatchError, some
from hf_taskvec.models.checkpoint import Checkpoint


def check_fits(vector: TaskVector, model: Checkpoint, strict_base: bool = False, may_grow: bool = False) -> None:
    """Refuse a vector with a parameter that the model does not have, or has in another shape.

    With `may_grow`, a vector made with `vocabulary="extend"` may have more embedding rows than the model.
    """
    _check_names(vector, model)
    for name in vector:
        shape, found = vector.shape(name), model.tensors[name].shape
        grows = may_grow and is_vocabulary(name) and shape[1:] == found[1:] and shape[:1] > found[:1]
        if not (grows and all(isinstance(term.delta, Rows) for term in vector[name])):
            _check_shape(name, shape, model.tensors)
    if strict_base:
        _check_base(vector, model)


def _check_names(vector: TaskVector, model: Checkpoint) -> None:
    missing = [name for name in vector if name not in model.tensors]
    if not missing:
        return
    untied = [name for name in missing if name in model.layout.tied]
    if untied and len(untied) == len(missing):
        raise MismatchError(
            f"the vector changes {some(untied)} alone, but {model.where} ties it to "
            f"{some(model.layout.tied[name] for name in untied)}. Leave the head out with vector.filter(exclude=...), or "
            "untie the model first: give it a head of its own (model.lm_head.weight = torch.nn.Parameter("
            "model.lm_head.weight.clone())), set model.config.tie_word_embeddings = False, and save it."
        )
    made_for = {m.architecture for o in vector.provenance.origins for m in (o.base, o.tuned) if m and m.architecture}
    source = " and ".join(sorted(made_for)) or "another model"
    matching = len(vector) - len(missing)
    if made_for == {model.layout.architecture}:
        raise MismatchError(
            f"{model.where} does not have {some(missing)}, which this vector changes ({matching} of {len(vector)} names "
            "match). Is its head tied, or was the vector's model saved with other parts?"
        )
    raise MismatchError(
        f"this vector was made for {source}; {model.where} is {model.layout.architecture or 'of unknown architecture'}: "
        f"{matching} of {len(vector)} names match (missing: {some(missing)}). Apply it to a model of its own architecture."
    )


def _check_shape(name: str, shape: tuple[int, ...], tensors: Mapping[str, Source]) -> None:
    found = tensors[name].shape
    if found == shape:
        return
    if is_vocabulary(name) and found[1:] == shape[1:]:
        raise MismatchError(
            f"{name}: the vocabulary sizes differ, {found[0]} in the model and {shape[0]} in the vector. Extract the vector "
            "with vocabulary='truncate'. (One that was extracted with vocabulary='extend' can be applied to a checkpoint, "
            "which then gets the additional rows.)"
        )
    raise MismatchError(
        f"{name}: the model has shape {list(found)}, the vector {list(shape)}. They are models of different sizes."
    )


def _check_base(vector: TaskVector, model: Checkpoint) -> None:
    known = {o.base.fingerprint for o in vector.provenance.origins if o.base and o.base.fingerprint}
    if not known:
        raise ChangedSourceError(
            "this vector recorded no fingerprint of its base, so strict_base cannot be checked. Extract it with base=."
        )
    if known != {model.sampled_fingerprint}:
        raise ChangedSourceError(
            f"{model.where} is not the base that this vector was made from (fingerprints differ). Leave out strict_base "
            "to apply it to another model of the same architecture."
        )
