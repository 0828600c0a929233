"""FlashInfer's all-reduce + residual + norm over CUDA IPC, behind an expert sum of our own; no multicast, one host.

Its fused finalize (``kMoEFinalizeARResidualRMSNorm``) is not called: it hung in calls behind one another (F25 in
docs/upstream.md), and takes longer than the two launches (benchmarks/results/finalize.json).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from qwen35.adapters._kernels.expert_sum import ExpertSum, triton_expert_sum
from qwen35.adapters.flashinfer.finalize_names import FusionNames, Loader, installed, ipc_names
from qwen35.adapters.flashinfer.finalize_scratch import ExpertShare
from qwen35.adapters.flashinfer.finalize_workspace import FlashInferFusionWorkspace
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.finalize_capabilities import DeviceFacts, FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import signature_support, torch_dtype
from qwen35.services.finalize_agreement import PROCESS_AGREEMENTS, Agreements, together

NAME = "flashinfer_ipc"

#: Ranks for which FlashInfer knows whether one shot or two are better, and the words of 16 bytes that it reads rows in.
RANKS, WIDTH_MULTIPLE = frozenset({2, 4, 8}), 8
#: Rows up to which the pair of launches was measured, and the workspace that was made for them.
MOST_ROWS = 1024


class FlashInferIpcFusion:
    """Rounds a rank's share to bfloat16, adds 8 ranks at most up in bfloat16, adds the residual, and norms: so much
    ``roundings`` counts."""

    def __init__(
        self, facts: DeviceFacts, load: Loader = ipc_names, agreements: Agreements = PROCESS_AGREEMENTS,
        on_device: Callable[[str], AbstractContextManager[object]] = torch.cuda.device,
        expert_sum: Callable[[], ExpertSum] = triton_expert_sum,
    ) -> None:  # fmt: skip
        self._facts, self._load, self._agreements, self._on_device = facts, load, agreements, on_device
        self._expert_sum = expert_sum
        self.capabilities = FusionCapabilities(
            device_types=frozenset({"cuda"}), dtypes=frozenset({"bfloat16"}), tp_sizes=RANKS,
            one_host=True, most_tokens=MOST_ROWS, roundings=10.0,
        )  # fmt: skip

    def supports(self, signature: WorkspaceSignature) -> Support:
        reasons = [*signature_support(self.capabilities, signature).reasons, *self._facts.no_symmetric_memory]
        if signature.max_m > MOST_ROWS:
            reasons.append(f"max_m requires at most {MOST_ROWS}, got {signature.max_m}")
        if signature.hidden % WIDTH_MULTIPLE:
            reasons.append(f"hidden requires a multiple of {WIDTH_MULTIPLE}, got {signature.hidden}")
        return Support.of(*reasons, *installed())

    def prepare(self, signature: WorkspaceSignature) -> FlashInferFusionWorkspace:
        support = self.supports(signature)
        if not support:
            raise UnsupportedError(f"{NAME} workspace", support.reasons)
        agreement = self._agreements.of(signature.group, signature.tp_size)
        with self._on_device(signature.device):
            names, share = together(agreement, f"{NAME} workspace", partial(self._alone, signature))
            # The group is given: left out, it would be the whole world.
            native = names.make(
                tp_size=signature.tp_size, tp_rank=signature.rank, max_token_num=signature.max_m,
                hidden_dim=signature.hidden, dtype=torch_dtype(signature.dtype), group=signature.group,
            )  # fmt: skip
        addresses = tuple(address for buffer in native.ipc_handles for address in buffer)
        return FlashInferFusionWorkspace(
            NAME, signature, native, names, addresses=addresses, capabilities=self.capabilities, scratch=share
        )

    def close(self) -> None:
        """Holds nothing."""

    def _alone(self, signature: WorkspaceSignature) -> tuple[FusionNames, ExpertShare]:
        """What a rank does before it meets the others: the names, and all that is allocated and compiled here."""
        names = self._load()
        share = ExpertShare(signature, self._expert_sum())
        share.warm_up()
        return names, share
