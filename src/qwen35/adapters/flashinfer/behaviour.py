"""Finds out, by running them once, how this release's kernels treat padding and large gate inputs.

These runs also compile the kernels for the plan's heads. They wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from qwen35.adapters.flashinfer.compiled import UNLIKE, CompiledDecodes, DecodeKernel, DecodeLayout
from qwen35.adapters.flashinfer.mends import ALIGNMENT, Behaviour
from qwen35.adapters.flashinfer.release import FlashInferKernels
from qwen35.adapters.flashinfer.steps import PoolDecode, Step, pool_decode, run_decode, run_verify
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.gdn_calls import GdnPlan

#: A gate input past float32's exp, exact in bfloat16.
LARGE = 128.0
SENTINEL = 3.0
#: Rows times value heads from which on FlashInfer's decode over a bfloat16 pool takes its kernel for many rows, and
#: those from which on it takes the largest tile of that.
MANY, MOST = 512, 1024


def decode_batches(plan: GdnPlan) -> tuple[int, ...]:
    """Rows of the decodes that are measured: two, and where the plan has rows for the kernel of many, enough for it."""
    heads = plan.geometry.value_heads
    most = -(-MOST // heads)
    return (2, most) if most > 2 and plan.max_batch * heads >= MANY else (2,)


def measure_decode(kernels: FlashInferKernels, plan: GdnPlan) -> Behaviour:
    """Decodes of one live row and padded ones; what is said of the kernels is what holds for all of them."""
    found = [_measure_decode(kernels, plan, batch) for batch in decode_batches(plan)]
    return Behaviour(
        skips_padding=all(b.skips_padding for b in found), finite_softplus=all(b.finite_softplus for b in found),
        borrows_first_slot=all(b.borrows_first_slot for b in found),
    )  # fmt: skip


def _measure_decode(kernels: FlashInferKernels, plan: GdnPlan, batch: int) -> Behaviour:
    """A live row (slot 1) and padded ones over a pool of three, with a slot before and behind that are not of it."""
    step, room, slots = _rows(plan, 1, batch, slots=5)
    states = room[1:4]
    decode = pool_decode(kernels, plan.state_dtype)
    run_decode(decode.launch, step, states, read=slots, write=None)
    _judge(decode, plan, batch)
    zero = bool((step.out[1:] == 0).all())
    first, others = (bool((part == SENTINEL).all()) for part in (states[0], room[[0, 3, 4]]))
    return Behaviour(
        skips_padding=first and others and zero, finite_softplus=_finite(step.out[0], states[1]),
        borrows_first_slot=others,
    )  # fmt: skip


def _judge(decode: PoolDecode, plan: GdnPlan, batch: int) -> None:
    """Whether the kernels that the function launches do the same without it, to the bit: over dense tensors, and over
    some that have all of ``LOOSE`` at once, since over a bfloat16 pool each further layout would be compiled for."""
    if decode.compiled is not None and _judge_layout(decode.launch, decode.compiled, plan, batch, gap=0):
        _judge_layout(decode.launch, decode.compiled, plan, batch, gap=ALIGNMENT)


def _judge_layout(function: DecodeKernel, compiled: CompiledDecodes, plan: GdnPlan, batch: int, gap: int) -> bool:
    """Whether both did the same. With a ``gap`` of elements between rows and between slots, states are written to slots
    of their own too, where the plan has a slot for padded rows to write."""
    split = bool(gap) and plan.null_slot is not None
    left, right = (_drawn(plan, batch, gap, split) for _ in range(2))
    layout = DecodeLayout.of(left.step.q, left.step.v, left.step.scale, left.states, split=split, packed=bool(gap))
    compiled.reserve(plan.device, layout.width)
    try:
        left.run(function)
    except (AssertionError, *UNLIKE):
        return False  # calls of this layout are none of the function's
    found = compiled.find(layout)
    if found is None:
        return False
    try:
        right.run(found.launch)
        same = _same_bits(left.step.out, right.step.out) and _same_bits(left.states, right.states)
    except UNLIKE:
        same = False
    compiled.judge(layout, found.family, same)
    return same


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A decode with its pool: slots to read and to write (None: those that are read)."""

    step: Step
    states: Tensor
    read: Tensor
    write: Tensor | None

    def run(self, kernel: DecodeKernel) -> None:
        run_decode(kernel, self.step, self.states, read=self.read, write=self.write)


def _drawn(plan: GdnPlan, batch: int, gap: int, split: bool) -> _Drawn:
    """The same random step every time, each row with slots of its own: padded ones would meet in slot 0."""
    step, states, slots = _rows(plan, 1, batch, slots=(1 + split) * batch + 1, gap=gap)
    source = torch.Generator(plan.device).manual_seed(0)
    for tensor in (step.q, step.k, step.v, step.a, step.b, step.A_log, step.dt_bias, states):
        tensor.normal_(generator=source)
    slots.copy_(torch.arange(1, batch + 1))
    return _Drawn(step, states, slots, slots + batch if split else None)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.int8), y.view(torch.int8))


def measure_verify(kernels: FlashInferKernels, plan: GdnPlan) -> Behaviour:
    """One verify of a live row (slot 1) and a padded one. Raises ``UnsupportedError`` where it writes the pool."""
    step, states, slots = _rows(plan, plan.max_draft, 2, slots=2)
    nodes = torch.full((2, plan.max_draft, *states.shape[1:]), SENTINEL, dtype=states.dtype, device=states.device)
    run_verify(kernels, step, states, read=slots, nodes=nodes)
    if not bool((states == SENTINEL).all()):
        raise UnsupportedError("FlashInfer verify", ["this release writes the state pool with disable_state_update"])
    return Behaviour(skips_padding=bool((nodes[1] == SENTINEL).all()), finite_softplus=_finite(step.out[0], nodes[0]))


def _rows(plan: GdnPlan, tokens: int, batch: int, slots: int, gap: int = 0) -> tuple[Step, Tensor, Tensor]:
    """The step of ``batch`` rows, memory of ``slots`` slots, and which each row has: 1, the others -1. Rows and slots
    lie ``gap`` elements apart."""
    g, device = plan.geometry, plan.device

    def full(value: float, *shape: int, dtype: torch.dtype = plan.token_dtype) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, value, dtype=dtype, device=device)
        size = prod(shape[1:])
        room = torch.full((shape[0], size + gap), value, dtype=dtype, device=device)
        return room[:, :size].view(shape)

    step = Step(
        q=full(1.0, batch, tokens, g.key_heads, g.key_width), k=full(1.0, batch, tokens, g.key_heads, g.key_width),
        v=full(1.0, batch, tokens, g.value_heads, g.value_width), a=full(LARGE, batch, tokens, g.value_heads),
        b=full(0.0, batch, tokens, g.value_heads), A_log=full(0.0, g.value_heads, dtype=torch.float32),
        dt_bias=full(0.0, g.value_heads, dtype=torch.float32), scale=g.key_width**-0.5,
        out=full(1.0, batch, tokens, g.value_heads, g.value_width),
    )  # fmt: skip
    states = full(SENTINEL, slots, g.value_heads, g.value_width, g.key_width, dtype=plan.state_dtype)
    return step, states, torch.tensor([1] + [-1] * (batch - 1), dtype=torch.int32, device=device)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)
