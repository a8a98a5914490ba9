"""Elementwise expressions as machine code: one pass over memory for all operations, and one rounding.

llvmlite compiles an expression when it is first used, in a few milliseconds; the code runs on the CPU, on the calling
thread, without Python's lock. Several elements are worked on at a time, by whatever vector instructions there are.
"""

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from hf_taskvec.algebra.elementwise import Element

if TYPE_CHECKING:
    from llvmlite import binding, ir

#: the dtypes of inputs and outputs
COMPILED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Elements that are worked on at a time; the last of them are worked on twice where there are some more.
WIDTH = 16

_compiling = threading.Lock()


#: what a loop does with an expression: writes it in a dtype, or counts its magnitudes
Use = torch.dtype | Literal["histogram"]


class MachineCode:
    """An expression, compiled for inputs of certain dtypes and one use.

    Args:
        element (`Element`):
            The expression.
        inputs (`tuple` of `torch.dtype`):
            Of the inputs, all of `COMPILED_DTYPES`.
        use (`torch.dtype` or `"histogram"`):
            What its numbers are rounded to; or see `code_generation.histogram_loop`.
    """

    def __init__(self, element: Element, inputs: tuple[torch.dtype, ...], use: Use) -> None:
        from hf_taskvec.algebra.code_generation import elementwise_loop, histogram_loop

        made = histogram_loop(element, inputs) if use == "histogram" else elementwise_loop(element, inputs, use)
        self._engine = _engine(made)
        kind = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3)
        self._run = kind(self._engine.get_function_address("loop"))

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


#: what was compiled in this process: expression, dtypes of its inputs, and its use
compiled: dict[tuple[Element, tuple[torch.dtype, ...], Use], MachineCode] = {}


def machine_code(element: Element, inputs: tuple[torch.dtype, ...], use: Use) -> MachineCode:
    """An expression's machine code, compiled once in a process."""
    with _compiling:
        if (element, inputs, use) not in compiled:
            compiled[element, inputs, use] = MachineCode(element, inputs, use)
        return compiled[element, inputs, use]


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


def _engine(module: "ir.Module") -> "binding.ExecutionEngine":
    """The module's code, in memory for as long as this is held."""
    from llvmlite import binding

    target = _target()
    module.triple, module.data_layout = target.triple, str(target.target_data)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    engine = binding.create_mcjit_compiler(parsed, target)
    engine.finalize_object()
    return engine


@functools.cache
def split_code(tuned: torch.dtype, base: torch.dtype, output: torch.dtype) -> Callable[..., Any]:
    """The function of `code_generation.split_loop`."""
    from hf_taskvec.algebra.code_generation import split_loop

    return _function(split_loop(tuned, base, output), None, ctypes.c_int64, *[ctypes.c_void_p] * 5)


@functools.cache
def collecting_code(itemsize: int) -> Callable[..., Any]:
    """The function of `code_generation.collecting_loop`."""
    from hf_taskvec.algebra.code_generation import collecting_loop

    return _function(collecting_loop(itemsize), ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3)


@functools.cache
def scattering_code(itemsize: int) -> Callable[..., Any]:
    """The function of `code_generation.scattering_loop`."""
    from hf_taskvec.algebra.code_generation import scattering_loop

    arguments = (ctypes.c_int64, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)
    return _function(scattering_loop(itemsize), None, *arguments)


_engines: list["binding.ExecutionEngine"] = []


def _function(module: "ir.Module", result: Any, *arguments: Any) -> Callable[..., Any]:
    """A module's `loop`, compiled and held for as long as the process runs."""
    with _compiling:
        engine = _engine(module)
        _engines.append(engine)
        found: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address("loop"))
        return found


@functools.cache
def products_code(elements: tuple[Element, ...], inputs: tuple[torch.dtype, ...]) -> Callable[..., Any]:
    """The function of `code_generation.products_loop`."""
    from hf_taskvec.algebra.code_generation import products_loop

    return _function(products_loop(elements, inputs), ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3)
