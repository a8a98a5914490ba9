"""Elementwise expressions as machine code: one pass over memory for all operations, and one rounding.

llvmlite compiles an expression when it is first used, in a few milliseconds; the code runs on the CPU, on the calling
thread, without Python's lock. Several elements are worked on at a time, by whatever vector instructions there are.
"""

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from hf_taskvec.algebra.elementwise import Element

if TYPE_CHECKING:
    from llvmlite import binding, ir

#: the dtypes of inputs and outputs
COMPILED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Elements that are worked on at a time; the last of them are worked on twice where there are some more.
WIDTH = 16

#: numbers that `parts_code.split_loop` reports of a block
REPORTED = 4

_compiling = threading.RLock()


#: what a loop does with expressions: writes one in a dtype, counts its magnitudes, or adds up the products of all
Use = torch.dtype | Literal["histogram", "products"]


class MachineCode:
    """Expressions, compiled for inputs of certain dtypes and one use.

    Args:
        elements (`tuple` of `Element`):
            The expression; several for products.
        inputs (`tuple` of `torch.dtype`):
            Of the inputs, all of `COMPILED_DTYPES`.
        use (`torch.dtype`, `"histogram"` or `"products"`):
            What its numbers are rounded to; or see `code_generation.histogram_loop` and `products_loop`.
    """

    def __init__(self, elements: tuple[Element, ...], inputs: tuple[torch.dtype, ...], use: Use) -> None:
        from hf_taskvec.algebra.code_generation import elementwise_loop, histogram_loop, products_loop

        if use == "products":
            made = products_loop(elements, inputs)
        elif use == "histogram":
            made = histogram_loop(elements[0], inputs)
        else:
            made = elementwise_loop(elements[0], inputs, use)
        self._run = _function(made, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3)

    def __call__(
        self, count: int, inputs: Sequence[torch.Tensor], factors: Sequence[float], output: torch.Tensor
    ) -> bool:
        """Evaluate it for all elements.

        Args:
            count (`int`):
                How many there are: at least `WIDTH`.
            inputs (`Sequence[torch.Tensor]`):
                Of as many elements, on the CPU.
            factors (`Sequence[float]`):
                The numbers of the expression.
            output (`torch.Tensor`):
                Contiguous, in memory of its own.

        Returns:
            `bool`: Whether what is written is right. It is not where a number is not finite in the output's dtype, or
                below the smallest normal number of bf16: for these there is torch.
        """
        whole = [each.contiguous() for each in inputs]  # held until the code has run
        addresses = (ctypes.c_void_p * len(whole))(*(each.data_ptr() for each in whole))
        numbers = (ctypes.c_double * len(factors))(*factors)
        return not self._run(count, addresses, numbers, output.data_ptr())


#: what was compiled in this process: expressions, dtypes of their inputs, and their use
compiled: dict[tuple[tuple[Element, ...], tuple[torch.dtype, ...], Use], MachineCode] = {}


def machine_code(elements: tuple[Element, ...], inputs: tuple[torch.dtype, ...], use: Use) -> MachineCode:
    """The machine code of expressions, compiled once in a process."""
    with _compiling:
        if (elements, inputs, use) not in compiled:
            compiled[elements, inputs, use] = MachineCode(elements, inputs, use)
        return compiled[elements, inputs, use]


@functools.cache
def can_compile() -> bool:
    """Whether llvmlite works here; one warning if it does not."""
    try:
        _target()
    except Exception as error:  # a broken installation fails in many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"llvmlite cannot be used ({reason[:200]}), so sums are made by torch: the same numbers, more slowly.",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _target() -> "binding.TargetMachine":
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten()
    return binding.Target.from_default_triple().create_target_machine(binding.get_host_cpu_name(), features, opt=3)


# The code is in memory for as long as these are held.
_engines: list["binding.ExecutionEngine"] = []


def _function(module: "ir.Module", result: Any, *arguments: Any) -> Callable[..., Any]:
    """A module's `loop`, compiled and held for as long as the process runs."""
    from llvmlite import binding

    with _compiling:
        target = _target()
        module.triple, module.data_layout = target.triple, str(target.target_data)
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        engine = binding.create_mcjit_compiler(parsed, target)
        engine.finalize_object()
        _engines.append(engine)
        found: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address("loop"))
        return found


_Made = TypeVar("_Made")


def _once(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """A function that remembers what it made, and that no two threads are in at a time."""
    known = functools.cache(make)

    @functools.wraps(make)
    def remembered(*arguments: Hashable) -> _Made:
        with _compiling:
            return known(*arguments)

    return remembered


@_once
def split_code(tuned: torch.dtype, base: torch.dtype, output: torch.dtype) -> Callable[..., Any]:
    """The function of `parts_code.split_loop`."""
    from hf_taskvec.algebra.parts_code import split_loop

    return _function(split_loop(tuned, base, output), None, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 5)


@_once
def collecting_code(itemsize: int) -> Callable[..., Any]:
    """The function of `parts_code.collecting_loop`."""
    from hf_taskvec.algebra.parts_code import collecting_loop

    return _function(collecting_loop(itemsize), ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3)


@_once
def scattering_code(itemsize: int) -> Callable[..., Any]:
    """The function of `parts_code.scattering_loop`."""
    from hf_taskvec.algebra.parts_code import scattering_loop

    arguments = (ctypes.c_int64, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2)
    return _function(scattering_loop(itemsize), None, *arguments)


@functools.cache
def rounds_to_bfloat() -> bool:
    """Whether one instruction rounds fp32 numbers to bf16: to nearest even, but for numbers that need care anyway."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512bf16"))
