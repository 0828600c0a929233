"""What every launch of a GDN kernel needs to know of its call."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from qwen35.ports.gated_delta_rule import Gates, LogGates


def gate_arguments(gates: Gates) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """gate, beta, A_log, dt_bias and whether they are raw (a, b and two parameters) or log decay and beta."""
    if isinstance(gates, LogGates):
        return gates.g, gates.beta, None, None, False
    return gates.a, gates.b, gates.A_log, gates.dt_bias, True


def scale_of(scale: float | None, key_width: int) -> float:
    """The query's scale; K**-0.5 where the call gives none (0.0 is a scale)."""
    return float(key_width**-0.5 if scale is None else scale)


def dot_dtype(tokens: torch.dtype, interpreted: bool) -> torch.dtype:
    """Operands of matrix products.

    float16 goes by float32, since a normalising factor of up to 1000 can leave its range. The interpreter
    multiplies bfloat16 operands wrongly, so it gets float32.
    """
    return torch.bfloat16 if tokens is torch.bfloat16 and not interpreted else torch.float32


def dependent_launch() -> bool:
    """Whether a launch on the current GPU may begin before the kernel ahead of it has ended, and wait for it inside.

    Programmatic dependent launch, from compute capability 9.0 on (CUDA programming guide). It hides the launch behind
    the end of that kernel: 0.4 microseconds of each decode of one row, called back to back, on an H200
    (benchmarks/results/decode_dependent.json). The kernel must ``gdc_wait`` before it reads or writes; asking L2 for
    the state before that costs more than it gains (decode_ahead.json).
    """
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have on ``device``; 0 where there is no GPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
