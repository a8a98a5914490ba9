"""Adapters of PEFT's other tuners, LoHa to IA³ -> task vector: the change that PEFT's own merge makes, layer by layer.

Each tuner is a formula of PEFT's, so PEFT is asked, in fp64, for one layer at a time and when its change is read. The
model around the layers has no weights of its own: one number stands for each of its tensors.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hf_taskvec.algebra.computed_deltas import Factored
from hf_taskvec.algebra.deltas import Delta, Dense, LowRank
from hf_taskvec.algebra.sources import Source
from hf_taskvec.algebra.sums import Term
from hf_taskvec.errors import CorruptFileError, MismatchError, MissingFileError, UnsupportedError, some
from hf_taskvec.extraction.adapter_files import Adapter, AdapterBase
from hf_taskvec.models.meta_models import build_meta_model, most_parameters

_ADAPTER = "default"
# Tuners that scale or turn what a layer gives, its bias with it.
_WITH_BIAS = ("IA3", "ROAD")
# Ranks and numbers of frequencies that no layer has.
_MOST = 1 << 24
_SEEDS = ("projection_prng_key", "random_loc_seed", "init_weights_seed", "random_seed")


def changes_of_tuner(adapter: Adapter, base: AdapterBase) -> tuple[dict[str, list[Term]], set[str]]:
    """The changes of an adapter of another kind than LoRA.

    Args:
        adapter (`Adapter`):
            Its config and tensors.
        base (`AdapterBase`):
            The model that it belongs to, whose weights are needed.

    Returns:
        `tuple`: Canonical name -> the change; and the names of the tensors that are accounted for.

    Raises:
        `MissingFileError`: If the base is not at hand.
        `CorruptFileError`: If PEFT cannot make sense of config and tensors.

    """
    if base.weights is None or not base.layout.shapes:
        raise MissingFileError(
            f"{adapter.name} is a {_kind(adapter)} adapter, whose change takes the base model to compute, and "
            f"{base.why_not}. Pass base=."
        )
    model, own = _loaded(adapter, base)
    terms: dict[str, list[Term]] = {}
    inputs = tuple((Term(1.0, Dense((adapter.tensors[key],))),) for key in sorted(own))
    for path, layer in _tuner_layers(model):
        weight_name, bias_name = (base.layout.canonical(f"{path}.{kind}") for kind in ("weight", "bias"))
        if weight_name not in base.layout.shapes and weight_name not in base.layout.tied:
            raise UnsupportedError(
                f"{adapter.name} changes {path}, which is stored in another form than the live model has. Merge it "
                "into its base with PEFT and use from_finetuned()."
            )
        weight = base.tensor(weight_name, f"{adapter.name} ({_kind(adapter)})")
        merge = _Merge(layer, weight, base.tensor(bias_name, adapter.name) if bias_name in base.layout.shapes else None)
        of_weight = (*inputs, (Term(1.0, Dense((weight,))),))
        key = f"{_kind(adapter)} {sorted(adapter.config.items(), key=str)!r} {path}"
        terms[weight_name] = [Term(1.0, _change(key, of_weight, merge, layer))]
        if merge.bias is not None and _kind(adapter) in _WITH_BIAS and bool(merge.bias_changes()[0].any()):
            of_bias = (*of_weight, (Term(1.0, Dense((merge.bias,))),))
            made = Factored(of_bias, f"{key} bias", (merge.bias.shape,), merge.bias_changes)
            terms[bias_name] = [Term(1.0, Dense((made.tensor,)))]
    if not terms:
        raise CorruptFileError(
            f"{adapter.name} changes no layer of {base.layout.architecture}. Is it the adapter's base?"
        )
    return terms, own


class _Merge:
    """One layer, and PEFT's merge into it, in fp64."""

    def __init__(self, layer: Any, weight: Source, bias: Source | None) -> None:
        self.layer, self.weight, self.bias = layer, weight, bias

    def weight_changes(self) -> tuple[torch.Tensor]:
        """What the merge does to the weight."""
        before, after = self._merged()
        return (after.weight.detach() - before.weight,)

    def bias_changes(self) -> tuple[torch.Tensor]:
        """What it does to the bias."""
        before, after = self._merged()
        return (after.bias.detach() - before.bias,)

    def double(self) -> Any:
        """The layer by itself, in fp64, with the weights of the base."""
        layer = copy.deepcopy(self.layer)
        inner = layer.get_base_layer()
        for kind, source in (("weight", self.weight), ("bias", self.bias)):
            if source is not None:
                setattr(inner, kind, torch.nn.Parameter(source.read().double(), requires_grad=False))
        return layer.double()

    def _merged(self) -> tuple[Any, Any]:
        layer = self.double()
        before = copy.deepcopy(layer.get_base_layer())
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer.merge(safe_merge=False, adapter_names=[_ADAPTER])
        return before, layer.get_base_layer()


def _change(key: str, inputs: tuple[tuple[Term, ...], ...], merge: _Merge, layer: Any) -> Delta:
    """The change of a weight: two factors where the tuner has them, else all of its numbers."""
    rows, columns = merge.weight.shape
    factors = _FACTORS.get(type(layer).__name__)
    rank = None if factors is None else factors[0](layer)
    if factors is None or rank is None or 2 * rank >= min(rows, columns):
        return Dense((Factored(inputs, key, ((rows, columns),), merge.weight_changes).tensor,))

    def compute() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return factors[1](merge.double())

    return LowRank(*Factored(inputs, key, ((rows, rank), (rank, columns)), compute).factors)


def _ada_factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """AdaLoRA's `B diag(E) A`, scaled."""
    a, b, e = (part[_ADAPTER] for part in (layer.lora_A, layer.lora_B, layer.lora_E))
    return b * (layer.scaling[_ADAPTER] / (layer.ranknum[_ADAPTER] + 1e-5)), a * e


def _vera_factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """VeRA's `diag(b) B diag(d) A`, of the random matrices that all layers share."""
    d, b = layer.vera_lambda_d[_ADAPTER], layer.vera_lambda_b[_ADAPTER]
    rows, columns = layer.out_features, layer.in_features
    shared_a, shared_b = layer.vera_A[_ADAPTER], layer.vera_B[_ADAPTER]
    return shared_b[:rows].to(b) * b[:, None] * d, shared_a[:, :columns].to(b)


# The class of PEFT's layer -> the rank, and the two factors, of a layer whose weight is not stored transposed.
_FACTORS: Mapping[str, tuple[Callable[[Any], int | None], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "SVDLinear": (lambda layer: None if layer.fan_in_fan_out else len(layer.lora_A[_ADAPTER]), _ada_factors),
    "Linear": (
        lambda layer: (
            len(layer.vera_lambda_d[_ADAPTER]) if hasattr(layer, "vera_lambda_d") and not layer.fan_in_fan_out else None
        ),
        _vera_factors,
    ),
}


def _loaded(adapter: Adapter, base: AdapterBase) -> tuple[Any, set[str]]:
    """A model of the base's kind with the adapter on it, and the names of the adapter's own tensors."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    assert base.weights is not None
    settings = {
        name: value
        for name, value in adapter.config.items()
        if name not in ("modules_to_save", "bias", "inference_mode", "peft_type", "auto_mapping")
    }
    counts = {name: value for name, value in settings.items() if isinstance(value, int) and name not in _SEEDS}
    if large := [name for name, value in counts.items() if abs(value) > _MOST]:
        raise CorruptFileError(f"{adapter.name}: {large[0]}={settings[large[0]]} makes no sense. Save it again.")
    tensors = adapter.tensors
    try:
        config = PeftConfig.from_peft_type(peft_type=_kind(adapter), inference_mode=True, **settings)
        model = _without_weights(base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = PeftModel(model, config)
            expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
            own = {key for key in tensors if key in expected}
            state = {key: tensors[key].read() for key in own}
            result: Any = set_peft_model_state_dict(wrapped, state)
    except (MissingFileError, UnsupportedError):
        raise
    except Exception as error:  # PEFT raises whatever it comes upon
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CorruptFileError(
            f"{adapter.name} cannot be loaded by PEFT as a {_kind(adapter)} adapter of {base.layout.architecture} "
            f"({type(error).__name__}: {reason[:300]})."
        ) from None
    if missing := sorted(expected.keys() - own):
        raise CorruptFileError(f"{adapter.name} lacks {some(missing)}. Download it or save it again whole.")
    prefix = wrapped.base_model.prefix
    if stray := [key for key in tensors if key not in own and f".{prefix}" in f".{key}"] + list(result.unexpected_keys):
        raise MismatchError(
            f"{adapter.name} holds {some(stray)}, for which {base.layout.architecture} has no such layer, or the "
            "config no target module. Is it the adapter's base?"
        )
    return wrapped.eval(), own


def _without_weights(base: AdapterBase) -> Any:
    """A model on the CPU whose tensors are one number each, whatever their shapes."""
    assert base.weights is not None
    config = dict(base.weights.config)
    stored = {name: source.shape for name, source in base.weights.tensors.items()}
    model = build_meta_model(config, most_parameters(config, stored))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            number = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
            setattr(module, name, torch.nn.Parameter(number, requires_grad=False))
    return model


def _tuner_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield path.removeprefix("base_model.model."), module


def _kind(adapter: Adapter) -> str:
    return str(adapter.config.get("peft_type", "")).upper()
