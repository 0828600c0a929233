"""Stands where one of SGLang's GDN kernel objects stood in a dispatcher.

Argument names and layouts are those of LinearAttnKernelBase: token tensors [1, tokens, heads, width], the pool
[N, HV, V, K], slots int32 with -1 for padding rows and slot 0 reserved.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from qwen35.adapters.sglang import seam_calls
from qwen35.adapters.sglang.seam_checkpoints import planned_checkpoints
from qwen35.adapters.sglang.seam_router import KernelRouter
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.gated_delta_rule import ExtendCall, GatedDeltaRule
from qwen35.services.devices import capturing

NULL_SLOT = 0


class GdnKernel:
    """Serves the routed phases by our service and everything else by ``original``, the object it replaces.

    ``gathers``: that this kernel, not SGLang, makes a strided pool contiguous for ``original``'s extend. ``chunk``:
    tokens of a chunk of ``original``'s extend, before each of which it returns the state. ``reserved``: the pool whose
    slot 0 is never a request's (None: where no phase is routed).
    """

    def __init__(
        self, original: Any, router: KernelRouter, *, chunk: int, gathers: bool, reserved: Tensor | None
    ) -> None:
        self.original, self.router = original, router
        self._chunk, self._gathers, self._reserved = chunk, gathers, reserved

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
        ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """mixed_qkv [B, 2*H*K + HV*V] after the convolution; returns [1, B, HV, V] and updates the pool."""

        def own() -> Tensor:
            out: Tensor = self.original.packed_decode(
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, ssm_states=ssm_states,
                cache_indices=cache_indices, num_v_heads=num_v_heads, head_v_dim=head_v_dim, **kwargs,
            )  # fmt: skip
            return out

        def ours(service: GatedDeltaRule) -> Tensor:
            return service.decode(seam_calls.packed_decode_call(
                mixed_qkv, a, b, A_log, dt_bias, scale, ssm_states, self._slots(cache_indices, ssm_states),
                num_v_heads, head_v_dim, kwargs,
            ))[None]  # fmt: skip

        return self.router.serve(Phase.DECODE, self.original, ours, own)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """One token a row; returns [1, B, HV, V] and updates the pool."""

        def own() -> Tensor:
            out: Tensor = self.original.decode(
                q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, **kwargs,
            )  # fmt: skip
            return out

        def ours(service: GatedDeltaRule) -> Tensor:
            return service.decode(seam_calls.decode_call(
                q, k, v, a, b, A_log, dt_bias, ssm_states, self._slots(cache_indices, ssm_states), kwargs
            ))[None]  # fmt: skip

        return self.router.serve(Phase.DECODE, self.original, ours, own)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
        query_start_loc: Tensor, **kwargs: Any,
    ) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
        """Packed sequences; returns out [1, T, HV, V], None, and the planned checkpoints [1, count, HV, V, K].

        The pool is updated; an ``output`` among the arguments is filled and is what is returned.
        """

        def own() -> tuple[Tensor, None, Tensor | None]:
            return self._own_extend(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, kwargs)

        def ours(service: GatedDeltaRule) -> tuple[Tensor, None, Tensor | None]:
            call, whole = seam_calls.extend_call(
                q, k, v, g, beta, ssm_states, self._slots(cache_indices, ssm_states), query_start_loc, kwargs
            )
            return self._extend(service, call, whole, kwargs.get("output"))

        return self.router.serve(Phase.EXTEND, self.original, ours, own)

    def target_verify(
        self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Draft tokens of a chain or a tree; returns [1, B*T, HV, V] and fills the intermediate states only."""

        def own() -> Tensor:
            out: Tensor = self.original.target_verify(
                A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, ssm_states=ssm_states,
                cache_indices=cache_indices, query_start_loc=query_start_loc, **kwargs,
            )  # fmt: skip
            return out

        def ours(service: GatedDeltaRule) -> Tensor:
            return service.verify(seam_calls.verify_call(
                A_log, dt_bias, q, k, v, a, b, ssm_states, self._slots(cache_indices, ssm_states), query_start_loc,
                kwargs,
            )).flatten(0, 1)[None]  # fmt: skip

        return self.router.serve(Phase.VERIFY, self.original, ours, own)

    def _extend(
        self, service: GatedDeltaRule, call: ExtendCall, whole: Tensor | None, output: Tensor | None
    ) -> tuple[Tensor, None, Tensor | None]:
        if capturing() and not service.capabilities.captures_extend:
            raise UnsupportedError("extend", ["extend requires eager execution, got a CUDA graph capture"])
        result = service.extend(call)
        out = output if output is not None else (result.out if whole is None else whole)[None]
        return out, None, None if result.checkpoints is None else result.checkpoints[None]

    def _own_extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, offsets: Tensor,
        others: dict[str, Any],
    ) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
        """``original``'s extend, on a pool and with checkpoints in the layouts that SGLang planned for us."""
        pool, rows = states, slots
        gathered = self._gathers and not states.is_contiguous()
        if gathered:
            pool = states[slots.clamp(min=NULL_SLOT)].contiguous()
            rows = torch.arange(slots.shape[0], device=slots.device, dtype=slots.dtype)
        out, last, chunk_states = self.original.extend(
            q, k, v, g, beta, ssm_states=pool, cache_indices=rows, query_start_loc=offsets, **others
        )
        if gathered:
            # Padding rows land in the slot that SGLang reserves, whose content is nobody's.
            states[slots.clamp(min=NULL_SLOT)] = pool
        plan = seam_calls.checkpoint_plan(others)
        # SGLang's CuTe DSL prefill returns none, and SGLang says so itself where it would read them.
        if plan is not None and chunk_states is not None and not self.original.uses_state_checkpoints:
            final = pool[rows.clamp(min=NULL_SLOT)]
            chunk_states = planned_checkpoints(chunk_states, plan, offsets, final, self._chunk)
        return out, last, chunk_states

    def _slots(self, slots: Tensor, states: Tensor) -> Tensor:
        """Warm-up fills whole batches with the reserved slot, which checked mode would take for a repetition.

        Where SGLang gathers a page-major pool for the call, ``states`` is a copy, whose row 0 is a request like others.
        """
        if self._reserved is None or not self.router.checked or capturing():
            return slots
        if states.untyped_storage().data_ptr() != self._reserved.untyped_storage().data_ptr():
            return slots
        return torch.where(slots == NULL_SLOT, -1, slots)


def kernel_class(base: type) -> type[GdnKernel]:
    """``GdnKernel`` as a subclass of SGLang's ``base``, which SGLang's type checks then accept."""
    return type("GdnKernel", (GdnKernel, base), {"__module__": __name__})


def stand_in(
    kind: type[GdnKernel], base: type, original: Any, router: KernelRouter, *, chunk: int, gathers: bool,
    reserved: Tensor | None,
) -> GdnKernel:  # fmt: skip
    """A kernel of class ``kind`` for ``original``, with the traits that ``base`` declares taken from it.

    Where extend is routed it keeps planned checkpoints and no snapshots, whatever ``original`` does.
    """
    kernel = kind(original, router, chunk=chunk, gathers=gathers, reserved=reserved)
    traits = {
        name: getattr(original, name)
        for name, value in inspect.getmembers(base, lambda value: isinstance(value, bool))
        if not name.startswith("_") and isinstance(value, bool)
    }
    if Phase.EXTEND in router.routes:
        traits |= {"uses_state_checkpoints": True, "supports_track_state_snapshot": False}
    for name, value in traits.items():
        setattr(kernel, name, value)
    return kernel
