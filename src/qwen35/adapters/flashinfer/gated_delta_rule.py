"""FlashInfer's kernels behind the port of the gated delta rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from qwen35.adapters._kernels.rows import RowOperations
from qwen35.adapters.flashinfer.admission import AdmittedVerify, StepCall, look_at, phase_of, raw_gates
from qwen35.adapters.flashinfer.capabilities import capabilities_of
from qwen35.adapters.flashinfer.index_scratch import IndexPlaces, IndexScratch
from qwen35.adapters.flashinfer.known import KnownDecode
from qwen35.adapters.flashinfer.mends import (
    ALIGNMENT,
    SOFTPLUS_LIMIT,
    Behaviour,
    Mend,
    extend_reasons,
    split_prefill,
    step_reasons,
)
from qwen35.adapters.flashinfer.parameters import Float32, float32
from qwen35.adapters.flashinfer.plans import Plans
from qwen35.adapters.flashinfer.prefill import Prefill
from qwen35.adapters.flashinfer.prefill_layout import ExtendLayout
from qwen35.adapters.flashinfer.release import FlashInferKernels
from qwen35.adapters.flashinfer.steps import Step, pool_decode, run_verify
from qwen35.adapters.flashinfer.workspaces import PROCESS, PrefillWorkspaces
from qwen35.domain.capabilities import Phase, Support
from qwen35.domain.errors import CaptureError, ClosedError, ContractError, UnsupportedError
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.admission import CHECKS, Admission
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GdnCall,
    GdnPlan,
    VerifyCall,
)
from qwen35.ports.gdn_checks import check_commit
from qwen35.ports.support import call_support, plan_support
from qwen35.services.devices import capturing, current_stream
from qwen35.services.parameter_copies import ParameterCopies
from qwen35.services.scratch import Scratch

#: Admitted layouts of one phase that are remembered; a serving engine has a few hundred.
MAX_ADMITTED = 4096


class FlashInferGatedDeltaRule:
    """Decode and verify over the pool by index, extend by the chunked prefill, one pass or split.

    What the kernels leave undone is done around them (``mends``): padding, write slots, fresh and empty sequences,
    intermediate rows, normalisation. ``branches`` says which way the latest call of each phase went.
    A gate input a with a + dt_bias past 85 counts as 85 where this release would make NaN of it.

    Each stream has scratch of its own. Intermediates that must pass through it take max_batch * max_draft states
    of each stream that makes such calls, and as much again that lies ready for a stream first seen inside capture.
    The workspaces of FlashInfer's prefill are the process's and not counted in: see ``PrefillWorkspaces``.
    """

    def __init__(
        self, kernels: FlashInferKernels, rows: RowOperations, platform: Platform, options: AdapterOptions,
        stream_of: Callable[[torch.device], int] = current_stream, workspaces: PrefillWorkspaces = PROCESS,
    ) -> None:  # fmt: skip
        self.capabilities = capabilities_of(kernels, platform)
        self._kernels, self._rows = kernels, rows
        self._split = options.prefill_split
        self._stream_of, self._parameters = stream_of, ParameterCopies(ALIGNMENT)
        self._scratch = Scratch(stream_of=stream_of)
        self._prefill_scratch = Scratch(spare=0, stream_of=stream_of)  # prefill is never captured
        self._prefill = Prefill(kernels, rows, self._prefill_scratch, workspaces)
        splits = partial(split_prefill, options.prefill_split, platform)
        self._admit_extend = Admission("FlashInfer", self.supports, settle=lambda call: ExtendLayout(splits(call)))
        self._plans = Plans(kernels)
        self._admitted: dict[tuple[object, ...], AdmittedVerify] = {}
        self._known: dict[tuple[object, ...], KnownDecode] = {}
        self._latest: KnownDecode | None = None
        self._branches: dict[Phase, str] = {}
        self._closed = False

    @property
    def branches(self) -> Mapping[Phase, str]:
        """The branch that the latest call of each phase took, in words."""
        return MappingProxyType(dict(self._branches))

    @property
    def behaviours(self) -> Mapping[str, Behaviour]:
        """What was measured of this release's kernels, by phase and state dtype."""
        return self._plans.behaviours

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch held."""
        return self._scratch.bytes + self._prefill_scratch.bytes

    @property
    def scratch_bound(self) -> int:
        """Bytes of scratch that are never exceeded under the current plan and the calls that came."""
        return self._scratch.bound + self._prefill_scratch.bound

    def prepare(self, plan: GdnPlan) -> None:
        """Fix branches, reserve index scratch, compile decode and verify for the plan's heads. Waits for the device.

        A later plan for the same geometry, dtypes and device widens the one before. Raises ``ConfigurationError`` where
        it names another null slot, which padded rows or write slots -1 of either user would write. Of a user who names
        none beside one who does: without rows that may pad, it must pass no write slot -1; with such rows it is refused
        too where the kernel writes the null slot for them, and where it skips them (float32 states) decodes with write
        slots are refused from then on.
        """
        self._prepare(plan, stated=True)

    def _prepare(self, plan: GdnPlan, *, stated: bool) -> None:
        self._open()
        support = plan_support(self.capabilities, plan)
        if not support:
            raise UnsupportedError("plan for FlashInfer", support.reasons)
        if capturing(plan.device):
            raise CaptureError("prepare is not legal inside CUDA graph capture; call it before")
        plan, news = self._plans.adopt(plan, stated=stated)
        if news:
            self._forget()
        self._plans.measure(Phase.DECODE, plan)
        tokens, heads = max(1, plan.max_draft), plan.geometry.value_heads
        if plan.max_draft:
            self._plans.measure(Phase.VERIFY, plan)
        self._parameters.reserve(heads * 4, plan.device)
        index, gates = plan.max_batch * torch.int64.itemsize, plan.max_batch * tokens * heads
        sizes = {"read": index, "write": index, "a": gates * plan.token_dtype.itemsize}
        self._scratch.reserve(sizes, plan.device)

    def supports(self, call: GdnCall) -> Support:
        """Whether ``call`` would be honoured under the present plan. Launches nothing."""
        reasons = list(call_support(self.capabilities, call).reasons)
        if not reasons and isinstance(call, DecodeCall | VerifyCall):
            reasons += step_reasons(call)
            if not reasons:
                refusal = self._plans.mend(call, self._plans.covering(call)).refusal
                reasons += [] if refusal is None else [refusal]
        elif not reasons and isinstance(call, ExtendCall):
            reasons += extend_reasons(call, self._split)
        return Support.of(*reasons)

    def decode(self, call: DecodeCall) -> Tensor:
        """One token a row, over the pool by index; see the port."""
        known = self._recall(call)
        return (self._admit_decode(call) if known is None else known).run(call)

    def decode_known(self, call: DecodeCall) -> Tensor | None:
        """See ``DecodesKnown``: the layout of the latest call."""
        known = self._latest
        return known.run(call) if known is not None and known.rows_fit and known.recall(call) else None

    def verify(self, call: VerifyCall) -> Tensor:
        """Chains of draft tokens; see the port."""
        admitted = self._admit_verify(call)
        out = call.out
        if out is None:
            out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
        if admitted.empty:
            return out
        gates = raw_gates(call)
        step = Step(
            q=call.q, k=call.k, v=call.v, a=gates.a, b=gates.b, A_log=float32(self._parameters, gates.A_log),
            dt_bias=float32(self._parameters, gates.dt_bias), scale=admitted.scale, out=out,
        )  # fmt: skip
        read, stream = call.slots, self._stream_of(call.slots.device)
        if admitted.places is not None:
            to = admitted.places(call, stream)
            admitted.index(call.slots, None, to.read, to.write, step.a, step.dt_bias, to.clamped, stream)
            read, step.a = to.read, step.a if to.clamped is None else to.clamped
        nodes = self._nodes(call, admitted)
        run_verify(self._kernels, step, call.states, read=read, nodes=nodes)
        if admitted.mend.scratch:
            self._rows.scatter_nodes(nodes, call.intermediates, call.slots, call.rows)
        if admitted.mend.zero:
            admitted.zero(out, call.slots, stream)
        return out

    def extend(self, call: ExtendCall) -> ExtendResult:
        """Packed sequences by the chunked prefill; not legal inside capture. See the port."""
        self._open()
        layout: ExtendLayout = self._admit_extend(call, ExtendCall)
        if capturing(call.states.device):
            raise CaptureError("FlashInfer's prefill keeps workspaces that move: it cannot be captured")
        if layout.generation != self._plans.generation:
            layout.settle(call, self._plans.covering(call), self._plans.generation)
        self._branches[Phase.EXTEND] = "sequence split" if layout.split else "one pass"
        return self._prefill.run(call, layout)

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
        self._forget()
        self._scratch.close()
        self._prefill.close()
        self._prefill_scratch.close()
        self._parameters.close()

    def _recall(self, call: DecodeCall) -> KnownDecode | None:
        """What is settled about a call that looks like this one; None where it has to be admitted."""
        latest = self._latest
        if latest is not None and latest.recall(call):
            return latest
        if type(call) is not DecodeCall:
            raise ContractError(f"decode requires a DecodeCall, got {type(call).__name__}")
        if not self._known:
            return None
        key, off = look_at(call)
        known = None if off else self._known.get(key)
        if known is not None:
            known.compare_with(call)
            self._use(known, recall=True)
        return known

    def _admit_decode(self, call: DecodeCall) -> KnownDecode:
        """Check ``call``, and remember its layout where it lies on a device."""
        self._open()
        key, off = look_at(call)
        mend, _ = self._settle(call)
        gates = raw_gates(call)
        parameters = Float32(self._parameters, gates.A_log), Float32(self._parameters, gates.dt_bias)
        known = KnownDecode(
            call, gates, mend, pool_decode(self._kernels, call.states.dtype), self._rows, parameters,
            self._places(call, mend, 1), self._stream_of,
        )  # fmt: skip
        remembered = call.states.is_cuda and not off
        if remembered:
            if len(self._known) >= MAX_ADMITTED:
                self._known.clear()
            self._known[key] = known
        self._use(known, recall=remembered)
        return known

    def _use(self, known: KnownDecode, recall: bool) -> None:
        self._latest = known if recall else None
        self._branches[Phase.DECODE] = known.branch

    def _admit_verify(self, call: VerifyCall) -> AdmittedVerify:
        """Check ``call`` once for each set of shapes; addresses every time."""
        self._open()
        if type(call) is not VerifyCall:
            raise ContractError(f"verify requires a VerifyCall, got {type(call).__name__}")
        key, off = look_at(call)
        admitted = self._admitted.get(key)
        if admitted is None or off:
            mend, plan = self._settle(call)
            scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
            places = self._places(call, mend, call.q.shape[1])
            index = self._rows.kept_index(
                read_padding=mend.read_padding, write_padding=mend.write_padding, limit=SOFTPLUS_LIMIT
            )
            zero, empty = self._rows.kept_zero_rows(), 0 in call.q.shape
            admitted = AdmittedVerify(mend, plan, mend.branch, scale, empty, places, index, zero)
            if call.states.is_cuda and not off:
                if len(self._admitted) >= MAX_ADMITTED:
                    self._admitted.clear()
                self._admitted[key] = admitted
        self._branches[Phase.VERIFY] = admitted.branch
        return admitted

    def _settle(self, call: StepCall) -> tuple[Mend, GdnPlan]:
        """The detours of ``call`` and the plan that covers it, or the error that it deserves."""
        CHECKS[type(call)](call)
        self._refuse(call)
        plan = self._cover(call)
        self._refuse(call)  # the plan may have measured what the defaults did not say
        return self._plans.mend(call, plan), plan

    def _refuse(self, call: GdnCall) -> None:
        support = self.supports(call)
        if not support:
            raise UnsupportedError(f"{type(call).__name__} for FlashInfer", support.reasons)

    def _places(self, call: StepCall, mend: Mend, tokens: int) -> IndexPlaces | None:
        if not mend.index:
            return None
        return IndexPlaces(partial(self._index_scratch, mend=mend, tokens=tokens), call.slots.device)

    def _index_scratch(self, call: StepCall, mend: Mend, tokens: int) -> IndexScratch:
        """Where the index launch of ``call``, on the current stream, writes."""
        batch, device, dtype = call.slots.shape[0], call.slots.device, torch.int64 if mend.wide else torch.int32
        read = self._scratch.take("read", (batch,), dtype, device)
        write = self._scratch.take("write", (batch,), dtype, device)
        if not mend.clamp:
            return IndexScratch(read, write, None)
        a = raw_gates(call).a
        return IndexScratch(read, write, self._scratch.take("a", (batch, tokens, a.shape[-1]), a.dtype, device))

    def _nodes(self, call: VerifyCall, admitted: AdmittedVerify) -> Tensor:
        """The dense [B, T, HV, V, K] that the kernel writes: the caller's own rows, or scratch."""
        batch, draft = call.q.shape[:2]
        if not admitted.mend.scratch:
            return call.intermediates[:batch]
        state, plan = tuple(call.states.shape[1:]), admitted.plan
        most = (max(batch, plan.max_batch), max(draft, plan.max_draft), *state)
        return self._scratch.take("nodes", (batch, draft, *state), call.states.dtype, call.states.device, most)

    def _cover(self, call: StepCall) -> GdnPlan:
        """A plan that covers ``call``, prepared. Raises ``CaptureError`` where that would have to happen in capture."""
        plan = self._plans.covering(call)
        if not self._plans.ready(phase_of(call), plan):
            if capturing(call.states.device):
                raise CaptureError(
                    f"{type(call).__name__} is beyond the plan: prepare one that covers it, or make the call once "
                    "outside capture"
                )
            self._prepare(plan, stated=False)
            return self._plans.covering(call)
        return plan

    def _forget(self) -> None:
        """What was settled under another plan, or with scratch that is gone, is settled anew."""
        self._admitted.clear()
        self._known.clear()
        self._latest = None

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("this adapter was closed; make another one")
