"""Triton's driver without a device: kernels are compiled for Hopper and stay unlaunched. Calls of few small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from qwen35.ports.gated_delta_rule import RawGates

#: Shared memory of one program on compute capability 9.0: 227 KiB (CUDA programming guide, technical specifications).
HOPPER_SHARED_BYTES = 227 * 1024


class HopperWithoutDevice:
    """Stands in for Triton's driver: says what to compile for, loads nothing and launches nothing.

    ``launched``: which of the ``loaded`` kernels, counted from one, with which arguments; ``streams``: on which stream;
    ``dependent``: whether before the kernel ahead has ended; ``binaries``: their machine code.
    """

    utils: HopperWithoutDevice
    arch = 90

    def __init__(self) -> None:
        self.utils = self
        self.loaded: list[str] = []
        self.binaries: list[bytes] = []
        self.grids: dict[str, tuple[int, int, int]] = {}
        self.streams: list[int] = []
        self.dependent: list[bool] = []
        self.launched: list[tuple[int, tuple[object, ...]]] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return -1  # no real device, so that no real launch finds these kernels in a cache

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": HOPPER_SHARED_BYTES}

    def load_binary(self, name: str, binary: bytes, *_: object) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        self.binaries.append(binary)
        return 0, len(self.loaded), 0, 0, 1024

    def launcher_cls(self, _source: object, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: object) -> None:
            self.grids[metadata.name] = x, y, z
            self.streams.append(stream)
            self.dependent.append(metadata.launch_pdl)
            self.launched.append((function, rest[4:]))  # after two kinds of metadata and two hooks

        return launch


StandIn = TypeVar("StandIn", bound=HopperWithoutDevice)


@contextmanager
def in_place_of_the_driver(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, *kernels: Any) -> Iterator[StandIn]:
    """Triton asks ``stand_in``; what it compiled of ``kernels`` is forgotten at the end."""
    monkeypatch.setattr(driver, "_active", stand_in)
    yield stand_in
    for kernel in kernels:
        kernel.device_caches.pop(-1, None)


HEADS, KEY_HEADS = 4, 2


def tokens(width: int, value_width: int, dtype: torch.dtype, *leading: int) -> dict[str, Any]:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*leading, *shape, dtype=dtype)

    gates = RawGates(a=zeros(HEADS), b=zeros(HEADS), A_log=torch.zeros(HEADS), dt_bias=torch.zeros(HEADS))
    key = zeros(KEY_HEADS, width)
    return {"q": key, "k": key, "v": zeros(HEADS, value_width), "gates": gates}


def pool(width: int, value_width: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    slots = torch.zeros(1, dtype=torch.int32)
    return {"states": torch.zeros(1, HEADS, value_width, width, dtype=dtype), "slots": slots}
