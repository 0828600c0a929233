"""The short convolution as its formula reads, in plain torch: the oracle in float64, a default in float32."""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from qwen35.domain.capabilities import Capabilities, Clause, Phase, Support
from qwen35.domain.errors import CaptureError, ClosedError, UnsupportedError
from qwen35.domain.precision import Precision
from qwen35.ports.conv_checks import (
    check_conv_commit,
    check_conv_decode,
    check_conv_extend,
    check_conv_verify,
)
from qwen35.ports.short_convolution import (
    ConvCall,
    ConvCommitCall,
    ConvDecodeCall,
    ConvExtendCall,
    ConvPlan,
    ConvVerifyCall,
)
from qwen35.ports.support import conv_call_support, conv_plan_support, dtype_name
from qwen35.services.devices import capturing

NOT_CAPTURABLE = "index tensors are read on the host, which waits for the device"


class ReferenceShortConvolution:
    """One sequence after another, in ``compute_dtype``; supports everything, slowly.

    Every window is read before any is written. Reads index tensors on the host: on a GPU it waits for the
    device and cannot be captured, which ``device_type`` "cuda" states as a deviation.
    """

    def __init__(self, compute_dtype: torch.dtype, device_type: str = "cpu") -> None:
        self._dtype = compute_dtype
        self._closed = False
        precision = Precision(products=dtype_name(compute_dtype))
        dtypes = frozenset({"float64", "float32", "bfloat16", "float16"})
        self.capabilities = Capabilities(
            token_dtypes=dtypes, state_dtypes=dtypes, trees=True, captures_extend=False,
            device_types=frozenset({device_type}), precision=MappingProxyType(dict.fromkeys(Phase, precision)),
            deviations=MappingProxyType({Clause.CAPTURE: NOT_CAPTURABLE} if device_type == "cuda" else {}),
        )  # fmt: skip

    def prepare(self, plan: ConvPlan) -> None:
        """Nothing to fix; raises ``UnsupportedError`` for a plan on another device."""
        self._open()
        support = conv_plan_support(self.capabilities, plan)
        if not support:
            raise UnsupportedError("plan for the reference", support.reasons)

    def supports(self, call: ConvCall) -> Support:
        """Everything on the adapter's device is supported."""
        return conv_call_support(self.capabilities, call)

    @torch.no_grad()
    def decode(self, call: ConvDecodeCall) -> Tensor:
        """One token a row; see the port."""
        check_conv_decode(call)
        self._admit(call)
        spans = [(row, row + 1) for row in range(call.x.shape[0])]
        return self._sequences(call, spans, [False] * len(spans))

    @torch.no_grad()
    def extend(self, call: ConvExtendCall) -> Tensor:
        """Packed sequences; see the port."""
        check_conv_extend(call)
        self._admit(call)
        offsets = call.cu_seqlens.tolist()
        spans = list(pairwise(offsets))
        fresh = [False] * len(spans) if call.fresh is None else call.fresh.tolist()
        return self._sequences(call, spans, fresh)

    @torch.no_grad()
    def verify(self, call: ConvVerifyCall) -> Tensor:
        """Draft tokens, chain or tree; see the port."""
        check_conv_verify(call)
        self._admit(call)
        out = torch.zeros_like(call.x) if call.out is None else call.out.zero_()
        batch, draft = call.x.shape[:2]
        rows = range(batch) if call.rows is None else call.rows.tolist()
        chain = [list(range(-1, draft - 1))] * batch
        parents = chain if call.parents is None else call.parents.tolist()
        for i, read in enumerate(call.slots.tolist()):
            if read < 0:
                continue
            for t in range(draft):
                path = _path(parents[i], t)
                out[i, t] = self._convolve(call, call.windows[read], call.x[i, path])[-1]
                call.intermediates[rows[i], t] = _shifted(call.windows[read], call.x[i, path])
        return out

    @torch.no_grad()
    def commit(self, call: ConvCommitCall) -> None:
        """Copy accepted windows; see the port."""
        check_conv_commit(call)
        self._admit(call)
        rows = range(len(call.slots)) if call.rows is None else call.rows.tolist()
        for slot, row, node in zip(call.slots.tolist(), rows, call.last.tolist(), strict=True):
            if slot >= 0 and node >= 0:
                call.windows[slot] = call.intermediates[row, node]

    def refresh_parameters(self) -> int:
        """Weight and bias are read at every call: there are no copies."""
        return 0

    def close(self) -> None:
        """Idempotent."""
        self._closed = True

    def _sequences(
        self, call: ConvDecodeCall | ConvExtendCall, spans: list[tuple[int, int]], fresh: list[bool]
    ) -> Tensor:
        """Sequence s is the tokens spans[s][0] to spans[s][1] - 1 of x."""
        out = torch.zeros_like(call.x) if call.out is None else call.out.zero_()
        slots = call.slots.tolist()
        written = slots if call.write_slots is None else call.write_slots.tolist()
        before = {slot: call.windows[slot].clone() for slot in slots if slot >= 0}
        for s, (start, end) in enumerate(spans):
            if slots[s] < 0 or start == end:
                continue
            window, tokens = before[slots[s]], call.x[start:end]
            if fresh[s]:
                window = torch.zeros_like(window)
            out[start:end] = self._convolve(call, window, tokens)
            if written[s] >= 0:
                call.windows[written[s]] = _shifted(window, tokens)
        return out

    def _convolve(
        self, call: ConvDecodeCall | ConvExtendCall | ConvVerifyCall, window: Tensor, tokens: Tensor
    ) -> Tensor:
        """Outputs [L, C] of tokens [L, C] that follow ``window`` [C, W-1], in the compute dtype."""
        line = torch.cat([window.to(self._dtype), tokens.T.to(self._dtype)], dim=1)
        weight = call.weight.to(self._dtype)
        y = (line.unfold(1, weight.shape[1], 1) * weight[:, None, :]).sum(-1)
        if call.bias is not None:
            y = y + call.bias.to(self._dtype)[:, None]
        return (torch.nn.functional.silu(y) if call.activation == "silu" else y).T

    def _admit(self, call: ConvCall) -> None:
        self._open()
        support = self.supports(call)
        if not support:
            raise UnsupportedError(f"{type(call).__name__} for the reference", support.reasons)
        if capturing(call.windows.device):
            raise CaptureError(f"the reference cannot be captured: {NOT_CAPTURABLE}")

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("this adapter was closed; make another one")


def _shifted(window: Tensor, tokens: Tensor) -> Tensor:
    """The window [C, W-1] after ``tokens`` [L, C]: its last W-1 inputs, in the window's dtype."""
    return torch.cat([window, tokens.T.to(window.dtype)], dim=1)[:, tokens.shape[0] :]


def _path(parents: list[int], node: int) -> list[int]:
    """The nodes from the root's child down to ``node``."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path
