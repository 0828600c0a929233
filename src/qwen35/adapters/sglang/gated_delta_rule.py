"""SGLang's Triton kernels behind the port of the gated delta rule, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from qwen35.adapters._kernels.plans import widened
from qwen35.adapters._kernels.rows import RowOperations
from qwen35.adapters.sglang.chunked import ChunkedPrefill
from qwen35.adapters.sglang.driven_kernels import SGLangKernels
from qwen35.adapters.sglang.entries import MIN_COMPUTE_CAPABILITY
from qwen35.adapters.sglang.layouts import one_pitch, packed_projection, verify_layout_reasons
from qwen35.domain.capabilities import Capabilities, Clause, Phase, Support
from qwen35.domain.errors import CaptureError, ClosedError, UnsupportedError
from qwen35.domain.platform import Platform
from qwen35.domain.precision import Precision
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GdnCall,
    GdnPlan,
    RawGates,
    VerifyCall,
)
from qwen35.ports.gdn_checks import call_geometry, check_commit, check_decode, check_extend, check_verify
from qwen35.ports.support import call_support, plan_support
from qwen35.services.devices import capturing, current_stream
from qwen35.services.scratch import Scratch

#: The packed kernel has B * HV blocks in a grid dimension that ends here; more rows go to the recurrent kernel.
MAX_BLOCKS = 65_535
#: The chunked kernel addresses its chunk states with 32-bit element offsets.
MAX_ELEMENTS = 2**31
CHUNK = 64

DEVIATIONS = MappingProxyType({
    Clause.PRECISION: "packed decode rounds beta to the dtype of b",
    Clause.CAPTURE: "prefill reads cu_seqlens on the host, which waits for the device",
})  # fmt: skip


class SGLangGatedDeltaRule:
    """Packed decode, chunked prefill and recurrent verify as SGLang 0.5.20 runs them.

    Mended here: outputs of padded rows and their intermediates, fresh and empty sequences, write slots of
    prefill, pools with padded slots in prefill. Refused: write slots of decode, trees, checkpoints, log gates
    of decode and verify. Each stream has scratch of its own.
    """

    def __init__(
        self, kernels: SGLangKernels, rows: RowOperations, platform: Platform,
        stream_of: Callable[[torch.device], int] = current_stream,
    ) -> None:  # fmt: skip
        self._kernels, self._rows = kernels, rows
        self._scratch = Scratch(stream_of=stream_of)
        self._prefill_scratch = Scratch(spare=0, stream_of=stream_of)  # prefill is never captured
        self._chunked = ChunkedPrefill(kernels, rows, self._prefill_scratch)
        self._plans: dict[tuple[object, ...], GdnPlan] = {}
        self._closed = False
        step = Precision(products="float32")
        self.capabilities = Capabilities(
            token_dtypes=frozenset({"bfloat16"}), key_widths=frozenset({128}), value_widths=frozenset({128}),
            device_types=frozenset({platform.device_type}), min_compute_capability=MIN_COMPUTE_CAPABILITY,
            raw_only=frozenset({Phase.DECODE, Phase.VERIFY}), deviations=DEVIATIONS,
            precision=MappingProxyType({
                # Beta, which scales what a token adds to the state, is rounded to the tokens' dtype.
                Phase.DECODE: Precision(products=None), Phase.VERIFY: step, Phase.COMMIT: step,
                # Normalised q and k, and each chunk's products and states, are rounded to the tokens' dtype.
                Phase.EXTEND: Precision(products=None, roundings=2.0),
            }),
        )  # fmt: skip

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch held."""
        return self._scratch.bytes + self._prefill_scratch.bytes

    @property
    def scratch_bound(self) -> int:
        """Bytes of scratch that are never exceeded under the current plan and the extends that came."""
        return self._scratch.bound + self._prefill_scratch.bound

    def prepare(self, plan: GdnPlan) -> None:
        """Reserve scratch of decode and verify; a later plan of the same kind widens the one before.

        Raises ``UnsupportedError`` and ``CaptureError`` as the port says.
        """
        self._open()
        support = plan_support(self.capabilities, plan)
        if not support:
            raise UnsupportedError("plan for SGLang's kernels", support.reasons)
        if capturing(plan.device):
            raise CaptureError("prepare is not legal inside CUDA graph capture; call it before")
        key = _plan_key(plan)
        plan = self._plans[key] = widened(self._plans.get(key), plan)
        g, row = plan.geometry, plan.max_batch * plan.token_dtype.itemsize
        indices = dict.fromkeys(("rows", "read", "nodes"), plan.max_batch * torch.int64.itemsize)
        sizes = {"mixed": row * g.conv_channels, "out": row * g.value_heads * g.value_width, **indices}
        self._scratch.reserve(sizes, plan.device)

    def supports(self, call: GdnCall) -> Support:
        """Whether ``call`` would be honoured, with every reason against it. Launches nothing."""
        reasons = list(call_support(self.capabilities, call).reasons)
        if not reasons and not isinstance(call, CommitCall):
            reasons += _reasons(call)
        return Support.of(*reasons)

    def decode(self, call: DecodeCall) -> Tensor:
        """One token a row by the packed kernel, or by the recurrent one past its grid; see the port."""
        self._open()
        check_decode(call)
        self._refuse(call)
        plan = self._cover(call)
        out = _output(call.v, call.out)
        batch = call.q.shape[0]
        if not batch:
            return out
        if batch * call.v.shape[1] > MAX_BLOCKS:
            steps = {name: getattr(call, name).unsqueeze(1) for name in ("q", "k", "v")}
            self._recur(call, steps, out.unsqueeze(1), plan)
            return out
        gates = _raw(call.gates)
        dense = out.is_contiguous()
        target = out if dense else self._scratch.take("out", tuple(out.shape), out.dtype, out.device)
        self._kernels.packed_decode(
            mixed_qkv=packed_projection(call, self._scratch), a=gates.a, b=gates.b, A_log=gates.A_log,
            dt_bias=gates.dt_bias, scale=_scale(call), initial_state=call.states, out=target.unsqueeze(1),
            ssm_state_indices=call.slots, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        if not dense:
            out.copy_(target)
        return out

    def verify(self, call: VerifyCall) -> Tensor:
        """Chains by the recurrent kernel; see the port."""
        self._open()
        check_verify(call)
        self._refuse(call)
        plan = self._cover(call)
        out = _output(call.v, call.out)
        if call.q.shape[0] and call.q.shape[1]:
            self._recur(call, {"q": call.q, "k": call.k, "v": call.v}, out, plan)
        return out

    def extend(self, call: ExtendCall) -> ExtendResult:
        """Packed sequences by the chunked kernel; not legal inside capture. See the port."""
        self._open()
        check_extend(call)
        self._refuse(call)
        if capturing(call.states.device):
            raise CaptureError("SGLang's prefill reads cu_seqlens on the host: it cannot be captured")
        plan, _ = self._covering(call)
        out = _output(call.v, call.out)
        if call.v.shape[0] and call.slots.shape[0]:
            self._chunked.run(call, plan, out)
        return ExtendResult(out=out)

    def commit(self, call: CommitCall) -> None:
        """Copy accepted states in one launch; see the port."""
        self._open()
        check_commit(call)
        self._refuse(call)
        if call.slots.shape[0]:
            self._rows.commit(call)

    def refresh_parameters(self) -> int:
        """Parameters are read at every call: there are no copies."""
        self._open()
        return 0

    def close(self) -> None:
        """Free scratch. Idempotent."""
        self._closed = True
        self._scratch.close()
        self._prefill_scratch.close()

    def _recur(self, call: DecodeCall | VerifyCall, steps: dict[str, Tensor], out: Tensor, plan: GdnPlan) -> None:
        """T tokens a row; out [B, T, HV, V]. Decode updates the pool, verify writes intermediates only."""
        gates = _raw(call.gates)
        a, b = gates.a, gates.b
        extra: dict[str, object] = {}
        if isinstance(call, VerifyCall):
            extra = {
                "disable_state_update": True, "intermediate_states_buffer": call.intermediates,
                "intermediate_state_indices": self._rows_of(call), "cache_steps": call.intermediates.shape[1],
                "retrieve_parent_token": None,
            }  # fmt: skip
        else:
            a, b = a.unsqueeze(1), b.unsqueeze(1)
        made = self._kernels.recurrent(
            A_log=gates.A_log, a=one_pitch(a), dt_bias=gates.dt_bias, softplus_beta=1.0, softplus_threshold=20.0,
            **{name: one_pitch(x) for name, x in steps.items()}, b=one_pitch(b), initial_state_source=call.states,
            initial_state_indices=call.slots, scale=_scale(call), use_qk_l2norm_in_kernel=True, cu_seqlens=None,
            **extra,
        )  # fmt: skip
        out.copy_(made)
        if plan.may_pad:
            self._rows.zero_rows(out, call.slots)

    def _rows_of(self, call: VerifyCall) -> Tensor:
        """Rows of the intermediates, -1 for padding: the kernel computes padded rows from zero and writes them."""
        batch, device = call.slots.shape[0], call.slots.device
        rows, read, nodes = (
            self._scratch.take(name, (batch,), torch.int64, device) for name in ("rows", "read", "nodes")
        )
        rows = torch.arange(batch, out=rows) if call.rows is None else call.rows
        self._rows.index(call.slots, rows, read, nodes, read_padding=-1, write_padding=-1)
        return nodes

    def _cover(self, call: DecodeCall | VerifyCall) -> GdnPlan:
        """The plan that covers ``call``. Raises ``CaptureError`` where one would have to be made inside capture."""
        plan, planned = self._covering(call)
        if planned:
            return plan
        if capturing(call.states.device):
            raise CaptureError(f"{type(call).__name__} is beyond the plan: prepare one that covers it outside capture")
        self.prepare(plan)
        return self._plans[_plan_key(plan)]

    def _covering(self, call: DecodeCall | ExtendCall | VerifyCall) -> tuple[GdnPlan, bool]:
        """The smallest plan that covers ``call`` and what is planned, and whether that is what is planned.

        An extend goes by it as it is: its sequences are no rows of decode, whose scratch stays where it is.
        """
        batch = call.slots.shape[0]
        least = GdnPlan(
            geometry=call_geometry(call), state_dtype=call.states.dtype, device=call.states.device,
            max_batch=max(batch, 1), max_tokens=call.v.shape[0], token_dtype=call.q.dtype,
        )  # fmt: skip
        plan = self._plans.get(_plan_key(least))
        if plan is None:
            return least, False
        tokens = call.v.shape[0] if isinstance(call, ExtendCall) else 0
        wider = replace(plan, max_batch=max(batch, plan.max_batch), max_tokens=max(tokens, plan.max_tokens))
        return wider, wider == plan

    def _refuse(self, call: GdnCall) -> None:
        support = self.supports(call)
        if not support:
            raise UnsupportedError(f"{type(call).__name__} for SGLang's kernels", support.reasons)

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("this adapter was closed; make another one")


def _reasons(call: DecodeCall | ExtendCall | VerifyCall) -> Iterable[str]:
    if isinstance(call, ExtendCall):
        chunks = call.v.shape[0] // CHUNK + call.slots.shape[0]
        elements = chunks * call.v.shape[1] * call.v.shape[2] * call.q.shape[2]
        if elements >= MAX_ELEMENTS:
            yield f"extend requires chunks*HV*V*K below 2**31, got {elements}"
        heads = call.slots.shape[0] * call.v.shape[1]
        if heads > MAX_BLOCKS:
            yield f"extend requires S*HV of at most {MAX_BLOCKS}, got {heads}"
        return
    gates = _raw(call.gates)
    recurrent = isinstance(call, VerifyCall) or call.q.shape[0] * call.v.shape[1] > MAX_BLOCKS
    if recurrent and call.scale is not None and call.scale <= 0:
        yield f"scale requires a positive number, got {call.scale}"
    if isinstance(call, DecodeCall):
        if call.write_slots is not None:
            yield "write slots are not offered in decode: the kernel writes the slot that it reads"
        return
    yield from verify_layout_reasons(call, (("gates.a", gates.a), ("gates.b", gates.b)))


def _raw(gates: object) -> RawGates:
    if not isinstance(gates, RawGates):
        raise UnsupportedError("SGLang's kernels", ["gates require raw, got log"])
    return gates


def _scale(call: DecodeCall | VerifyCall) -> float:
    return call.q.shape[-1] ** -0.5 if call.scale is None else call.scale


def _plan_key(plan: GdnPlan) -> tuple[object, ...]:
    return (plan.geometry, plan.state_dtype, plan.token_dtype, plan.device)


def _output(like: Tensor, given: Tensor | None) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device) if given is None else given
