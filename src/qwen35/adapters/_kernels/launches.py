"""Launches of one Triton kernel with arguments of one layout, of which only the first looks for the compiled kernel.

Triton finds the compiled kernel anew by every argument of every launch, which takes it several times as long as the
launch itself. Of what it looks at, calls of one layout differ in nothing but the addresses, and of these it asks only
whether they are multiples of 16 bytes, unless the kernel says that it does not matter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

Grid = tuple[int, int, int]
#: Bits of an address that Triton asks about.
LOW_BITS = 15


class KeptLaunch:
    """Launches of ``kernel`` over ``grid`` with the arguments ``rest`` (constants among them) behind its pointers.

    All launches are on the GPU of the first, whose current stream the caller names.
    """

    __slots__ = ("_compiled", "_function", "_grid", "_kernel", "_metadata", "_options", "_rest", "_run")

    def __init__(self, kernel: Any, grid: Grid, rest: tuple[object, ...], **options: int) -> None:
        self._kernel, self._grid, self._rest, self._options = kernel, grid, rest, options
        self._compiled = False
        self._run: Any = None
        self._function: Any = None
        self._metadata: Any = None

    def __call__(self, aligned: bool, tensors: tuple[Tensor, ...], stream: int) -> None:
        """Launch with ``tensors``. ``aligned``: those whose low bits matter have none set. Triton's launch hooks are
        called where it looks for the kernel only."""
        if aligned and self._compiled:
            x, y, z = self._grid
            # Of a tensor the launcher asks the address, and then the driver whether it can be one.
            addresses = [tensor.data_ptr() for tensor in tensors]
            self._run(x, y, z, stream, self._function, self._metadata, None, None, None, *addresses, *self._rest)
            return
        found = self._kernel[self._grid](*tensors, *self._rest, **self._options)
        if aligned and isinstance(found, CompiledKernel):  # the interpreter compiles nothing
            self._run, self._function, self._metadata = found.run, found.function, found.packed_metadata
            self._compiled = True
