"""FlashInfer's CuTe DSL finalize over multi-node NVLink: Blackwell with multicast.

Written and tested against FlashInfer's own configuration classes with a fake workspace type; no machine with
NVLink multicast was at hand to run it on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from qwen35.adapters.flashinfer.finalize_names import FusionNames, Loader, installed, multicast_names
from qwen35.adapters.flashinfer.finalize_scratch import KeptIndices
from qwen35.adapters.flashinfer.finalize_workspace import WEIGHT_DTYPES, FlashInferFusionWorkspace
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import UnavailableError, UnsupportedError
from qwen35.domain.finalize_capabilities import DeviceFacts, FusionCapabilities
from qwen35.domain.finalize_early_load import with_early_shared_load
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import signature_support, torch_dtype
from qwen35.services.devices import on
from qwen35.services.finalize_agreement import PROCESS_AGREEMENTS, Agreements, together

logger = logging.getLogger("qwen35")

NAME = "flashinfer_multicast"

MIN_COMPUTE_CAPABILITY = (10, 0)


class SymmetricMemoryBackend(Protocol):
    """The two functions of torch's symmetric memory that choose a backend for the process."""

    def get_backend(self, device: torch.device) -> str | None: ...

    def set_backend(self, name: Any) -> None: ...


def _torch_backend() -> SymmetricMemoryBackend:
    from torch.distributed import _symmetric_memory

    backend: SymmetricMemoryBackend = _symmetric_memory
    return backend


def group_shape(group: Any) -> tuple[int, int]:
    """Size of a process group, and this process's rank in it."""
    return dist.get_world_size(group), dist.get_rank(group)


class FlashInferMulticastFusion:
    """Loads the shared expert's output early, except where the signature is ``speculative``."""

    def __init__(
        self, facts: DeviceFacts, *, load: Loader = multicast_names,
        backend: Callable[[], SymmetricMemoryBackend] = _torch_backend,
        shape_of: Callable[[Any], tuple[int, int]] = group_shape, agreements: Agreements = PROCESS_AGREEMENTS,
    ) -> None:  # fmt: skip
        self._facts, self._load, self._backend, self._shape_of = facts, load, backend, shape_of
        self._agreements = agreements
        # Ranks travel in bfloat16 and are summed in float32: one rounding a rank (16 at most) beside the last.
        self.capabilities = FusionCapabilities(
            device_types=frozenset({"cuda"}), dtypes=frozenset({"bfloat16"}), tp_sizes=frozenset({2, 4, 8, 16}),
            roundings=17.0, weight_dtypes=WEIGHT_DTYPES, fewest_routed_rows=1,
        )  # fmt: skip

    def supports(self, signature: WorkspaceSignature) -> Support:
        """Every reason against it; FlashInfer is imported only where the hardware would do."""
        facts = self._facts
        reasons = list(signature_support(self.capabilities, signature).reasons)
        if facts.compute_capability is None or facts.compute_capability < MIN_COMPUTE_CAPABILITY:
            got = facts.compute_capability and ".".join(map(str, facts.compute_capability))
            reasons.append(f"compute capability requires at least 10.0, got {got}")
        reasons += facts.no_symmetric_memory
        reasons += facts.no_multicast
        if reasons:
            return Support.of(*reasons, *installed())
        if signature.group is not None:
            size, rank = self._shape_of(signature.group)
            if size != signature.tp_size:
                reasons.append(f"process group requires {signature.tp_size} ranks, got {size}")
            if rank != signature.rank:
                reasons.append(f"process group requires rank {signature.rank}, got {rank}")
        try:
            reasons += _against_profile(self._load(), signature)
        except UnavailableError as exc:
            reasons += exc.reasons
        return Support.of(*reasons)

    def prepare(self, signature: WorkspaceSignature) -> FlashInferFusionWorkspace:
        support = self.supports(signature)
        if not support:
            raise UnsupportedError(f"{NAME} workspace", support.reasons)
        agreement = self._agreements.of(signature.group, signature.tp_size)
        with on(torch.device(signature.device)):  # FlashInfer asks for the current device
            names, config, indices = together(agreement, f"{NAME} workspace", partial(self._alone, signature))
            native = names.make(
                tp_size=signature.tp_size, tp_rank=signature.rank, max_token_num=signature.max_m,
                hidden_dim=signature.hidden, dtype=torch_dtype(signature.dtype), group=signature.group,
                top_k=signature.top_k, rms_eps=signature.eps, routed_scaling_factor=1.0,
                weight_bias=signature.weight_bias, include_shared_expert=signature.shared_expert, add_residual=True,
                write_residual_output=True, config=config,
            )  # fmt: skip
        return FlashInferFusionWorkspace(
            NAME, signature, native, names, addresses=(), capabilities=self.capabilities, scratch=indices, pdl=True
        )

    def close(self) -> None:
        """Holds nothing."""

    def _alone(self, signature: WorkspaceSignature) -> tuple[FusionNames, Any, KeptIndices]:
        """What a rank does before it meets the others: the names, the configuration to compile, memory of its own."""
        self._choose_backend(torch.device(signature.device))
        names = self._load()
        config = with_early_shared_load(names.config, speculative=signature.speculative)
        logger.info("%s: shared expert loaded early: %s", NAME, config is not names.config)
        return names, config, KeptIndices(signature)

    def _choose_backend(self, device: torch.device) -> None:
        """Keep the process's symmetric memory backend; choose NCCL's where there is none yet."""
        backend = self._backend()
        if backend.get_backend(device) is None:
            backend.set_backend("NCCL")
        if backend.get_backend(device) is None:
            raise UnavailableError(NAME, [f"symmetric memory has no backend for {device}"])


def _against_profile(names: FusionNames, signature: WorkspaceSignature) -> list[str]:
    """FlashInfer compiles for the shapes of its profiles only."""
    shapes = []
    for profile in names.config.profiles:
        if profile.matches(
            tp_size=signature.tp_size, hidden_size=signature.hidden, top_k=signature.top_k,
            dtype=torch_dtype(signature.dtype),
        ):  # fmt: skip
            routes = (("finalize", profile.finalize_routes), ("all-reduce", profile.all_reduce_routes))
            return [
                f"{what} profile requires fewer tokens, got max_m = {signature.max_m}"
                for what, route in routes if not route.supports(signature.max_m)
            ]  # fmt: skip
        shapes.append(f"({profile.tp_size}, {profile.hidden_size}, {profile.top_k})")
    asked = (signature.tp_size, signature.hidden, signature.top_k)
    return [f"compiled profile requires (ranks, hidden, top_k) of {' or '.join(shapes)}, got {asked}"]
