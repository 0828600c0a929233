"""Which FlashInfer is installed, whether it has what we call, and how to load it.

The report reads source files and package metadata: it imports nothing. ``load`` imports FlashInfer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qwen35.adapters._kernels import sources
from qwen35.adapters._kernels.sources import ReleaseReport, Required, environment_kept

if TYPE_CHECKING:
    from qwen35.adapters.flashinfer.compiled import CompiledDecodes

Kernel = Callable[..., Any]

#: Packages by the name they are imported by, with the name they are installed by.
PACKAGES = MappingProxyType({
    "flashinfer": "flashinfer-python", "cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi",
    "cuda": "cuda-bindings", "triton": "triton",
})  # fmt: skip

#: What brings every package of ``PACKAGES`` in a release that has what we call.
REMEDY = "pip install 'qwen35[flashinfer]'"

_TOKENS = ("q", "k", "v", "A_log", "a", "dt_bias", "b", "scale", "output")
#: What we call: module, function, and every argument that we pass.
REQUIRED: Mapping[str, Required] = MappingProxyType({
    "decode": (
        "gdn_decode", "gated_delta_rule_decode_pretranspose",
        (*_TOKENS, "state", "use_qk_l2norm", "initial_state", "initial_state_indices", "output_state_indices"),
    ),
    "mtp": (
        "gdn_decode", "gated_delta_rule_mtp",
        (*_TOKENS, "use_qk_l2norm", "initial_state", "initial_state_indices", "intermediate_states_buffer",
         "disable_state_update"),
    ),
    "mtp_bf16": (
        "gdn_kernels.gdn_decode_bf16_state", "gated_delta_rule_mtp",
        (*_TOKENS, "use_qk_l2norm_in_kernel", "initial_state_source", "initial_state_indices",
         "intermediate_states_buffer", "disable_state_update"),
    ),
    "prefill": (
        "gdn_prefill", "chunk_gated_delta_rule",
        ("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens",
         "use_qk_l2norm_in_kernel", "output", "output_state", "state_checkpoints", "checkpoint_cu_starts",
         "checkpoint_every_n_tokens", "use_cp"),
    ),
})  # fmt: skip

#: What we call where a release has it, for less of the host's time: as in ``REQUIRED``.
SHORTER: Required = (
    "gdn_kernels.gdn_decode_bf16_state", "gated_delta_rule",
    (*_TOKENS, "use_qk_l2norm_in_kernel", "initial_state_source", "initial_state_indices", "output_state_indices"),
)  # fmt: skip

#: CuTe DSL sets this when it is imported and finds its runtime by it at every compilation: it has to stay.
DECLARED_ENVIRONMENT = frozenset({"CUTE_DSL_LIBS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferKernels:
    """FlashInfer's functions. ``backend`` names those that take a ``backend`` argument, as releases of 0.7 do.

    ``decode``: pool decode. ``mtp``, ``mtp_bf16``: several tokens a row over a float32 or bfloat16 pool.
    ``prefill``: chunked. None: this installation lacks it. ``decode_bf16``: what ``decode`` calls for a bfloat16 pool.
    ``workspaces``: tensors of the process among which are those of ``prefill``; None where they are not known.
    ``compiled``: finds what decode compiled.
    """

    decode: Kernel | None
    mtp: Kernel | None
    mtp_bf16: Kernel | None
    prefill: Kernel | None
    decode_bf16: Kernel | None = None
    backend: frozenset[str] = frozenset()
    workspaces: Mapping[Any, Any] | None = None
    compiled: CompiledDecodes | None = None


def report() -> ReleaseReport:
    """What is installed. Never raises; reads files and metadata only."""
    return sources.report("flashinfer", PACKAGES, REQUIRED.values())


def load() -> FlashInferKernels:
    """Import FlashInfer (seconds) and take its functions. The environment is left as it was, but for
    ``DECLARED_ENVIRONMENT``."""
    from qwen35.adapters.flashinfer.compiled import load_compiled  # needs torch, which the report does without

    with environment_kept(DECLARED_ENVIRONMENT):
        taken = {name: _take(module, function) for name, (module, function, _) in REQUIRED.items()}
        taken["decode_bf16"] = None if taken["mtp_bf16"] is None else _take_shorter()
        kernels = import_module("flashinfer.gdn_kernels")
        parts = {"mtp": "run_mtp_decode", "decode": "run_pretranspose_decode"}
        for name, part in parts.items():
            # The package swallows a failed import and leaves None, to be called later.
            if vars(kernels).get(part) is None:
                taken[name] = None
        compiled = load_compiled()
        chunked = [vars(kernels).get(f"chunk_gated_delta_rule_sm{sm}") for sm in (90, 100, 120)]
        if all(kernel is None for kernel in chunked):
            taken["prefill"] = None
    backend = frozenset(
        name for name, kernel in taken.items() if kernel and "backend" in inspect.signature(kernel).parameters
    )
    workspaces = vars(import_module("flashinfer.utils")).get("_cache_buf")
    return FlashInferKernels(
        **taken, backend=backend, workspaces=workspaces, compiled=None if taken["decode"] is None else compiled,
    )  # fmt: skip


def _take_shorter() -> Kernel | None:
    """The function of ``SHORTER`` where it is there and fits."""
    module, function, passed = SHORTER
    kernel: Kernel | None = vars(import_module(f"flashinfer.{module}")).get(function)
    return kernel if kernel is not None and takes(kernel, passed) else None


def takes(kernel: Kernel, passed: Iterable[str]) -> bool:
    """Whether ``kernel`` knows every argument that is ``passed`` and needs no other."""
    parameters, given = inspect.signature(kernel).parameters, set(passed)
    needed = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    return needed <= given <= set(parameters)


def _take(module: str, function: str) -> Kernel | None:
    try:
        kernel: Kernel = getattr(import_module(f"flashinfer.{module}"), function)
    except (ImportError, RuntimeError):
        return None  # RuntimeError: the bfloat16 module asks for a GPU when it is imported
    return kernel
