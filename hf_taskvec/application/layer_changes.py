"""What an attached edit adds in one layer, and the two ways of adding it.

Most layers compute just what `torch.nn.Linear`, `torch.nn.Embedding` or `Conv1D` does; a forward hook adds the change
to their output. A layer with a forward of its own (positions with an offset, scaled embeddings, routers that return
tuples) may do anything before and after; there the call that uses the weight is found while the forward runs, and the
change is added to its result.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_taskvec.algebra.sums import Sum, Term
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.replaced_forward import ReplacedForward, refuse_copy
from hf_taskvec.application.row_scales import RowScales
from hf_taskvec.errors import UnsupportedError

# Forwards that give `x W' + b` (Conv1D: `x W + b`; embeddings: rows of W; norms: `… + b`), by name, so that nothing is
# imported for it.
_PLAIN = {
    "torch.nn.modules.linear.Linear.forward",
    "torch.nn.modules.sparse.Embedding.forward",
    "torch.nn.modules.normalization.LayerNorm.forward",
    "transformers.pytorch_utils.Conv1D.forward",
    "transformers.models.falcon.modeling_falcon.FalconLinear.forward",
    "bitsandbytes.nn.modules.Linear4bit.forward",
    "bitsandbytes.nn.modules.Linear8bitLt.forward",
}


def has_plain_forward(layer: torch.nn.Module) -> bool:
    """Whether a layer gives its weight's product with the input (or rows of the weight), and its bias; nothing else."""
    forward = type(layer).forward
    is_replaced = "forward" in vars(layer) and "_hf_hook" not in vars(layer)  # accelerate's calls the layer's own
    return not is_replaced and f"{forward.__module__}.{forward.__qualname__}" in _PLAIN


def is_quantised(layer: torch.nn.Module) -> bool:
    """Whether it is a layer of bitsandbytes, which unpacks its weight itself, in more than one step."""
    return type(layer).__module__.startswith("bitsandbytes.")


class LayerChange:
    """The change of one layer, λ times which is added to what its weight gives. It is a forward hook.

    Args:
        layer (`torch.nn.Module`):
            A linear or an embedding layer, a normalisation, or one that uses a weight of its own as those do.
        parameters (`Sequence[tuple[str, str]]`):
            Kind (`"weight"` or `"bias"`) and name of each of its parameters that the vector changes.
        vector (`TaskVector`):
            What is attached.
        scales (`RowScales`):
            λ.

    Attributes:
        names (`dict[str, str]`):
            Kind -> name.
        times (`int`):
            How often the change was added.

    """

    def __init__(
        self, layer: torch.nn.Module, parameters: Sequence[tuple[str, str]], vector: TaskVector, scales: RowScales
    ) -> None:
        self.layer, self.names, self.times = layer, dict(parameters), 0
        self._vector, self._scales = vector, scales
        self._is_lookup = isinstance(layer, torch.nn.Embedding)
        self._products = self._weight_change(vector[self.names["weight"]].terms) if "weight" in self.names else []
        self._bias: torch.Tensor | None = None
        if (bias := self.names.get("bias")) is not None:
            self._bias = torch.empty(vector.shape(bias), dtype=torch.float32, device="cpu")
            Sum(vector.shape(bias), vector[bias].terms).into(self._bias, bias)

    def _weight_change(self, terms: Sequence[Term]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        products = []
        for term in terms:
            if (product := term.delta.factors) is not None:
                left, right = product.left.read().float(), product.right.read().float()
                if not self._is_lookup and not _is_conv1d(self.layer):  # y = x W', so the change is x R' L'
                    left, right = right.T, left.T
                products.append((left.contiguous(), right.contiguous() * (term.weight * product.scaling)))
        return products

    @property
    def fingerprint(self) -> str:
        """What is added, for the model's fingerprint; empty where that is nothing."""
        return "" if self._scales.are_zero else f"{self._vector.fingerprint} {self._scales.text}"

    def __call__(self, layer: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """The forward hook of a layer with a plain forward."""
        return self.added_to(output, inputs[0])

    def added_to(self, output: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """`output + λ·change`, for what weight and bias gave for these inputs; computed in fp32 or better."""
        self.times += 1
        scale = self._scales.for_output(output, next(iter(self.names.values())), self._is_lookup)
        if scale is None:
            return output
        device, dtype = output.device, torch.promote_types(output.dtype, torch.float32)
        change: torch.Tensor | float = 0.0
        # The only numbers of a vector that do not come from `Sum`. They are products of the factors with activations:
        # the changed weight itself, which `Sum` would give, is never computed. The precision of activations is enough
        # for them, since they are added to activations, and it is what keeps a λ per row cheap.
        for number, (left, right) in enumerate(self._products):
            left, right = self._products[number] = left.to(device, dtype), right.to(device, dtype)
            inner = left[inputs] if self._is_lookup else inputs.to(dtype) @ left
            change = change + inner @ right
        if self._bias is not None:
            change = change + self._bias.to(device)
        return (output + change * scale.to(dtype)).to(output.dtype)

    __deepcopy__ = __reduce_ex__ = refuse_copy


class ChangedForward(ReplacedForward):
    """In the place of a layer's own forward: the same, with the change added where the weight is used.

    Args:
        change (`LayerChange`):
            The layer's.

    """

    def __init__(self, change: LayerChange) -> None:
        super().__init__(change.layer)
        self._change = change

    @property
    def fingerprint(self) -> str:
        """What is added, for the model's fingerprint."""
        return self._change.fingerprint

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward."""
        with _UsesOfWeight(self._change):
            return self.forward(*args, **kwargs)


class _UsesOfWeight(TorchFunctionMode):
    """A block in which a linear or embedding function that is given the layer's weight gives the changed result."""

    def __init__(self, change: LayerChange) -> None:
        super().__init__()
        self._change = change
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of a copy in another dtype: it and the weight

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        output = function(*args, **given)
        layer, names = self._change.layer, self._change.names
        mine = {kind: tensor for kind in names if (tensor := layer._parameters.get(kind)) is not None}
        if function is functional.linear:
            inputs, weight, bias = _bound(args, given, "input", "weight", "bias")
            reached = {"weight": weight, "bias": bias}
        elif function is functional.layer_norm:
            inputs, reached = args[0] if args else given["input"], {"bias": given.get("bias", (*args, *[None] * 4)[3])}
        elif function is functional.embedding:
            inputs, weight = _bound(args, given, "input", "weight")
            reached = {"weight": weight}
        else:
            inputs, reached = None, {}
        if inputs is not None and all(self._is(reached.get(kind), tensor) for kind, tensor in mine.items()):
            return self._change.added_to(output, inputs)
        if function in _CASTS and args and any(self._is(args[0], tensor) for tensor in mine.values()):
            if output is not args[0]:
                self._copies[id(output)] = output, self._copies.get(id(args[0]), (None, args[0]))[1]
            return output
        for kind, tensor in mine.items():
            if is_used(tensor, output, args, given):
                raise UnsupportedError(
                    f"{names[kind]}: {type(layer).__name__} uses it in {function.__name__}, to which no change can be "
                    f"attached. {instead(names[kind])}"
                )
        return output

    def _is(self, given: Any, tensor: torch.Tensor) -> bool:
        """Whether that is the tensor, or a copy of it in another dtype."""
        return given is tensor or (id(given) in self._copies and self._copies[id(given)][1] is tensor)


# Routers often compute in fp32, whatever their weights are stored in.
_CASTS = {torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, torch.Tensor.double}


def _is_conv1d(layer: torch.nn.Module) -> bool:
    return f"{type(layer).__module__}.{type(layer).__name__}" == "transformers.pytorch_utils.Conv1D"


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """A function's first arguments, however they were given."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return tuple(given.get(name) for name in names)


def is_used(tensor: torch.Tensor, output: Any, *arguments: Any) -> bool:
    """Whether a function that was given a tensor made another one of it.

    What a tensor says about itself (its dtype, its shape) is no use of it. accelerate leaves tensors without data in
    the place of weights that it keeps elsewhere.
    """
    made = [each for each in torch.utils._pytree.tree_leaves(output) if isinstance(each, torch.Tensor)]
    if tensor.is_meta or not any(each is not tensor and not each.is_meta for each in made):
        return False
    return any(each is tensor for each in torch.utils._pytree.tree_leaves(arguments))


def instead(name: str) -> str:
    """What to do about a parameter that cannot be attached."""
    return f"Merge the vector (merge=True), or leave the parameter out: vector.filter(exclude={name!r})."
