"""The calls of FlashInfer's decode and verify, with every argument that matters passed by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.adapters.flashinfer.compiled import CompiledDecodes, DecodeKernel
from qwen35.adapters.flashinfer.release import FlashInferKernels, Kernel
from qwen35.domain.errors import UnavailableError


@dataclass(slots=True, kw_only=True)
class Step:
    """Tensors as FlashInfer shapes them: q, k [B, T, H, K], v, out [B, T, HV, V], a, b [B, T, HV], float32 A_log and
    dt_bias [HV]. Not frozen: one is made a call, and a frozen one takes three times as long to make."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    scale: float
    out: Tensor


def run_decode(kernel: DecodeKernel, step: Step, states: Tensor, *, read: Tensor, write: Tensor | None) -> None:
    """T = 1: update the pool in place and fill ``step.out``. ``write`` None: the slots that are read."""
    kernel(step.q, step.k, step.v, step.a, step.b, step.A_log, step.dt_bias, step.scale, step.out, states, read, write)


def run_verify(kernels: FlashInferKernels, step: Step, states: Tensor, *, read: Tensor, nodes: Tensor) -> None:
    """Fill ``step.out`` and ``nodes`` [B, T, HV, V, K], row i for batch row i; the pool is only read.

    ``disable_state_update`` is always passed: its default changes between releases.
    """
    if states.dtype == torch.bfloat16:
        required("mtp_bf16", kernels.mtp_bf16)(
            A_log=step.A_log, a=step.a, dt_bias=step.dt_bias, q=step.q, k=step.k, v=step.v, b=step.b,
            initial_state_source=states, initial_state_indices=read, intermediate_states_buffer=nodes,
            disable_state_update=True, use_qk_l2norm_in_kernel=True, scale=step.scale, output=step.out,
        )  # fmt: skip
        return
    # For a pool with padded slots the kernel is compiled for the pool's very shape, and its cache is keyed without
    # it. It checks no index against that shape, so any two slots can stand for the pool.
    pool = states if states.is_contiguous() else states[:2]
    required("mtp", kernels.mtp)(
        q=step.q, k=step.k, v=step.v, initial_state=pool, initial_state_indices=read, A_log=step.A_log, a=step.a,
        dt_bias=step.dt_bias, b=step.b, scale=step.scale, output=step.out, intermediate_states_buffer=nodes,
        disable_state_update=True, use_qk_l2norm=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolDecode:
    """FlashInfer's function, and where to look for what it compiled."""

    launch: DecodeKernel
    compiled: CompiledDecodes | None


def pool_decode(kernels: FlashInferKernels, state_dtype: torch.dtype) -> PoolDecode:
    """FlashInfer's decode, T = 1, over pools of ``state_dtype``."""
    return PoolDecode(_function_over(kernels, state_dtype), kernels.compiled)


def _function_over(kernels: FlashInferKernels, state_dtype: torch.dtype) -> DecodeKernel:
    """The function over pools of ``state_dtype``.

    Over a bfloat16 pool its public function does nothing but look at the arguments, which was done here, and call the
    function of that pool: where the release has that one as we know it, it is called without the detour.
    """
    short = kernels.decode_bf16
    if state_dtype == torch.bfloat16 and short is not None:

        def launch_short(
            q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
            out: Tensor, states: Tensor, read: Tensor, write: Tensor | None,
        ) -> None:  # fmt: skip
            short(
                A_log=A_log, a=a, dt_bias=dt_bias, q=q, k=k, v=v, b=b, initial_state_source=states,
                initial_state_indices=read, output_state_indices=write, output=out, use_qk_l2norm_in_kernel=True,
                scale=scale,
            )  # fmt: skip

        return launch_short
    public, backend = required("decode", kernels.decode), backend_of(kernels, "decode")

    def launch(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
        out: Tensor, states: Tensor, read: Tensor, write: Tensor | None,
    ) -> None:  # fmt: skip
        public(
            q=q, k=k, v=v, state=None, A_log=A_log, a=a, dt_bias=dt_bias, b=b, scale=scale, output=out,
            use_qk_l2norm=True, initial_state=states, initial_state_indices=read, output_state_indices=write,
            **backend,
        )  # fmt: skip

    return launch


def backend_of(kernels: FlashInferKernels, name: str) -> dict[str, str]:
    """Releases of 0.7 choose among implementations unless told; the one named here is the one measured."""
    return {"backend": "flashinfer"} if name in kernels.backend else {}


def required(name: str, kernel: Kernel | None) -> Kernel:
    """``kernel``; raises ``UnavailableError`` where this installation lacks it."""
    if kernel is None:
        raise UnavailableError("FlashInfer", [f"missing the {name} kernel"])
    return kernel
