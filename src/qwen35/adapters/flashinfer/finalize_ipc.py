"""FlashInfer's one-shot finalize over CUDA IPC: no multicast, ranks of one host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from qwen35.adapters.flashinfer.finalize_names import Loader, installed, ipc_names
from qwen35.adapters.flashinfer.finalize_workspace import WEIGHT_DTYPES, FlashInferFusionWorkspace
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.finalize_capabilities import DeviceFacts, FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import signature_support, torch_dtype
from qwen35.services.finalize_agreement import PROCESS_AGREEMENTS, Agreements, together

NAME = "flashinfer_ipc"

#: trtllm_moe_allreduce_fusion.cuh computes row * hidden in 32-bit integers.
MOST_ROUTED_ELEMENTS = 2**31 - 1


#: Rows up to which the fused finalize came back: calls in quick succession hung on two H200s at 256 rows, and at mixed
#: sizes up to 128, with 0.6.18 (docs/upstream.md).
MOST_ROWS = 64


class FlashInferIpcFusion:
    """Sums experts and ranks in bfloat16, rounding at every term: that is what ``roundings`` counts."""

    def __init__(
        self, facts: DeviceFacts, load: Loader = ipc_names, agreements: Agreements = PROCESS_AGREEMENTS,
        on_device: Callable[[str], AbstractContextManager[object]] = torch.cuda.device,
    ) -> None:  # fmt: skip
        self._facts, self._load, self._agreements, self._on_device = facts, load, agreements, on_device
        self.capabilities = FusionCapabilities(
            device_types=frozenset({"cuda"}), dtypes=frozenset({"bfloat16"}), tp_sizes=frozenset({2, 4, 8, 16}),
            one_host=True, most_tokens=MOST_ROWS, roundings=16.0, weight_dtypes=WEIGHT_DTYPES, fewest_routed_rows=1,
            most_routed_elements=MOST_ROUTED_ELEMENTS,
        )  # fmt: skip

    def supports(self, signature: WorkspaceSignature) -> Support:
        reasons = [*signature_support(self.capabilities, signature).reasons, *self._facts.no_symmetric_memory]
        if signature.max_m > MOST_ROWS:
            reasons.append(f"max_m requires at most {MOST_ROWS}, past which FlashInfer's fused finalize may hang, got "
                           f"{signature.max_m}")  # fmt: skip
        return Support.of(*reasons, *installed())

    def prepare(self, signature: WorkspaceSignature) -> FlashInferFusionWorkspace:
        support = self.supports(signature)
        if not support:
            raise UnsupportedError(f"{NAME} workspace", support.reasons)
        agreement = self._agreements.of(signature.group, signature.tp_size)
        names = together(agreement, f"{NAME} workspace", self._load)
        with self._on_device(signature.device):
            # The group is given: left out, it would be the whole world.
            native = names.make(
                tp_size=signature.tp_size, tp_rank=signature.rank, max_token_num=signature.max_m,
                hidden_dim=signature.hidden, dtype=torch_dtype(signature.dtype), group=signature.group,
            )  # fmt: skip
        addresses = tuple(address for buffer in native.ipc_handles for address in buffer)
        return FlashInferFusionWorkspace(
            NAME, signature, native, names, addresses=addresses, capabilities=self.capabilities
        )

    def close(self) -> None:
        """Holds nothing."""
