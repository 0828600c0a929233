"""Our Triton kernels behind the port of the gated delta rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qwen35.adapters._kernels.plans import widened
from qwen35.adapters.triton.entries import MIN_COMPUTE_CAPABILITY
from qwen35.domain.capabilities import Capabilities, Phase, Support
from qwen35.domain.errors import CaptureError, ClosedError, UnsupportedError
from qwen35.domain.precision import Precision
from qwen35.ports.admission import Admission
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GdnCall,
    GdnPlan,
    VerifyCall,
)
from qwen35.ports.gdn_checks import call_geometry
from qwen35.ports.support import call_support, dtype_name, plan_support
from qwen35.services.devices import capturing, current_stream
from qwen35.services.scratch import Scratch

if TYPE_CHECKING:
    from qwen35.adapters.triton.kernels.gdn_config import DecodeConfig
    from qwen35.adapters.triton.kernels.gdn_decode import DecodeLaunch
    from qwen35.adapters.triton.kernels.gdn_extend_launch import ExtendLaunch

#: A row of the state must fit one program's registers.
MAX_KEY_WIDTH = 256

_STATE_DTYPES = frozenset({"float32", "bfloat16"})


class TritonGatedDeltaRule:
    """Decode, verify and commit in one launch each, extend in two; no call waits for the device.

    Decode and verify compute in float32. Extend multiplies in the dtype of the tokens (float16 as float32,
    float32 by three TF32 products) and sums in float32. Verify keeps a chain's running state in float32: with
    bfloat16 intermediates only a node that branches off starts from a rounded parent.

    One row must not read a slot that another row of the same call writes. Extend alone takes scratch: each stream
    that makes such calls has its own, and one more lies ready for a stream first seen inside capture.
    """

    def __init__(self, stream_of: Callable[[torch.device], int] = current_stream) -> None:
        import triton

        from qwen35.adapters.triton.kernels import (
            gdn_config,
            gdn_decode,
            gdn_extend_launch,
            gdn_launch,
            gdn_scratch,
            gdn_verify,
        )

        self._config, self._decode, self._extend = gdn_config, gdn_decode, gdn_extend_launch
        self._launch, self._verify, self._scratch_rules = gdn_launch, gdn_verify, gdn_scratch
        self._interpreted = bool(triton.knobs.runtime.interpret)
        self._scratch = Scratch(stream_of=stream_of)
        self._plans: dict[tuple[object, ...], GdnPlan] = {}
        self._closed = False
        self._admit = Admission("the Triton gated delta rule", self.supports, self._cover, self._settle)
        steps = Precision(products="float32")
        self.capabilities = Capabilities(
            token_dtypes=frozenset({"float32", "bfloat16", "float16"}),
            state_dtypes=_STATE_DTYPES,
            device_types=frozenset({"cuda", "cpu"} if self._interpreted else {"cuda"}),
            min_compute_capability=None if self._interpreted else MIN_COMPUTE_CAPABILITY,
            trees=True,
            checkpoints=True,
            checkpoint_multiple=gdn_config.CHUNK,
            captures_extend=True,
            precision=MappingProxyType({
                Phase.DECODE: steps,
                # Products, the chunk's updates and the state are each rounded to the tokens' dtype.
                Phase.EXTEND: Precision(products=None, roundings=2.0),
                Phase.VERIFY: steps,
                Phase.COMMIT: steps,
            }),
        )  # fmt: skip

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch held."""
        return self._scratch.bytes

    @property
    def scratch_bound(self) -> int:
        """Bytes of scratch that are never exceeded under the current plan."""
        return self._scratch.bound

    def prepare(self, plan: GdnPlan) -> None:
        """Allocate scratch for ``plan`` and compile for its dtypes by calls whose rows are all padding.

        Compiled are dense tokens, decode and extend with write slots and without, decode with int32 and int64
        slots, raw gates with ``dt_bias`` in float32 or the tokens' dtype, and log gates. What a plan does not tell
        (other strides and parameter dtypes, checkpoints, int64 indices elsewhere) is compiled by the first such
        call. That call may be one that a graph captures: it takes seconds once, and compiling launches and
        allocates nothing that a graph would record (seen on an H200 with Triton 3.6).

        Inside capture a decode, extend or verify for whose geometry, dtypes and device nothing was planned, or with
        more rows, tokens or draft tokens than were planned, raises ``CaptureError``; outside it widens the plan. So
        does, inside capture, an extend of bfloat16 tokens that has to copy them where none was made before. Commit
        needs no plan.

        Raises ``UnsupportedError`` where the plan cannot be served, ``CaptureError`` inside capture.
        """
        self._require_open()
        support = plan_support(self.capabilities, plan)
        g = plan.geometry
        reasons = (*support.reasons, *_width_reasons(g.key_width))
        if plan.max_tokens and not self._interpreted:
            reasons += _product_reasons(plan.token_dtype, g.key_width, g.value_width)
        if reasons:
            raise UnsupportedError("plan for the Triton gated delta rule", reasons)
        if capturing(plan.device):
            raise CaptureError("prepare is not legal inside CUDA graph capture; call it before")
        self._adopt(plan)
        if plan.device.type == "cuda" and not self._interpreted:
            from qwen35.adapters.triton.kernels.gdn_warm_up import warm_up

            warm_up(self, plan)

    def supports(self, call: GdnCall) -> Support:
        """Whether ``call`` would be honoured, with every reason against it. Launches nothing."""
        reasons = list(call_support(self.capabilities, call).reasons)
        reasons += _width_reasons(call.states.shape[-1])
        if isinstance(call, ExtendCall) and not self._interpreted:
            reasons += _product_reasons(call.q.dtype, call.q.shape[-1], call.v.shape[-1])
        if isinstance(call, VerifyCall | CommitCall):
            got = dtype_name(call.intermediates.dtype)
            if got not in _STATE_DTYPES:
                reasons.append(f"intermediates require float32 or bfloat16, got {got}")
        return Support.of(*reasons)

    def decode(self, call: DecodeCall) -> Tensor:
        """One token a row; returns out [B, HV, V]. Mutates the written slots and ``call.out``."""
        self._require_open()
        launch = self._admit(call, DecodeCall)
        out = _output(call.v, call.out)
        if launch is not None:
            launch(call, out)
        return out

    def extend(self, call: ExtendCall) -> ExtendResult:
        """Packed sequences; mutates the written slots and ``call.out``. Checkpoints of padded sequences are zero."""
        self._require_open()
        launch = self._admit(call, ExtendCall)
        out = _output(call.v, call.out)
        checkpoints = None
        if call.checkpoints is not None:
            checkpoints = call.states.new_empty(call.checkpoints.count, *call.states.shape[1:])
        if launch is not None:
            room = self._scratch.take("chunks", (launch.scratch_bytes,), torch.uint8, call.states.device)
            aligned = self._aligned(call)
            if aligned is not call:
                launch = self._extend_launch(aligned)
            launch(aligned, out, checkpoints, room)
        return ExtendResult(out=out, checkpoints=checkpoints)

    def verify(self, call: VerifyCall) -> Tensor:
        """Draft tokens; returns out [B, T, HV, V]. Mutates ``intermediates`` and ``call.out``, never states."""
        self._require_open()
        self._admit(call, VerifyCall)
        batch, draft = call.q.shape[:2]
        out = _output(call.v, call.out)
        if batch and draft:
            self._verify.launch_verify(call, out, self._tile(call))
        return out

    def commit(self, call: CommitCall) -> None:
        """Copy accepted intermediates into the pool; mutates the named slots."""
        self._require_open()
        self._admit(call, CommitCall)
        if call.slots.shape[0]:
            self._verify.launch_commit(call)

    def refresh_parameters(self) -> int:
        """Kernels read A_log and dt_bias where they are: there are no copies."""
        return 0

    def close(self) -> None:
        """Free scratch. Idempotent; a later call raises ``ClosedError``."""
        self._closed = True
        self._scratch.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this adapter was closed; make another one")

    def _aligned(self, call: ExtendCall) -> ExtendCall:
        """``call``, or the same over dense copies of bfloat16 tokens whose rows do not start at 16 bytes.

        Where Triton cannot tell that rows start at 16 bytes it does not pipeline these loads; the scan's loop is then
        one that the assembler of Triton 3.6 and 3.7 spoils (docs/upstream.md).
        """
        tokens = (call.q, call.k, call.v)
        if self._interpreted or call.q.dtype is not torch.bfloat16 or self._scratch_rules.wide(*tokens):
            return call
        most = self._planned(call).max_tokens
        q, k, v = (
            self._scratch.take(name, tuple(t.shape), t.dtype, t.device, (most, *t.shape[1:])).copy_(t)
            for name, t in zip(("q", "k", "v"), tokens, strict=True)
        )
        return replace(call, q=q, k=k, v=v)

    def _tile(self, call: DecodeCall | VerifyCall) -> DecodeConfig:
        widths = call.q.shape[-1], call.v.shape[-1], call.states.element_size()
        if isinstance(call, VerifyCall):
            return self._config.verify_config(*widths)
        return self._config.decode_config(*widths, call.v.shape[0] * call.v.shape[1])

    def _settle(self, call: GdnCall) -> DecodeLaunch | ExtendLaunch | None:
        """What decodes or extends of one layout share; None where there is nothing to launch."""
        if isinstance(call, ExtendCall) and call.q.shape[0] and call.slots.shape[0]:
            return self._extend_launch(call)
        if isinstance(call, DecodeCall) and call.q.shape[0]:
            return self._decode.DecodeLaunch(call, self._tile(call), _out_strides(call))
        return None

    def _extend_launch(self, call: ExtendCall) -> ExtendLaunch:
        dot = self._launch.dot_dtype(call.q.dtype, self._interpreted)
        config = self._config.extend_config(
            call.slots.shape[0], call.v.shape[1], call.q.shape[-1], call.v.shape[-1], dot.itemsize,
            self._launch.shared_bytes(call.states.device),
        )  # fmt: skip
        return self._extend.ExtendLaunch(call, config, dot, _out_strides(call))

    def _planned(self, call: DecodeCall | ExtendCall | VerifyCall) -> GdnPlan:
        """The plan for calls of this kind: one that was admitted has it."""
        return self._plans[_kind(_least(call))]

    def _cover(self, call: GdnCall) -> None:
        """Check the call against the plan; a larger one is planned again, or refused inside capture."""
        if isinstance(call, CommitCall):
            return
        wanted = _least(call)
        plan = self._plans.get(_kind(wanted))
        if plan is not None and all(need <= have for need, have in zip(_sizes(wanted), _sizes(plan), strict=True)):
            return
        if capturing(wanted.device):
            raise CaptureError(
                f"{type(call).__name__} of {wanted.max_batch} rows, {wanted.max_tokens} tokens and {wanted.max_draft} "
                f"draft tokens is not covered by {'any plan' if plan is None else plan}; "
                "prepare a plan that covers it before capture"
            )
        self._adopt(wanted)

    def _adopt(self, plan: GdnPlan) -> None:
        """Widen what is planned for this kind of call, and reserve scratch for it."""
        plan = widened(self._plans.get(_kind(plan)), plan)
        if plan.max_tokens:
            dot = self._launch.dot_dtype(plan.token_dtype, self._interpreted)
            size = self._scratch_rules.scratch_bytes(plan.geometry.value_heads, plan.max_tokens, dot)
            self._scratch.reserve({"chunks": size}, plan.device)
        self._plans[_kind(plan)] = plan


def _least(call: DecodeCall | ExtendCall | VerifyCall) -> GdnPlan:
    """The smallest plan that covers ``call``."""
    return GdnPlan(
        geometry=call_geometry(call), state_dtype=call.states.dtype, token_dtype=call.q.dtype,
        device=call.states.device, max_batch=call.slots.shape[0],
        max_tokens=call.q.shape[0] if isinstance(call, ExtendCall) else 0,
        max_draft=call.q.shape[1] if isinstance(call, VerifyCall) else 0,
    )  # fmt: skip


def _kind(plan: GdnPlan) -> tuple[object, ...]:
    return plan.geometry, plan.state_dtype, plan.token_dtype, plan.device


def _sizes(plan: GdnPlan) -> tuple[int, int, int]:
    return plan.max_batch, plan.max_tokens, plan.max_draft


def _out_strides(call: DecodeCall | ExtendCall) -> tuple[int, int]:
    """Of rows or tokens, and of heads, of the output of ``call``."""
    heads, width = call.v.shape[1:]
    return (heads * width, width) if call.out is None else (call.out.stride(0), call.out.stride(1))


def _output(v: Tensor, out: Tensor | None) -> Tensor:
    """A dense [..., HV, V] like ``v`` where the call brings no ``out``."""
    return torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out


def _product_reasons(token_dtype: torch.dtype, key_width: int, value_width: int) -> tuple[str, ...]:
    """Dense rows of bfloat16 tokens must start at 16 bytes; see ``TritonGatedDeltaRule._aligned``."""
    if token_dtype is not torch.bfloat16:
        return ()
    return tuple(
        f"extend of bfloat16 tokens requires a {name} that is a multiple of 16, got {width}"
        for name, width in (("key width", key_width), ("value width", value_width))
        if width % 16
    )


def _width_reasons(key_width: int) -> tuple[str, ...]:
    if key_width <= MAX_KEY_WIDTH:
        return ()
    return (f"key width requires at most {MAX_KEY_WIDTH}, got {key_width}",)
