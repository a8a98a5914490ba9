"""What a model *is*, as a digest that is the same wherever it was loaded from. There are two of them.

- `full_fingerprint` (here) is of a live model, and reads all that decides its output: every byte of its weights and
  buffers, its configuration, its active adapters, and what hooks say about themselves (an attached edit is one).
  Results that are kept on disk are found again by it.
- `Checkpoint.sampled_fingerprint` (`checkpoint.py`) is of stored weights under their canonical names, and reads their
  names, shapes, dtypes and a few samples of each: it tells copies of a model, sharded in whatever way, from another
  model, in a moment and without loading it. Provenance records it.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hf_taskvec.models.layout import is_peft_model
from hf_taskvec.models.sharded_weights import Gathered, is_sharded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Where a model came from and what wrote it are not what it is.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash"}
# Their own hooks move, cast or record tensors, and change nothing that a model says.
_LIBRARIES = {"accelerate", "hf_taskvec", "peft", "torch", "transformers"}


@runtime_checkable
class DescribesItself(Protocol):
    """A hook, or the object whose method is one, that says what it does to a model's output."""

    @property
    def fingerprint(self) -> str:
        """Tells it, and how strong it is, from any other; empty if it changes nothing."""


def full_fingerprint(model: "PreTrainedModel") -> str:
    """sha256 over all that decides the model's output; equal for equal models wherever they were loaded.

    Every byte of every weight enters: two fine-tunes may differ in a few elements only. Weights that accelerate keeps
    on the CPU or on disk are read from there. Hooks enter by what they say (`DescribesItself`), others by their name,
    which does not tell their settings: see `nameless_hooks`.
    """
    from accelerate.utils import align_module_device, has_offloaded_params

    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_IDENTITY}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(_adapters(model).encode())
    digest.update("".join(f"{where} {text}\n" for where, text, _ in _hooks(model) if text).encode())
    for name, module in model.named_modules():
        if has_offloaded_params(module):
            with align_module_device(module, execution_device="cpu"):
                _add(digest, name, module)
        else:
            _add(digest, name, module)
    return digest.hexdigest()


def nameless_hooks(model: "torch.nn.Module") -> list[str]:
    """The hooks, and methods put in place of a module's own, of which nobody can tell what they change.

    A hook tells it with a `fingerprint`, its own attribute or that of the object whose method it is.
    """
    return [text for _, text, is_described in _hooks(model) if not is_described]


def hooked_modules(model: "torch.nn.Module") -> list[str]:
    """The modules with a hook that may change the output, now or at another λ: what weights alone do not tell."""
    return list(dict.fromkeys(path or type(model).__name__ for path, _, _ in _hooks(model, ("forward",))))


def _hooks(
    model: "torch.nn.Module", methods: tuple[str, ...] = ("forward", "generate")
) -> Iterator[tuple[str, str, bool]]:
    """Of each hook that may change the output: the module it is on, what is known of it, and if it said so itself.

    What is known is an empty text for a hook that says that it changes nothing now. A method that was put in the place
    of a module's own counts as one: a filter of what is generated, for example.
    """
    for path, module in model.named_modules():
        replaced = [module.__dict__[name] for name in methods if name in module.__dict__]
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *replaced):
            owner = getattr(hook, "__self__", hook)
            said = hook if isinstance(hook, DescribesItself) else owner
            if isinstance(said, DescribesItself):
                yield path, said.fingerprint, True
                continue
            named: Any = hook if hasattr(hook, "__qualname__") else type(hook)
            if named.__module__.split(".")[0] not in _LIBRARIES and "_hf_hook" not in module.__dict__:
                yield path, f"{named.__module__}.{named.__qualname__}", False


def _add(digest: "hashlib._Hash", prefix: str, module: "torch.nn.Module") -> None:
    import torch

    stored: dict[str, Any] = {}
    packing: Any = getattr(module._parameters.get("weight"), "quant_state", None)
    if getattr(packing, "packing_format_for_cpu", False):
        # bitsandbytes repacked it for the processor when it was run. Asked for what is stored, it would bring the
        # weight back in place, and mix up its scales unless they are quantised as well.
        stored["weight.absmax"] = packing.absmax
    else:
        module._save_to_state_dict(stored, "", keep_vars=False)
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    # Scales of quantised weights are neither parameters nor buffers, and stored beside them.
    known = dict(own)
    beside = [(name, each) for name, each in stored.items() if name not in known and isinstance(each, torch.Tensor)]
    for name, tensor in sorted([*own, *beside], key=lambda pair: pair[0]):
        _add_tensor(digest, f"{prefix}.{name}", tensor)


def _add_tensor(digest: "hashlib._Hash", name: str, tensor: "torch.Tensor") -> None:
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    if is_sharded(tensor):
        tensor = Gathered(tensor).read()
    if is_traceable_wrapper_subclass(tensor):  # torchao's: codes and scales that look like one tensor
        parts, context = tensor.__tensor_flatten__()
        digest.update(repr(context).encode())
        for part in parts:
            _add_tensor(digest, f"{name}.{part}", getattr(tensor, part))
        return
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)


def _adapters(model: "PreTrainedModel") -> str:
    """The strengths of a PEFT model's active adapters: they change the output, but are no parameter."""
    if not is_peft_model(model):
        return ""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [
        (
            name,
            list(layer.active_adapters),
            layer.disable_adapters,
            layer.merged,
            layer.__dict__.get("scaling"),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    ]
    return repr(layers)
