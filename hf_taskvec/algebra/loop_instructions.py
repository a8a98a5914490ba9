"""A loop of LLVM's, while its body is written down."""

from typing import Any

from llvmlite import ir


class Loop:
    """Instructions that are done at least once, and again for as long as a condition holds; loops may be nested.

    Args:
        builder (`ir.IRBuilder`):
            Where the loop begins. While this is used, it is at the end of the body, and then behind the loop.
    """

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._builder, self._before = builder, builder.block
        self._body = builder.append_basic_block("body")
        builder.branch(self._body)
        builder.position_at_end(self._body)

    def carried(self, first: Any) -> Any:
        """A value that is handed on from one time to the next."""
        build, here = self._builder, self._builder.block
        build.position_at_start(self._body)
        phi = build.phi(first.type)
        phi.add_incoming(first, self._before)
        build.position_at_end(here)
        return phi

    def end(self, carried: dict[Any, Any], again: Any) -> None:
        """Go on with these values of what is carried, if a condition holds, or behind the loop."""
        build = self._builder
        for phi, value in carried.items():
            phi.add_incoming(value, build.block)
        after = build.append_basic_block("after")
        build.cbranch(again, self._body, after)
        build.position_at_end(after)
