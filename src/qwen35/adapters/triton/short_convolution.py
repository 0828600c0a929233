"""The short convolution in Triton: one launch a call, nothing read on the host, no scratch."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from qwen35.adapters.triton.entries import MIN_COMPUTE_CAPABILITY
from qwen35.domain.capabilities import Capabilities, Phase, Support
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
from qwen35.ports.support import PHASE_OF, conv_call_support, conv_plan_support, dtype_name
from qwen35.services.devices import capturing, on

#: From one input beside the current one to twice the public models' width; every width is its own binary.
WIDTHS = frozenset(range(2, 9))


class TritonShortConvolution:
    """Kernels over (row or token block, channel block); windows are moved in place by the program that reads them.

    A binary serves every call of the same dtypes, width and 16-byte alignment (``_binary``), whatever its sizes, so
    ``prepare`` has few to compile. A slot that one row reads must not be written by another row of the
    same call: their order is the device's.
    """

    def __init__(self) -> None:
        from triton import knobs

        from qwen35.adapters.triton.kernels import conv_commit, conv_decode, conv_extend, conv_verify

        self._commit, self._decode, self._extend, self._verify = conv_commit, conv_decode, conv_extend, conv_verify
        self._compiled: set[tuple[object, ...]] = set()
        self._closed = False
        dtypes = frozenset({"float32", "bfloat16", "float16"})
        self.capabilities = Capabilities(
            token_dtypes=dtypes, state_dtypes=dtypes, conv_widths=WIDTHS, trees=True, captures_extend=True,
            device_types=frozenset({"cuda", "cpu"} if knobs.runtime.interpret else {"cuda"}),
            min_compute_capability=None if knobs.runtime.interpret else MIN_COMPUTE_CAPABILITY,
            precision=MappingProxyType(dict.fromkeys(Phase, Precision(products="float32"))),
        )  # fmt: skip

    def prepare(self, plan: ConvPlan) -> None:
        """Compile for weights of the token dtype and of float32, with calls that are all padding."""
        self._open()
        support = conv_plan_support(self.capabilities, plan)
        if not support:
            raise UnsupportedError("plan for Triton's short convolution", support.reasons)
        if capturing(plan.device):
            raise CaptureError("prepare is not legal inside CUDA graph capture; call it before")
        for weight_dtype in {plan.token_dtype, torch.float32}:
            # A multiple of 16 channels is moved 16 bytes at a time, others are not: both binaries are wanted.
            for channels in (16, 17):
                self._rehearse(plan, weight_dtype, channels)

    def supports(self, call: ConvCall) -> Support:
        """By dtypes, width and device."""
        return conv_call_support(self.capabilities, call)

    def decode(self, call: ConvDecodeCall) -> Tensor:
        """One token a row; see the port."""
        check_conv_decode(call)
        self._admit(call)
        out = _empty_like(call.x) if call.out is None else call.out
        if out.numel():
            binary = _binary(call, call.weight, call.bias, call.x.dtype)
            self._launch(binary, call.windows.device, self._decode.launch, call, out)
        return out

    def extend(self, call: ConvExtendCall) -> Tensor:
        """Packed sequences; see the port."""
        check_conv_extend(call)
        self._admit(call)
        out = _empty_like(call.x) if call.out is None else call.out
        if out.numel() and call.slots.numel():
            binary = (*_binary(call, call.weight, call.bias, call.x.dtype), self._extend.step(call, out))
            self._launch(binary, call.windows.device, self._extend.launch, call, out)
        return out

    def verify(self, call: ConvVerifyCall) -> Tensor:
        """Draft tokens, chain or tree; see the port."""
        check_conv_verify(call)
        self._admit(call)
        out = _empty_like(call.x) if call.out is None else call.out
        if out.numel():
            binary = _binary(call, call.weight, call.bias, call.x.dtype)
            self._launch(binary, call.windows.device, self._verify.launch, call, out)
        return out

    def commit(self, call: ConvCommitCall) -> None:
        """Copy accepted windows; see the port."""
        check_conv_commit(call)
        self._admit(call)
        if call.slots.numel() and call.windows.numel():
            binary = (*_binary(call), self._commit.step(call))
            self._launch(binary, call.windows.device, self._commit.launch, call)

    def refresh_parameters(self) -> int:
        """Weight and bias are read at every call: there are no copies."""
        return 0

    def close(self) -> None:
        """Idempotent; there is no scratch to free."""
        self._closed = True

    def _rehearse(self, plan: ConvPlan, weight_dtype: torch.dtype, channels: int) -> None:
        """One call of each phase with a single padding row."""
        x = torch.zeros(1, channels, dtype=plan.token_dtype, device=plan.device)
        weight = torch.zeros(channels, plan.width, dtype=weight_dtype, device=plan.device)
        windows = torch.zeros(1, channels, plan.width - 1, dtype=plan.window_dtype, device=plan.device)
        padding = torch.full((1,), -1, dtype=torch.int32, device=plan.device)
        offsets = torch.tensor([0, 1], dtype=torch.int32, device=plan.device)
        self.decode(ConvDecodeCall(x=x, weight=weight, windows=windows, slots=padding))
        self.extend(ConvExtendCall(x=x, weight=weight, windows=windows, slots=padding, cu_seqlens=offsets))
        if plan.max_draft:
            kept = windows[:, None].clone()
            self.verify(ConvVerifyCall(x=x[:, None], weight=weight, windows=windows, slots=padding, intermediates=kept))
            self.commit(ConvCommitCall(windows=windows, slots=padding, intermediates=kept, last=padding))

    def _launch(
        self, binary: tuple[object, ...], device: torch.device, launch: Callable[..., None], *args: object
    ) -> None:
        """Launch on ``device``; refused where that would compile inside capture."""
        if binary not in self._compiled and capturing(device):
            raise CaptureError(
                f"{binary} was not compiled before CUDA graph capture; call prepare, or make such a call, before it"
            )
        with on(device):
            launch(*args)
        self._compiled.add(binary)

    def _admit(self, call: ConvCall) -> None:
        self._open()
        support = self.supports(call)
        if not support:
            raise UnsupportedError(f"{type(call).__name__} for Triton's short convolution", support.reasons)

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("this adapter was closed; make another one")


def _binary(
    call: ConvCall, weight: Tensor | None = None, bias: Tensor | None = None, token_dtype: torch.dtype | None = None
) -> tuple[object, ...]:
    """What chooses the compiled kernel of a call, alignment aside."""
    bias = weight if bias is None else bias
    dtypes = (token_dtype, call.windows.dtype, *(None if t is None else t.dtype for t in (weight, bias)))
    names = tuple(dtype_name(d) for d in dtypes if d is not None)
    return (PHASE_OF[type(call)].value, call.windows.device, call.windows.shape[-1] + 1, *names)


def _empty_like(x: Tensor) -> Tensor:
    """Dense, where ``x`` may be a view of a packed projection."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
