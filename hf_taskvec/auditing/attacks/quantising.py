"""Quantising: run a model with 4 or 8 bits a weight, and see whether what it forgot is back.

An unlearned model is close to the model that knew. Where the distance is less than that between two numbers of the
quantised format, both become the same (arXiv 2410.16454). What becomes of single weights `TaskVector.survival` tells;
here the quantised model itself is made, to be asked.

Which layers are quantised is transformers' own rule for bitsandbytes: linear layers but for the output head
(`models.quantised_layers`). The numbers are in `algebra.quantisation`.
"""

import copy
import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from hf_taskvec.algebra.quantisation import SCHEMES, Scheme, check_scheme, quantised_values
from hf_taskvec.algebra.rounding import not_finite
from hf_taskvec.auditing.attacks.copyable_models import check_copyable
from hf_taskvec.errors import UnsupportedError
from hf_taskvec.models.layout import is_peft_model
from hf_taskvec.models.quantised_layers import layers_to_quantise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NOT_INSTALLED = "bitsandbytes is not installed: pip install bitsandbytes"
_OUTLIERS = 6.0  # from this size on LLM.int8 leaves inputs as they are; transformers' default
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runnable_schemes() -> dict[Scheme, str | None]:
    """Which quantisations `quantised` can make here.

    Returns:
        `dict[str, str | None]`: For each scheme None if it runs, else the reason why it cannot be tried.

    """
    missing = None if find_spec("bitsandbytes") else _NOT_INSTALLED
    return {scheme: missing if scheme in _LAYERS else None for scheme in SCHEMES}


def quantised(model: "PreTrainedModel", scheme: Scheme, *, dequantise: bool = False) -> "PreTrainedModel":
    """A quantised copy of a model; the given model stays as it is.

    `nf4` and `int8` are layers of bitsandbytes, as transformers makes them: what the model holds are 4 and 8 bits, and
    `int8` also quantises what comes into a layer. `fp8` and `int4` are ordinary layers whose weights were rounded to
    what the format holds (the same numbers that torchao's weight-only layers calculate with, which do not run on every
    machine).

    Args:
        model (`PreTrainedModel`):
            A live model on one device, without hooks; in bf16, fp16 or fp32.
        scheme (`str`):
            `"nf4"`, `"int8"`, `"fp8"` or `"int4"`; see `runnable_schemes`.
        dequantise (`bool`, *optional*, defaults to `False`):
            Make `nf4` and `int8` like the other two: ordinary layers with the weights that bitsandbytes' codes stand
            for. That runs at the model's own speed, alike on every processor, and without bitsandbytes. For `nf4` it is
            the same model but for rounding; for `int8` inputs are then not quantised.

    Returns:
        [`~transformers.PreTrainedModel`]: The copy, on the same device.

    Raises:
        `BadValueError`: If there is no such scheme, or a weight is not finite.
        `UnsupportedError`: If the scheme does not run here, or the model cannot be copied or quantised.

    Example:
        ```py
        for scheme, reason in runnable_schemes().items():
            if reason is None:
                asked = ask(quantised(edited, scheme), NoEdit(), [0.0], passages=passages, ...)
        ```

    """
    check_scheme(scheme)
    check_copyable(model, "quantising")
    if is_peft_model(model):
        raise UnsupportedError("the model is wrapped by PEFT. Merge its adapter first: model.merge_and_unload().")
    reason = runnable_schemes()[scheme]
    if reason and not dequantise:
        raise UnsupportedError(f"{scheme} cannot be tried here: {reason}")
    layers: dict[str, Any] = layers_to_quantise(model)
    if not layers:
        raise UnsupportedError(
            f"the live {type(model).__name__} has no linear layer to quantise. Is it quantised already? Give the model "
            "in bf16, fp16 or fp32."
        )
    # What the memo of a copy holds already is taken instead of copied: new layers, or new weights of the old ones.
    memo: dict[int, Any] = {}
    with torch.no_grad(), torch.inference_mode(False):
        for name, layer in layers.items():
            weight = _matrix(name, layer)
            if scheme in _LAYERS and not dequantise:
                memo[id(layer)] = _like(layer, _LAYERS[scheme](weight, layer.bias is not None))
            else:
                values = quantised_values(weight, scheme)
                stored = values if isinstance(layer, torch.nn.Linear) else values.T.contiguous()
                memo[id(layer.weight)] = torch.nn.Parameter(stored, layer.weight.requires_grad)
    copied = copy.deepcopy(model, memo)
    copied.__dict__.pop("generate", None)  # a filter of what is generated would go on with the model's own weights
    if scheme in _LAYERS and not dequantise:
        _mark(copied, scheme)
    return copied


def _matrix(name: str, layer: Any) -> torch.Tensor:
    """A layer's weight, outputs being rows: GPT-2's `Conv1D` has it the other way round."""
    stored: torch.Tensor = layer.weight.data
    if stored.dtype not in _DTYPES:
        raise UnsupportedError(f"{name} is in {stored.dtype}. Give the model in bf16, fp16 or fp32.")
    if not stored.sum(dtype=torch.float64).isfinite():
        raise not_finite(f"{name}.weight")
    return stored if isinstance(layer, torch.nn.Linear) else stored.T.contiguous()


def _nf4_layer(weight: torch.Tensor, has_bias: bool) -> Any:
    layers = _bitsandbytes()
    outputs, inputs = weight.shape
    options = {"compress_statistics": False, "quant_type": "nf4"}
    layer = layers.Linear4bit(inputs, outputs, has_bias, weight.dtype, **options, device="meta")
    # Where a processor has AVX-512 for bf16 the layer would repack itself when it is first run: its scales in bf16, and
    # mixed up when its state is asked for afterwards.
    layer.support_avx512bf16_for_cpu = False
    # A clone: it replaces its own data when it is moved to a device, which is when it is quantised.
    layer.weight = layers.Params4bit(weight.clone(), requires_grad=False, **options, module=layer).to(weight.device)
    return layer


def _int8_layer(weight: torch.Tensor, has_bias: bool) -> Any:
    layers = _bitsandbytes()
    outputs, inputs = weight.shape
    layer = layers.Linear8bitLt(inputs, outputs, has_bias, has_fp16_weights=False, threshold=_OUTLIERS, device="meta")
    held = layers.Int8Params(weight.to("cpu", copy=True), requires_grad=False, has_fp16_weights=False)
    layer.weight = held.to(weight.device)
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_worth_a_line)
    return layer


def _bitsandbytes() -> Any:
    """The module of its layers, whose types do not hold what they promise."""
    return import_module("bitsandbytes.nn")


# Scheme -> what makes a layer of bitsandbytes from a weight, and from whether there is a bias.
_LAYERS: dict[str, Callable[[torch.Tensor, bool], Any]] = {"nf4": _nf4_layer, "int8": _int8_layer}


def _like(layer: Any, new: Any) -> Any:
    """The new layer with the bias and in the mode of the old one."""
    if layer.bias is not None:
        new.bias = torch.nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
    return new.train(layer.training)


def _mark(model: Any, scheme: str) -> None:
    """Tell in the config what transformers tells of a model that it quantised."""
    from transformers import BitsAndBytesConfig

    if scheme == "int8":
        model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=_OUTLIERS)
    else:
        model.config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=model.dtype
        )


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not what bitsandbytes says in every layer at every token: that LLM.int8 takes inputs as fp16."""
    return not record.getMessage().startswith("MatMul8bitLt: inputs will be cast from")
