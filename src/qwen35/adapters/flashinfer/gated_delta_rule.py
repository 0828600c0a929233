"""FlashInfer's kernels behind the port of the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from qwen35.adapters._kernels.rows import RowOperations
from qwen35.adapters._kernels.scratch import Scratch, capturing
from qwen35.adapters.flashinfer.admission import StepCall, look_at
from qwen35.adapters.flashinfer.behaviour import measure_decode, measure_verify
from qwen35.adapters.flashinfer.capabilities import capabilities_of
from qwen35.adapters.flashinfer.mends import (
    ALIGNMENT,
    SOFTPLUS_LIMIT,
    Behaviour,
    Mend,
    decode_mend,
    extend_reasons,
    split_prefill,
    step_reasons,
    verify_mend,
)
from qwen35.adapters.flashinfer.parameters import float32
from qwen35.adapters.flashinfer.prefill import Prefill
from qwen35.adapters.flashinfer.release import FlashInferKernels
from qwen35.adapters.flashinfer.steps import Step, run_decode, run_verify
from qwen35.domain.capabilities import Phase, Support
from qwen35.domain.errors import CaptureError, ClosedError, UnsupportedError
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.admission import CHECKS
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
from qwen35.ports.gdn_checks import call_geometry, check_commit, check_extend
from qwen35.ports.support import call_support, plan_support
from qwen35.services.parameter_copies import ParameterCopies

#: Admitted calls that are remembered; a serving engine has a few hundred shapes.
MAX_ADMITTED = 4096


@dataclass(frozen=True, slots=True)
class _Admitted:
    """What is settled about a call by its shapes: the detours and the plan they were decided under."""

    mend: Mend
    plan: GdnPlan
    branch: str
    scale: float
    empty: bool


class FlashInferGatedDeltaRule:
    """Decode and verify over the pool by index, extend by the chunked prefill, one pass or split.

    What the kernels leave undone is done around them (``mends``): padding, write slots, fresh and empty sequences,
    intermediate rows, normalisation. ``branches`` says which way the latest call of each phase went.
    A gate input a with a + dt_bias past 85 counts as 85 where this release would make NaN of it.

    Scratch has one buffer a purpose, so calls of one phase belong on one stream. Intermediates that must pass
    through scratch take max_batch * max_draft states of it from the first such call on.
    """

    def __init__(
        self, kernels: FlashInferKernels, rows: RowOperations, platform: Platform, options: AdapterOptions
    ) -> None:
        self.capabilities = capabilities_of(kernels, platform)
        self._kernels, self._rows = kernels, rows
        self._platform, self._split = platform, options.prefill_split
        self._scratch, self._parameters = Scratch(), ParameterCopies(ALIGNMENT)
        self._prefill = Prefill(kernels, rows, self._scratch)
        self._plans: dict[tuple[object, ...], GdnPlan] = {}
        self._measured: dict[tuple[object, ...], Behaviour] = {}
        self._admitted: dict[tuple[object, ...], _Admitted] = {}
        self._branches: dict[Phase, str] = {}
        self._closed = False

    @property
    def branches(self) -> Mapping[Phase, str]:
        """The branch that the latest call of each phase took, in words."""
        return MappingProxyType(dict(self._branches))

    @property
    def behaviours(self) -> Mapping[str, Behaviour]:
        """What was measured of this release's kernels, by phase and state dtype."""
        return MappingProxyType({f"{key[0]}, {key[1]}": found for key, found in self._measured.items()})

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch held."""
        return self._scratch.nbytes

    def prepare(self, plan: GdnPlan) -> None:
        """Fix branches, reserve index scratch, compile decode and verify for the plan's heads. Waits for the device."""
        self._open()
        support = plan_support(self.capabilities, plan)
        if not support:
            raise UnsupportedError("plan for FlashInfer", support.reasons)
        if capturing(plan.device):
            raise CaptureError("prepare is not legal inside CUDA graph capture; call it before")
        self._adopt(plan)
        self._behaviour(Phase.DECODE, plan)
        tokens, heads = max(1, plan.max_draft), plan.geometry.value_heads
        if plan.max_draft:
            self._behaviour(Phase.VERIFY, plan)
        self._parameters.reserve(heads * 4, plan.device)
        for name in ("read", "write"):
            self._scratch.reserve(name, (plan.max_batch,), torch.int64, plan.device)
        self._scratch.reserve("a", (plan.max_batch, tokens, heads), plan.token_dtype, plan.device)

    def supports(self, call: GdnCall) -> Support:
        """Whether ``call`` would be honoured under the present plan. Launches nothing."""
        reasons = list(call_support(self.capabilities, call).reasons)
        if not reasons and isinstance(call, DecodeCall | VerifyCall):
            reasons += step_reasons(call)
            if not reasons and call.q.shape[0]:
                refusal = self._mend(call, self._plan_for(call)).refusal
                reasons += [] if refusal is None else [refusal]
        elif not reasons and isinstance(call, ExtendCall):
            reasons += extend_reasons(call, self._split)
        return Support.of(*reasons)

    def decode(self, call: DecodeCall) -> Tensor:
        """One token a row, over the pool by index; see the port."""
        admitted = self._admit(call)
        out = _output(call.v, call.out)
        if admitted.empty:
            return out
        gates = _raw(call)
        step = Step(
            q=call.q.unsqueeze(1), k=call.k.unsqueeze(1), v=call.v.unsqueeze(1), a=gates.a.unsqueeze(1),
            b=gates.b.unsqueeze(1), A_log=float32(self._parameters, gates.A_log),
            dt_bias=float32(self._parameters, gates.dt_bias), scale=admitted.scale, out=out.unsqueeze(1),
        )  # fmt: skip
        read, write, step = self._index(call, step, admitted)
        run_decode(self._kernels, step, call.states, read=read, write=write)
        if admitted.mend.zero:
            self._rows.zero_rows(step.out, call.slots)
        return out

    def verify(self, call: VerifyCall) -> Tensor:
        """Chains of draft tokens; see the port."""
        admitted = self._admit(call)
        out = _output(call.v, call.out)
        if admitted.empty:
            return out
        gates = _raw(call)
        step = Step(
            q=call.q, k=call.k, v=call.v, a=gates.a, b=gates.b, A_log=float32(self._parameters, gates.A_log),
            dt_bias=float32(self._parameters, gates.dt_bias), scale=admitted.scale, out=out,
        )  # fmt: skip
        read, _, step = self._index(call, step, admitted)
        nodes = self._nodes(call, admitted)
        run_verify(self._kernels, step, call.states, read=read, nodes=nodes)
        if admitted.mend.scratch:
            self._rows.scatter_nodes(nodes, call.intermediates, call.slots, call.rows)
        if admitted.mend.zero:
            self._rows.zero_rows(out, call.slots)
        return out

    def extend(self, call: ExtendCall) -> ExtendResult:
        """Packed sequences by the chunked prefill; not legal inside capture. See the port."""
        self._open()
        check_extend(call)
        self._refuse(call)
        if capturing(call.states.device):
            raise CaptureError("FlashInfer's prefill keeps workspaces that move: it cannot be captured")
        plan = self._adopt(self._plan_for(call))
        split = split_prefill(self._split, self._platform, call)
        self._branches[Phase.EXTEND] = "sequence split" if split else "one pass"
        return self._prefill.run(call, plan, split)

    def commit(self, call: CommitCall) -> None:
        """Copy accepted states in one launch; see the port."""
        self._open()
        check_commit(call)
        self._refuse(call)
        if call.slots.shape[0]:
            self._rows.commit(call)

    def refresh_parameters(self) -> int:
        """Copy A_log and dt_bias again where the kernels read a copy, in place; returns how many there are."""
        self._open()
        return self._parameters.refresh()

    def close(self) -> None:
        """Free scratch and copies. Idempotent."""
        self._closed = True
        self._admitted.clear()
        self._scratch.release()
        self._parameters.close()

    def _admit(self, call: StepCall) -> _Admitted:
        """Check ``call`` once for each set of shapes; addresses every time."""
        self._open()
        try:
            key, off = look_at(call)
        except AttributeError:  # something is no tensor: the check names it
            CHECKS[type(call)](call)
            raise
        admitted = self._admitted.get(key)
        if admitted is not None and not off:
            self._branches[_phase(call)] = admitted.branch
            return admitted
        CHECKS[type(call)](call)
        self._refuse(call)
        plan = self._cover(call)
        self._refuse(call)  # the plan may have measured what the defaults did not say
        mend = self._mend(call, plan) if call.q.shape[0] else Mend()
        scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
        admitted = _Admitted(mend, plan, mend.branch, scale, 0 in call.q.shape)
        self._branches[_phase(call)] = admitted.branch
        if call.states.is_cuda and not off:
            if len(self._admitted) >= MAX_ADMITTED:
                self._admitted.clear()
            self._admitted[key] = admitted
        return admitted

    def _refuse(self, call: GdnCall) -> None:
        support = self.supports(call)
        if not support:
            raise UnsupportedError(f"{type(call).__name__} for FlashInfer", support.reasons)

    def _mend(self, call: StepCall, plan: GdnPlan) -> Mend:
        behaviour = self._known_behaviour(_phase(call), plan)
        if isinstance(call, DecodeCall):
            return decode_mend(call, plan, behaviour)
        return verify_mend(call, plan, behaviour)

    def _index(self, call: StepCall, step: Step, admitted: _Admitted) -> tuple[Tensor, Tensor | None, Step]:
        """Slots to read, slots to write (None: the same) and the step with its gate inputs, one launch or none."""
        mend = admitted.mend
        if not mend.index:
            return call.slots, None, step
        batch, device = call.slots.shape[0], call.slots.device
        dtype = torch.int64 if mend.wide else torch.int32
        read = self._scratch.take("read", (batch,), dtype, device)
        write = self._scratch.take("write", (batch,), dtype, device)
        clamped = self._scratch.take("a", tuple(step.a.shape), step.a.dtype, device) if mend.clamp else None
        writes = call.write_slots if isinstance(call, DecodeCall) else None
        self._rows.index(
            call.slots, writes, read, write, read_padding=mend.read_padding, write_padding=mend.write_padding,
            a=step.a, dt_bias=step.dt_bias, clamped=clamped, limit=SOFTPLUS_LIMIT,
        )  # fmt: skip
        step = step if clamped is None else replace(step, a=clamped)
        return read, None if writes is None else write, step

    def _nodes(self, call: VerifyCall, admitted: _Admitted) -> Tensor:
        """The dense [B, T, HV, V, K] that the kernel writes: the caller's own rows, or scratch."""
        batch, draft = call.q.shape[:2]
        if not admitted.mend.scratch:
            return call.intermediates[:batch]
        state, device, plan = tuple(call.states.shape[1:]), call.states.device, admitted.plan
        if not capturing(device):
            most = (max(batch, plan.max_batch), max(draft, plan.max_draft), *state)
            self._scratch.reserve("nodes", most, call.states.dtype, device)
        return self._scratch.take("nodes", (batch, draft, *state), call.states.dtype, device)

    def _plan_for(self, call: StepCall | ExtendCall) -> GdnPlan:
        """The plan for such calls where it covers ``call``, or the smallest that covers both."""
        batch = call.slots.shape[0]
        tokens = call.v.shape[0] if isinstance(call, ExtendCall) else 0
        draft = call.q.shape[1] if isinstance(call, VerifyCall) else 0
        least = GdnPlan(
            geometry=call_geometry(call), state_dtype=call.states.dtype, device=call.states.device, max_batch=batch,
            max_tokens=tokens, max_draft=draft, token_dtype=call.q.dtype,
        )  # fmt: skip
        plan = self._plans.get(_plan_key(least))
        if plan is None:
            return least
        if batch <= plan.max_batch and tokens <= plan.max_tokens and draft <= plan.max_draft:
            return plan
        return replace(
            plan, max_batch=max(batch, plan.max_batch), max_tokens=max(tokens, plan.max_tokens),
            max_draft=max(draft, plan.max_draft),
        )  # fmt: skip

    def _cover(self, call: StepCall) -> GdnPlan:
        """A plan that covers ``call``, prepared. Raises ``CaptureError`` where that would have to happen in capture."""
        plan = self._plan_for(call)
        known = self._plans.get(_plan_key(plan))
        if plan != known or _behaviour_key(_phase(call), plan) not in self._measured:
            if capturing(call.states.device):
                raise CaptureError(
                    f"{type(call).__name__} is beyond the plan: prepare one that covers it, or make the call once "
                    "outside capture"
                )
            self.prepare(plan)
        return plan

    def _adopt(self, plan: GdnPlan) -> GdnPlan:
        if self._plans.get(_plan_key(plan)) != plan:
            self._plans[_plan_key(plan)] = plan
            self._admitted.clear()
        return plan

    def _known_behaviour(self, phase: Phase, plan: GdnPlan) -> Behaviour:
        known = self._measured.get(_behaviour_key(phase, plan))
        if known is not None:
            return known
        # 0.6.18: the float32 decode skips padding and takes any gate; nothing else does.
        float32 = plan.state_dtype == torch.float32
        return Behaviour(skips_padding=float32, finite_softplus=float32 and phase is Phase.DECODE)

    def _behaviour(self, phase: Phase, plan: GdnPlan) -> Behaviour:
        key = _behaviour_key(phase, plan)
        if key not in self._measured:
            measure = measure_decode if phase is Phase.DECODE else measure_verify
            self._measured[key] = measure(self._kernels, plan)
        return self._measured[key]

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("this adapter was closed; make another one")


def _raw(call: StepCall) -> RawGates:
    gates = call.gates
    if not isinstance(gates, RawGates):
        raise UnsupportedError("FlashInfer", ["gates require raw, got log"])
    return gates


def _phase(call: StepCall) -> Phase:
    return Phase.DECODE if isinstance(call, DecodeCall) else Phase.VERIFY


def _behaviour_key(phase: Phase, plan: GdnPlan) -> tuple[object, ...]:
    """Heads are part of it because measuring also compiles."""
    dtype = str(plan.state_dtype).removeprefix("torch.")
    draft = plan.max_draft if phase is Phase.VERIFY else 0
    return (str(phase), dtype, plan.geometry, plan.token_dtype, plan.device, draft)


def _plan_key(plan: GdnPlan) -> tuple[object, ...]:
    return (plan.geometry, plan.state_dtype, plan.token_dtype, plan.device)


def _output(like: Tensor, given: Tensor | None) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format) if given is None else given
