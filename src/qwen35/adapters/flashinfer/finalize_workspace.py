"""One FlashInfer workspace behind our port, whichever backend made it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwen35.adapters.flashinfer.finalize_names import FusionNames
from qwen35.adapters.flashinfer.finalize_scratch import ExpertShare, KeptIndices
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import ClosedError, UnsupportedError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import (
    check_all_reduce,
    check_finalize,
    handoff_tensors,
    token_support,
    torch_dtype,
)
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.services.devices import on

#: FlashInfer reads router weights in the tokens' dtype.
WEIGHT_DTYPES = frozenset({"bfloat16"})


class FlashInferFusionWorkspace:
    """Both patterns on one native workspace, with the epsilon and bias of the signature, on the signature's device.

    With ``KeptIndices`` a finalize is FlashInfer's own, with an ``ExpertShare`` it is that and the all-reduce pattern.
    What ``capabilities`` are against is refused.
    """

    def __init__(
        self, adapter: str, signature: WorkspaceSignature, native: Any, names: FusionNames, *,
        addresses: tuple[int, ...], capabilities: FusionCapabilities, scratch: KeptIndices | ExpertShare,
        pdl: bool = False,
    ) -> None:  # fmt: skip
        self.adapter, self.signature, self.addresses = adapter, signature, addresses
        self._native, self._names, self._pdl, self._can = native, names, pdl, capabilities
        self._scratch, self._device = scratch, torch.device(signature.device)

    def supports(self, m: int) -> Support:
        support = token_support(self.signature, m, self._native is None)
        if not support:
            return support
        s = self.signature
        fits = self._native.is_buffer_size_sufficient(s.tp_size, m, s.hidden, torch_dtype(s.dtype))
        return Support.of() if fits else Support.of(f"FlashInfer's buffers require fewer tokens, got {m}")

    def finalize(
        self, handoff: FinalizeHandoff, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        self._check_usable()
        check_finalize(self.signature, handoff, residual, gamma, out)
        routed, weights, indices, shared = handoff_tensors(handoff)
        self._refuse("finalize", (*self.supports(handoff.m).reasons, *self._can.against(handoff)))
        with on(self._device):
            if isinstance(self._scratch, ExpertShare):
                share = self._scratch(routed, weights, indices, shared)
                return self._run(self._names.all_reduce, share, residual, gamma, out)
            kept = self._scratch(weights, indices)
            return self._run(
                self._names.finalize, routed, residual, gamma, out,
                expanded_idx_to_permuted_idx=kept, expert_scale_factor=weights, shared_expert_output=shared,
            )  # fmt: skip

    def all_reduce(
        self, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        self._check_usable()
        check_all_reduce(self.signature, local, residual, gamma, out)
        self._refuse("all-reduce", self.supports(local.shape[0]).reasons)
        with on(self._device):
            return self._run(self._names.all_reduce, local, residual, gamma, out)

    def destroy(self) -> None:
        if self._native is not None:
            self._native.destroy()
        self._native = None

    def _check_usable(self) -> None:
        if self._native is None:
            raise ClosedError("the fusion workspace is destroyed; prepare a new one")

    def _refuse(self, call: str, reasons: tuple[str, ...]) -> None:
        """In checked mode the service has heard these reasons of every rank already."""
        if reasons:
            raise UnsupportedError(f"{self.adapter} {call}", reasons)

    def _run(
        self, pattern: Any, source: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None,
        **operands: Tensor | None,
    ) -> NormAndResidual:  # fmt: skip
        if out is None:
            out = NormAndResidual(norm=torch.empty_like(residual), residual=torch.empty_like(residual))
        self._names.launch(
            input=source, workspace=self._native, pattern=pattern, launch_with_pdl=self._pdl, residual_in=residual,
            residual_out=out.residual, norm_out=out.norm, rms_gamma=gamma, rms_eps=self.signature.eps,
            weight_bias=self.signature.weight_bias, **operands,
        )  # fmt: skip
        return out
