"""Launches of one Triton kernel with arguments of one layout, of which only the first looks for the compiled kernel.

Triton finds the compiled kernel anew by every argument of every launch, which takes it several times as long as the
launch itself. Of what it looks at, calls of one layout differ in nothing but the addresses, and of these it asks only
whether they are multiples of 16 bytes, unless the kernel says that it does not matter.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from qwen35.services.devices import current_stream

Grid = tuple[int, int, int]
#: Bits of an address that Triton asks about.
LOW_BITS = 15
#: Launches of one kernel that are remembered before ``KeptLaunches`` begins anew.
MAX_LAUNCHES = 1024


def programs_for(count: int, block: int) -> int:
    """Programs of ``block`` for ``count``. Triton's own function is a kernel's too, and takes microseconds to find out
    that it was called outside of one."""
    return -(-count // block)


def _loaded_for(tensor: Tensor | None) -> bool:
    """Whether Triton, which loads for the current GPU, loaded for that of ``tensor``."""
    index = None if tensor is None else tensor.device.index
    return index is None or index == driver.active.get_current_device()


class KeptLaunch:
    """Launches of ``kernel`` over ``grid`` with the arguments ``rest`` (constants among them) behind its pointers.

    ``first`` launches and keeps what Triton found, ``again`` launches that once it is ``kept``: on the same GPU, and
    where the addresses whose low bits matter have none set. ``launch`` is whichever of the two will do.
    """

    __slots__ = ("_function", "_grid", "_kernel", "_metadata", "_options", "_rest", "_run", "kept")

    def __init__(self, kernel: Any, grid: Grid, rest: tuple[object, ...], **options: int) -> None:
        self._kernel, self._grid, self._rest, self._options = kernel, grid, rest, options
        self.kept = False
        self._run: Any = None
        self._function: Any = None
        self._metadata: Any = None

    def launch(self, device: torch.device, aligned: bool, *tensors: Tensor | None) -> None:
        """Launch on the current stream of ``device``. ``aligned``: as for ``first``."""
        if aligned and self.kept:
            addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
            self.again(current_stream(device), *addresses)
        else:
            self.first(aligned, *tensors)

    def first(self, aligned: bool, *tensors: Tensor | None) -> None:
        """Launch on the current stream. ``aligned``: the addresses whose low bits matter have none set."""
        found = self._kernel[self._grid](*tensors, *self._rest, **self._options)
        # The interpreter compiles nothing.
        if aligned and isinstance(found, CompiledKernel) and _loaded_for(tensors[0]):
            self._run, self._function, self._metadata = found.run, found.function, found.packed_metadata
            self.kept = True

    def again(self, stream: int, *addresses: int | None) -> None:
        """Launch on ``stream``. Of a tensor the launcher would ask the address, and then the driver whether it can be
        one. Triton's hooks are not called."""
        x, y, z = self._grid
        self._run(x, y, z, stream, self._function, self._metadata, None, None, None, *addresses, *self._rest)


class KeptLaunches:
    """Launches of ``kernel`` by callers who do not know which of their calls look alike, as a model's layers' do.

    Kept is what Triton found for tensors that all begin at multiples of 16 bytes, by everything else that it looks at:
    the grid, the dtypes, the arguments behind the pointers, and the GPU, whose tensors' must be the current one; of the
    ``most`` latest, or fewer.
    """

    def __init__(self, kernel: Any, most: int = MAX_LAUNCHES, **options: int) -> None:
        self.kernel, self._most, self._options = kernel, most, options
        self._kept: dict[tuple[object, ...], KeptLaunch] = {}

    def __call__(self, grid: Grid, rest: tuple[object, ...], *tensors: Tensor) -> None:
        """Launch over ``grid`` on the current stream of the tensors' GPU, with ``rest`` behind the pointers."""
        device = tensors[0].device
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = not reduce(or_, addresses) & LOW_BITS
        key = (grid, rest, device, *[tensor.dtype for tensor in tensors])
        launch = self._kept.get(key)
        if launch is not None and aligned:
            launch.again(current_stream(device), *addresses)
            return
        launch = KeptLaunch(self.kernel, grid, rest, **self._options)
        launch.first(aligned, *tensors)
        if launch.kept:
            if len(self._kept) >= self._most:
                self._kept.clear()
            self._kept[key] = launch

    def clear(self) -> None:
        """Remember nothing."""
        self._kept.clear()
