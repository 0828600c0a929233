"""SGLang's Triton kernels of the gated delta rule: which are installed, and how to load them.

The report reads source files and metadata and imports nothing. ``load`` imports SGLang, for seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from qwen35.adapters._kernels import sources
from qwen35.adapters._kernels.sources import ReleaseReport, Required, environment_kept

Kernel = Callable[..., Any]

#: Packages by the name they are imported by, with the name they are installed by.
PACKAGES = MappingProxyType({"sglang": "sglang", "triton": "triton", "einops": "einops"})

_FOLDER = "kernels.ops.attention.fla"
#: What we call: module, function, and every argument that we pass.
REQUIRED: Mapping[str, Required] = MappingProxyType({
    "packed_decode": (
        f"{_FOLDER}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode",
        ("mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "out", "ssm_state_indices",
         "use_qk_l2norm_in_kernel"),
    ),
    "recurrent": (
        f"{_FOLDER}.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update",
        ("A_log", "a", "dt_bias", "softplus_beta", "softplus_threshold", "q", "k", "v", "b", "initial_state_source",
         "initial_state_indices", "scale", "use_qk_l2norm_in_kernel", "cu_seqlens", "disable_state_update",
         "intermediate_states_buffer", "intermediate_state_indices", "cache_steps", "retrieve_parent_token"),
    ),
    "chunked": (
        f"{_FOLDER}.chunk", "chunk_gated_delta_rule",
        ("q", "k", "v", "g", "beta", "scale", "initial_state", "initial_state_indices", "cu_seqlens",
         "use_qk_l2norm_in_kernel", "inplace_update"),
    ),
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangKernels:
    """SGLang's functions. ``packed_decode``: one token from a packed projection. ``recurrent``: several tokens a row,
    with intermediates. ``chunked``: prefill."""

    packed_decode: Kernel
    recurrent: Kernel
    chunked: Kernel


def report() -> ReleaseReport:
    """What is installed. Never raises; reads files and metadata only."""
    return sources.report("sglang", PACKAGES, REQUIRED.values())


def load() -> SGLangKernels:
    """Import SGLang and take its functions. SGLang points Triton, inductor, CUDA and FlashInfer to caches of its own
    through the environment; that is undone."""
    with environment_kept():
        taken = {
            name: getattr(import_module(f"sglang.{module}"), function)
            for name, (module, function, _) in REQUIRED.items()
        }
    return SGLangKernels(**taken)
