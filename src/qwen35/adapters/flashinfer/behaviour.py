"""Finds out, by running them once, how this release's kernels treat padding and large gate inputs.

These runs also compile the kernels for the plan's heads. They wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.adapters.flashinfer.mends import Behaviour
from qwen35.adapters.flashinfer.release import FlashInferKernels
from qwen35.adapters.flashinfer.steps import Step, decode_kernel, run_decode, run_verify
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.gdn_calls import GdnPlan

#: A gate input past float32's exp, exact in bfloat16.
LARGE = 128.0
SENTINEL = 3.0


def measure_decode(kernels: FlashInferKernels, plan: GdnPlan) -> Behaviour:
    """One decode of a live row (slot 1) and a padded one over a pool of two."""
    step, states, slots = _two_rows(plan, 1)
    run_decode(decode_kernel(kernels, plan.state_dtype), step, states, read=slots, write=None)
    kept = bool((states[0] == SENTINEL).all()) and bool((step.out[1] == 0).all())
    return Behaviour(skips_padding=kept, finite_softplus=_finite(step.out[0], states[1]))


def measure_verify(kernels: FlashInferKernels, plan: GdnPlan) -> Behaviour:
    """One verify of a live row (slot 1) and a padded one. Raises ``UnsupportedError`` where it writes the pool."""
    step, states, slots = _two_rows(plan, plan.max_draft)
    nodes = torch.full((2, plan.max_draft, *states.shape[1:]), SENTINEL, dtype=states.dtype, device=states.device)
    run_verify(kernels, step, states, read=slots, nodes=nodes)
    if not bool((states == SENTINEL).all()):
        raise UnsupportedError("FlashInfer verify", ["this release writes the state pool with disable_state_update"])
    return Behaviour(skips_padding=bool((nodes[1] == SENTINEL).all()), finite_softplus=_finite(step.out[0], nodes[0]))


def _two_rows(plan: GdnPlan, tokens: int) -> tuple[Step, Tensor, Tensor]:
    """The step, its pool of two slots, and the slots."""
    g, device = plan.geometry, plan.device

    def full(value: float, *shape: int, dtype: torch.dtype = plan.token_dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    step = Step(
        q=full(1.0, 2, tokens, g.key_heads, g.key_width), k=full(1.0, 2, tokens, g.key_heads, g.key_width),
        v=full(1.0, 2, tokens, g.value_heads, g.value_width), a=full(LARGE, 2, tokens, g.value_heads),
        b=full(0.0, 2, tokens, g.value_heads), A_log=full(0.0, g.value_heads, dtype=torch.float32),
        dt_bias=full(0.0, g.value_heads, dtype=torch.float32), scale=g.key_width**-0.5,
        out=full(1.0, 2, tokens, g.value_heads, g.value_width),
    )  # fmt: skip
    states = full(SENTINEL, 2, g.value_heads, g.value_width, g.key_width, dtype=plan.state_dtype)
    return step, states, torch.tensor([1, -1], dtype=torch.int32, device=device)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)
