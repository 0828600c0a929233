"""Every GDN kernel compiles for Hopper and fits its shared memory, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from qwen35.adapters.triton.kernels import gdn_config, gdn_decode, gdn_extend, gdn_verify
from qwen35.adapters.triton.kernels.gdn_launch import dot_dtype
from qwen35.adapters.triton.kernels.gdn_scratch import ScratchBuffer, scratch_bytes
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    CommitCall,
    DecodeCall,
    ExtendCall,
    RawGates,
    VerifyCall,
)

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")

#: Shared memory of one program on compute capability 9.0: 227 KiB (CUDA programming guide, technical specifications).
HOPPER_SHARED_BYTES = 227 * 1024


class HopperWithoutDevice:
    """Stands in for Triton's driver: says what to compile for, loads nothing and launches nothing."""

    utils: HopperWithoutDevice

    def __init__(self) -> None:
        self.utils = self
        self.loaded: list[str] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # no real device, so that no real launch finds these kernels in a cache

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": HOPPER_SHARED_BYTES}

    def load_binary(self, name: str, *_: object) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        return lambda *_: None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[HopperWithoutDevice]:
    stand_in = HopperWithoutDevice()
    monkeypatch.setattr(driver, "_active", stand_in)
    yield stand_in
    for kernel in (gdn_decode.decode_kernel, gdn_verify.verify_kernel, gdn_verify.commit_kernel,
                   gdn_extend.chunk_kernel, gdn_extend.scan_kernel):  # fmt: skip
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


BOTH = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("state_dtype", BOTH)
def test_decode_compiles(hopper: HopperWithoutDevice, state_dtype: torch.dtype) -> None:
    call = DecodeCall(**tokens(128, 128, torch.bfloat16, 1), **pool(128, 128, state_dtype))
    config = gdn_config.decode_config(128, 128, state_dtype.itemsize)
    gdn_decode.launch_decode(call, torch.empty_like(call.v), config)
    assert hopper.loaded == ["decode_kernel"]


@pytest.mark.parametrize("tree", [False, True])
def test_verify_and_commit_compile(hopper: HopperWithoutDevice, tree: bool) -> None:
    at = pool(128, 128, torch.float32)
    kept = torch.zeros(1, 2, HEADS, 128, 128)
    parents = torch.zeros(1, 2, dtype=torch.int64) if tree else None
    call = VerifyCall(**tokens(128, 128, torch.bfloat16, 1, 2), **at, intermediates=kept, parents=parents)
    gdn_verify.launch_verify(call, torch.empty_like(call.v), gdn_config.decode_config(128, 128, 4))
    gdn_verify.launch_commit(CommitCall(**at, intermediates=kept, last=at["slots"]))
    assert hopper.loaded == ["verify_kernel", "commit_kernel"]


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "sequences", "checkpoints"),
    [
        (torch.bfloat16, 128, 128, 1, False), (torch.bfloat16, 128, 128, 512, True), (torch.bfloat16, 32, 16, 1, False),
        (torch.bfloat16, 256, 128, 1, False), (torch.float32, 32, 16, 1, False),
    ],
)  # fmt: skip
def test_extend_compiles(
    hopper: HopperWithoutDevice, dtype: torch.dtype, width: int, value_width: int, sequences: int, checkpoints: bool
) -> None:
    starts = torch.zeros(2, dtype=torch.int64)
    call = ExtendCall(
        **tokens(width, value_width, dtype, 64), **pool(width, value_width, torch.float32),
        cu_seqlens=torch.tensor([0, 64], dtype=torch.int32),
        checkpoints=CheckpointPlan(every=64, starts=starts, count=1) if checkpoints else None,
    )  # fmt: skip
    dot, on = dot_dtype(dtype, interpreted=False), torch.device("cpu")
    buffer = ScratchBuffer()
    buffer.reserve(scratch_bytes(HEADS, 64, dot), on)
    config = gdn_config.extend_config(sequences, HEADS, width, value_width, dot.itemsize, HOPPER_SHARED_BYTES)
    kept = torch.zeros_like(call.states) if checkpoints else None
    gdn_extend.launch_extend(
        call, torch.empty_like(call.v), kept, buffer.cut(HEADS, 64, dot, on, capturing=False), config
    )
    assert hopper.loaded == ["chunk_kernel", "scan_kernel"]
