"""What a model *is*, as a digest that is the same wherever it was loaded from. There are two of them.

- `full_fingerprint` (here) is of a live model, and reads all that decides its output: every byte of its weights and
  buffers, its configuration and its active adapters. Results that are kept on disk are found again by it.
- `Checkpoint.sampled_fingerprint` (`checkpoint.py`) is of stored weights under their canonical names, and reads their
  names, shapes, dtypes and a few samples of each: it tells copies of a model, sharded in whatever way, from another
  model, in a moment and without loading it. Provenance records it.
"""

import hashlib
import json
from typing import TYPE_CHECKING

from hf_taskvec.models.layout import is_peft_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Where a model came from and what wrote it are not what it is.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash"}


def full_fingerprint(model: "PreTrainedModel") -> str:
    """sha256 over all that decides the model's output; equal for equal models wherever they were loaded.

    Every byte of every weight enters: two fine-tunes may differ in a few elements only. Weights that accelerate keeps
    on the CPU or on disk are read from there.
    """
    from accelerate.utils import align_module_device, has_offloaded_params

    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_IDENTITY}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(_adapters(model).encode())
    for name, module in model.named_modules():
        if has_offloaded_params(module):
            with align_module_device(module, execution_device="cpu"):
                _add(digest, name, module)
        else:
            _add(digest, name, module)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", prefix: str, module: "torch.nn.Module") -> None:
    import torch

    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in sorted(own, key=lambda pair: pair[0]):
        digest.update(f"{prefix}.{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
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
