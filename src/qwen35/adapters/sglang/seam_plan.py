"""The largest calls that one of SGLang's model runners will make, read from its pools and its schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import GdnPlan

#: SGLang's allocators, that of unified memory included, never hand this slot out: padded tokens may write it.
RESERVED_SLOT = 0


def backend_plan(backend: Any, model_runner: Any, gathers_pool: bool) -> GdnPlan:
    """The plan for a GDNAttnBackend. ``gathers_pool``: SGLang copies a strided pool before extend, and in such a copy
    row 0 is a sequence like any other."""
    cache = backend.req_to_token_pool.mamba_pool.mamba_cache
    pool, conv = reserved_pool(backend), cache.conv[0]
    value_heads, value_width, key_width = pool.shape[2:]
    key_heads = (conv.shape[-2] - value_heads * value_width) // (2 * key_width)
    batch = max(backend.verify_intermediate_state_indices.shape[0], backend.req_to_token_pool.size)
    gathered = gathers_pool and not pool[0].is_contiguous()
    return GdnPlan(
        geometry=GdnGeometry(
            key_heads=key_heads, value_heads=value_heads, key_width=key_width, value_width=value_width
        ),
        state_dtype=pool.dtype, device=pool.device, max_batch=batch, max_tokens=_extend_tokens() + batch,
        max_draft=_draft_tokens(cache), token_dtype=model_runner.dtype,
        null_slot=None if gathered else RESERVED_SLOT, may_pad=True,
    )  # fmt: skip


def reserved_pool(backend: Any) -> torch.Tensor:
    """The pool [layers, N, HV, V, K] of whose slots SGLang hands out all but the reserved one."""
    pool: torch.Tensor = backend.req_to_token_pool.mamba_pool.mamba_cache.temporal
    return pool


def union(first: GdnPlan, second: GdnPlan) -> GdnPlan:
    """A plan that covers both, for target and draft models of one geometry; else the second.

    A slot is null only where it is in both: one adapter serves the pools of both.
    """
    null_slot = second.null_slot if first.null_slot == second.null_slot else None
    if (first.geometry, first.state_dtype, first.device, first.token_dtype) != (
        second.geometry, second.state_dtype, second.device, second.token_dtype,
    ):  # fmt: skip
        return replace(second, null_slot=null_slot)
    return replace(
        second, max_batch=max(first.max_batch, second.max_batch), max_tokens=max(first.max_tokens, second.max_tokens),
        max_draft=max(first.max_draft, second.max_draft), null_slot=null_slot,
    )  # fmt: skip


def replays_inputs(backend: Any) -> bool:
    """Whether speculative verify keeps inputs instead of states (ReplaySSM), which bypasses the dispatcher."""
    cache = backend.req_to_token_pool.mamba_pool.mamba_cache
    return cache.replayssm_d is not None or cache.replayssm_rawv is not None


def speculating() -> bool:
    """Whether this launch drafts. Its arguments are published before its scheduler is made."""
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm is not None


def _draft_tokens(cache: Any) -> int:
    """Draft tokens of a verify row: the steps of the intermediate buffer [L, R, T, HV, V, K], where there is one."""
    buffers: torch.Tensor | None = vars(cache).get("intermediate_ssm")
    return 0 if buffers is None else buffers.shape[2]


def _extend_tokens() -> int:
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    return int(chunk if chunk is not None and chunk > 0 else schedule.max_prefill_tokens)
