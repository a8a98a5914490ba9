"""The layout of a model class: the canonical name of each weight, and how files and live models call and store it.

The canonical name is the one that transformers writes to disk. transformers itself tells how the names in a live model
relate to it (its conversion tables), which weights are tied, and which layers store their weight transposed; all of
that is read off a model built on the meta device (`meta_models.py`), which costs no memory.

Whatever `save_pretrained` stores in floating point is a weight here: a persistent buffer, such as a router's
`e_score_correction_bias`, as much as a parameter.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch

from hf_taskvec.algebra import parameter_names
from hf_taskvec.errors import MismatchError, some
from hf_taskvec.models import layout_cache
from hf_taskvec.models.meta_models import build_meta_model, most_parameters
from hf_taskvec.models.model_classes import causal_class, class_of_model, known_class, own_class
from hf_taskvec.models.restructured import Part, stored_parts

# Causal masks and rotary tables that older checkpoints carry as if they were weights.
_BUFFERS = re.compile(r"(\.attn\.(attention\.)?|\.attention\.)(bias|masked_bias)$|rotary_emb\.\w*inv_freq$")
# What a config tells of its file and of how the weights are stored, which changes no name and no shape.
_NOT_OF_THE_CLASS = {"_name_or_path", "quantization_config", "transformers_version"}
_PEFT_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")
# Of layers that were compiled, or whose activations are computed twice, each by itself.
_OTHER_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")
_PEFT_OWN = re.compile(r"\.(lora_\w+|modules_to_save|trainable_tokens_\w+)(\.|$)")


@dataclass(frozen=True)
class Layout:
    """What is known about a model class's parameters. An empty one stands for an unknown architecture.

    All names are canonical ones, unless they are said to be those of the live model.
    """

    architecture: str | None = None
    #: the class of the same model without its head, e.g. `GPT2Model`
    body: str | None = None
    #: name -> shape of what is stored in floating point, parameters and buffers; tied aliases are not among them
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: name -> shape of the stored integer buffers, which no vector holds: a table of token ids, for example
    constants: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: tied alias -> the name that is stored
    tied: Mapping[str, str] = field(default_factory=dict)
    #: those that a whole checkpoint may lack: transformers does not store them, or makes them when it loads a model
    optional: frozenset[str] = frozenset()
    #: those that the body does not have
    head: frozenset[str] = frozenset()
    #: weights that `Conv1D` stores transposed
    conv1d: frozenset[str] = frozenset()
    #: the weights of `nn.Embedding` and its subclasses
    embeddings: frozenset[str] = frozenset()
    #: those of them that look up other rows than they are asked for (OPT's positions), which PEFT does not know
    offset: frozenset[str] = frozenset()
    #: those that have one row for each token: the input embedding and the output head
    vocabulary: frozenset[str] = frozenset()
    #: name in the live model -> canonical name, where they differ one to one
    renamed: Mapping[str, str] = field(default_factory=dict)
    #: name -> shape of live parameters that transformers makes of other stored tensors when it loads them: fused
    #: experts, or projections that are stored in one piece
    restructured: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: those stored tensors
    restructured_stored: frozenset[str] = frozenset()
    #: those of them that consist of parts of live parameters -> these
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    #: name in the live model -> shape, of parameters that are no layer's weight or bias, and that LoRA can change as
    #: they are: fused experts above all. Those of one module are in the order in which it has them
    bare: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: those of them whose last dimension is that of the outputs
    bare_transposed: frozenset[str] = frozenset()
    #: patterns of names in files that transformers knows and leaves out when it loads them
    ignored: tuple[str, ...] = ()
    #: what the body's parameters start with in the live model, e.g. `transformer.`
    prefix: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same in plain values; see `from_json`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Layout":
        """A layout from what `to_json` gave, after JSON made lists of its tuples."""
        blank, found = cls(), dict(values)
        for name in ("shapes", "constants", "restructured", "bare"):
            found[name] = {parameter: tuple(shape) for parameter, shape in values[name].items()}
        found["parts"] = {
            parameter: tuple(Part(live, tuple(shape), tuple(stride), *rest) for live, shape, stride, *rest in each)
            for parameter, each in values["parts"].items()
        }
        for kind in (frozenset, tuple):
            found |= {name: kind(value) for name, value in values.items() if isinstance(getattr(blank, name), kind)}
        return cls(**found)

    def canonical(self, name: str) -> str:
        """The canonical name of a live parameter's name."""
        return self.renamed.get(name, name)

    def live(self, name: str) -> str:
        """The live parameter's name of a canonical name."""
        return {disk: live for live, disk in self.renamed.items()}.get(name, name)

    def live_form(self, name: str) -> str | None:
        """The live name of a parameter that is stored in another form, with the body's prefix or without it."""
        return next((each for each in (name, self.prefix + name) if each in self.restructured), None)

    def is_vocabulary(self, name: str) -> bool:
        """Whether a parameter has one row for each token; by its name alone, if the architecture is not known."""
        return name in self.vocabulary if self.shapes else parameter_names.is_vocabulary(name)

    def place(self, names: Iterable[str], where: str, classes: Sequence[str] = ()) -> dict[str, str]:
        """Canonical name (or tied alias) -> the given name, for every name that is stored.

        Names with the base model's prefix missing or superfluous are recognised; buffers that transformers no longer
        has, and parts that it does not load, are left out. Anything else is an error.

        Args:
            names (`Iterable[str]`):
                Those in the files, or in the live model.
            where (`str`):
                What the model is called in a message.
            classes (`Sequence[str]`, *optional*):
                The model's class, as its config or the live model tells it.

        Raises:
            `MismatchError`: If a name is not known, or two are the same weight.
        """
        if not self.shapes:
            return {name: name for name in names}
        placed: dict[str, str] = {}
        unknown = []
        for name in names:
            found = self._known(name)
            if found in placed:
                raise MismatchError(
                    f"{where}: {placed[found]} and {name} both are {found} of {self.architecture}. Save the model "
                    "again with save_pretrained()."
                )
            if found is not None:
                placed[found] = name
            elif not _BUFFERS.search("." + name) and not any(re.search(each, name) for each in self.ignored):
                unknown.append(name)
        if unknown:
            raise self._unknown(unknown, where, classes)
        return placed

    def _known(self, name: str) -> str | None:
        """The canonical name (or tied alias) of a name in files or in a live model."""
        whole, bare = self.prefix + name, name.removeprefix(self.prefix)
        candidates = (name, self.canonical(name), self.canonical(whole), whole, self.canonical(bare), bare)
        return next((c for c in candidates if c in self.shapes or c in self.tied or c in self.constants), None)

    def _unknown(self, names: list[str], where: str, classes: Sequence[str]) -> MismatchError:
        these = f"{some(names)} {'is' if len(names) == 1 else 'are'} not among the parameters of {self.architecture}"
        if self.is_another_class(classes):
            return self._another_class(where, classes, these)
        if live := [name for name in names if self.live_form(name)]:
            return MismatchError(
                f"{where} holds {some(live)} in the form of a live "
                f"{self.architecture}, which is stored in another. Load it, set model._weight_conversions = None "
                "(transformers remembers the form there), and save it again with save_pretrained()."
            )
        return MismatchError(
            f"{where}: {these}, which its config names. The files and the config do not belong together; "
            "save the model again with save_pretrained()."
        )

    def is_another_class(self, classes: Sequence[str]) -> bool:
        """Whether a model's class is told, and is neither this architecture nor its body."""
        return bool(classes) and not {self.architecture, self.body} & set(classes)

    def _another_class(self, where: str, classes: Sequence[str], why: str) -> MismatchError:
        return MismatchError(
            f"{where} is a {' and a '.join(classes)}, which transformers does not know as a class of this type, and no "
            f"{self.architecture}: {why}. Give a model of a class that transformers has, or without its config.json."
        )

    def check_whole(self, shapes: Mapping[str, tuple[int, ...]], where: str, classes: Sequence[str] = ()) -> None:
        """Refuse a model that lacks something of its architecture, or has it in another shape than its config says.

        Args:
            shapes (`Mapping[str, tuple[int, ...]]`):
                Canonical name -> shape of everything that the model has.
            where (`str`):
                What the model is called in a message.
            classes (`Sequence[str]`, *optional*):
                The model's class, as its config or the live model tells it. A body needs no head.

        Raises:
            `MismatchError`: Naming what is missing or differs.
        """
        expected = {**self.shapes, **self.constants}
        spared = self.optional
        if self.body in classes and not self.head & shapes.keys():
            spared |= self.head
        missing = [name for name in expected if name not in shapes and name not in spared]
        if missing:
            lacks = f"it lacks {some(missing)} ({len(missing)} of {len(expected)} tensors)"
            if self.is_another_class(classes):
                raise self._another_class(where, classes, lacks)
            raise MismatchError(
                f"{where} is not a whole {self.architecture}: {lacks}. Download it or save it again whole, or give it "
                "the config that belongs to it."
            )
        for name, shape in shapes.items():
            if name in expected and tuple(shape) != expected[name]:
                raise MismatchError(
                    f"{where}: {name} has shape {list(shape)}, but its config makes it {list(expected[name])}. The "
                    "weights and the config do not belong together; save the model again with save_pretrained()."
                )


def unwrapped(name: str) -> str | None:
    """A name in a PEFT-wrapped model as the base model has it; None for a parameter that PEFT added.

    >>> unwrapped("base_model.model.lm_head.base_layer.weight")
    'lm_head.weight'
    >>> unwrapped("base_model.model.lm_head.lora_A.default.weight") is None
    True
    """
    if _PEFT_OWN.search(name):
        return None
    return _PEFT_WRAPPERS.sub("", _OTHER_WRAPPERS.sub("", name).removeprefix("base_model.model."))


def how_to_untie(head: str) -> str:
    """What to do to get an untied copy of a model; `head` is the live name of the weight that is tied."""
    return (
        f"To untie a model, give it a head of its own (model.{head} = torch.nn.Parameter(model.{head}.clone())), set "
        "model.config.tie_word_embeddings = False, and save it."
    )


def is_peft_model(model: object) -> bool:
    """Whether a model is a `PeftModel`, without importing peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def without_peft(model: Any) -> Any:
    """The model itself, without PEFT's wrapper if it has one."""
    return model.get_base_model() if is_peft_model(model) else model


def layout_of_config(config: Mapping[str, Any] | None, stored: Mapping[str, Sequence[int]] | None = None) -> Layout:
    """The layout of the model that a `config.json` describes, of whatever class.

    Args:
        config (`Mapping[str, Any]`, *optional*):
            What the file says.
        stored (`Mapping[str, Sequence[int]]`, *optional*):
            The shapes of the tensors in the model's files: a config that describes a much larger model is refused
            before that is built.

    Raises:
        `MismatchError`: If no such model can be built.
        `UnsupportedError`: If the config does not tell the model's class.
    """
    if not config or "model_type" not in config:
        return Layout()
    return _layout_of_json(_text(config), most_parameters(config, stored))


def layout_of_model(model: Any) -> Layout:
    """The layout of a live model, wrapped by PEFT or not, of whatever class."""
    inner = without_peft(model)
    config = getattr(inner, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return Layout()
    settings, shapes = config.to_dict(), {name: each.shape for name, each in inner.named_parameters()}
    cls = class_of_model(inner)
    if cls is None or "model_type" not in settings:
        return layout_of_config(settings, shapes)
    settings["architectures"] = [cls.__name__]  # the config may still name the class that was loaded first
    if own_class(cls.__name__) is cls:
        return layout_of_config(settings, shapes)
    return _layout_of_class(_text(settings), most_parameters(settings, shapes), cls)


def _text(config: Mapping[str, Any]) -> str:
    """What the layout follows from, as JSON."""
    of_the_class = {name: value for name, value in config.items() if name not in _NOT_OF_THE_CLASS}
    return json.dumps(of_the_class, sort_keys=True, default=str)


@lru_cache(maxsize=32)
def _layout_of_json(text: str, most: int) -> Layout:
    config = json.loads(text)
    entry = layout_cache.entry_path(config, most) if layout_cache.may_be_kept(config) else None
    if entry is not None and (kept := layout_cache.read_entry(entry)) is not None:
        return Layout.from_json(kept)
    found = _built_layout(config, most)
    # Not if transformers was replaced while it was imported: the entry would tell of another one.
    if entry is not None and found.architecture and entry == layout_cache.entry_path(config, most):
        layout_cache.write_entry(entry, found.to_json())
    return found


@lru_cache(maxsize=32)
def _layout_of_class(text: str, most: int, cls: Any) -> Layout:
    """The layout of a class that somebody made of transformers' parts; of a type of their own it is not known."""
    from transformers import CONFIG_MAPPING

    config = json.loads(text)
    return _layout_of(build_meta_model(config, most, cls)) if config["model_type"] in CONFIG_MAPPING else Layout()


def _built_layout(config: Mapping[str, Any], most: int) -> Layout:
    """The layout that transformers itself tells, by the model that it builds of a config."""
    cls = known_class(config)
    if cls is None:  # an architecture that this transformers does not know
        return Layout()
    model = build_meta_model(config, most, cls)
    # The body of a language model has the names of the whole, so that vectors of the one fit the other.
    causal = causal_class(config["model_type"]) if model.base_model is model else None
    if causal is not None and causal is not cls and isinstance(model.config, causal.config_class):
        whole = build_meta_model(config, most, causal)
        if type(whole.base_model) is cls and whole.base_model.state_dict().keys() == model.state_dict().keys():
            return _layout_of(whole)
    return _layout_of(model)


def _layout_of(model: Any) -> Layout:
    """The layout of a model on the meta device."""
    from transformers.pytorch_utils import Conv1D

    live, disk, parts = stored_parts(model)
    canonical_by_id = {id(tensor): name for name, tensor in disk.items()}
    canonical = {name: canonical_by_id[id(tensor)] for name, tensor in live.items() if id(tensor) in canonical_by_id}

    pairs = model.all_tied_weights_keys.items()
    tied = {canonical[alias]: canonical[owner] for alias, owner in pairs if alias in canonical and owner in canonical}
    shapes = {name: tuple(tensor.shape) for name, tensor in disk.items() if name not in tied}
    integers = {name for name, tensor in disk.items() if not tensor.is_floating_point()}
    is_body = model.base_model is model
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    modules = {canonical.get(f"{n}.weight"): module for n, module in model.named_modules()}
    embeddings = {n: module for n, module in modules.items() if n and isinstance(module, torch.nn.Embedding)}
    return Layout(
        architecture=type(model).__name__,
        body=None if is_body else type(model.base_model).__name__,
        shapes={name: shape for name, shape in shapes.items() if name not in integers},
        constants={name: shape for name, shape in shapes.items() if name in integers},
        tied=tied,
        optional=frozenset(canonical.get(name, name) for name in live if _may_be_missing(model, name)),
        head=frozenset(
            name
            for live_name, name in canonical.items()
            if not is_body and not live_name.startswith(prefix) and name not in tied
        ),
        conv1d=frozenset(name for name, module in modules.items() if name and isinstance(module, Conv1D)),
        embeddings=frozenset(embeddings),
        offset=frozenset(name for name, module in embeddings.items() if hasattr(module, "offset")),
        vocabulary=frozenset(tied.get(canonical[n], canonical[n]) for n in _vocabulary(model) if n in canonical),
        renamed={name: stored for name, stored in canonical.items() if stored != name},
        restructured={name: tuple(tensor.shape) for name, tensor in live.items() if name not in canonical},
        restructured_stored=frozenset(disk.keys() - set(canonical.values())),
        parts={name: parts[name] for name in disk if name in parts},
        bare={name: tuple(live[name].shape) for name in live if _is_bare(name, live[name])},
        bare_transposed=frozenset(
            f"{path}.{name}"
            for path, module in model.named_modules()
            if getattr(module, "is_transposed", False)
            for name in module._parameters
        ),
        ignored=_ignored(model),
        prefix=prefix,
    )


def _is_bare(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim in (2, 3) and tensor.is_floating_point() and not name.endswith((".weight", ".bias"))


def _may_be_missing(model: Any, name: str) -> bool:
    """Whether transformers does not store a live tensor, or does without when it loads a model."""
    patterns = model._keys_to_ignore_on_load_missing or ()
    return name in (model._keys_to_ignore_on_save or ()) or any(re.search(each, name) for each in patterns)


def _ignored(model: Any) -> tuple[str, ...]:
    """Patterns of what files may hold besides, and transformers leaves out: layers for speculation, old buffers."""
    patterns = sorted(model._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("position_ids") for name, _ in model.named_buffers()):  # they used to be stored
        patterns.append(r"(^|\.)position_ids$")
    return tuple(patterns)


def _vocabulary(model: Any) -> list[str]:
    """The live names of the parameters of the input embedding and of the output head."""
    layers = set()
    for get, kinds in (
        (model.get_input_embeddings, torch.nn.Embedding),  # not the patches of a picture
        (model.get_output_embeddings, torch.nn.Embedding | torch.nn.Linear),
    ):
        try:
            end = get()
        except (NotImplementedError, AttributeError):  # a model of pictures or sounds
            continue
        if isinstance(end, torch.nn.Module):  # Perceiver's is a parameter
            layers |= {part for part in end.modules() if isinstance(part, kinds)}
    return [
        f"{path}.{name}" for path, module in model.named_modules() if module in layers for name in module._parameters
    ]
