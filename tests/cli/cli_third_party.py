"""What another package would offer: adapters behind entry points, none of them known to the library."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import torch
from torch import Tensor

import qwen35
from qwen35.domain.capabilities import Capabilities, Clause, Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GdnCall,
    GdnPlan,
    VerifyCall,
)

PORT = "gated_delta_rule"


#: What was closed, by class.
CLOSED: list[str] = []


class Delegate:
    """The reference under another name; subclasses spoil one thing."""

    def __init__(self) -> None:
        self.inner = qwen35.adapter(PORT, "reference", device="cpu")

    @property
    def capabilities(self) -> Capabilities:
        can: Capabilities = self.inner.capabilities
        return can

    def prepare(self, plan: GdnPlan) -> None:
        self.inner.prepare(plan)

    def supports(self, call: GdnCall) -> Support:
        support: Support = self.inner.supports(call)
        return support

    def decode(self, call: DecodeCall) -> Tensor:
        out: Tensor = self.inner.decode(call)
        return out

    def extend(self, call: ExtendCall) -> ExtendResult:
        result: ExtendResult = self.inner.extend(call)
        return result

    def verify(self, call: VerifyCall) -> Tensor:
        out: Tensor = self.inner.verify(call)
        return out

    def commit(self, call: CommitCall) -> None:
        self.inner.commit(call)

    def refresh_parameters(self) -> int:
        return 0

    def close(self) -> None:
        CLOSED.append(type(self).__name__)
        self.inner.close()


class Clamping(Delegate):
    """Padding rows of a decode land in slot 0."""

    def decode(self, call: DecodeCall) -> Tensor:
        out = super().decode(call)
        if bool((call.slots < 0).any()) and call.states.shape[0]:
            call.states[0] += 1
        return out


class Loud(Delegate):
    """Outputs are a tenth too large, far over the bound that it states."""

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(call).mul_(1.1)


class Drifting(Delegate):
    """Outputs are right; the states and intermediates that it leaves are a hundredth too large. No probe of a wrong
    row sees so little: only the bound that it states does."""

    def decode(self, call: DecodeCall) -> Tensor:
        out = super().decode(call)
        self._drift(call, torch.ones_like(call.slots))
        return out

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        self._drift(call, call.cu_seqlens.diff())
        return result

    def verify(self, call: VerifyCall) -> Tensor:
        out = super().verify(call)
        call.intermediates[call.slots >= 0] *= 1.01
        return out

    def _drift(self, call: DecodeCall | ExtendCall, lengths: Tensor) -> None:
        writes = call.slots if call.write_slots is None else call.write_slots
        live = writes[(call.slots >= 0) & (writes >= 0) & (lengths > 0)]
        call.states[live.long()] *= 1.01


class Widening(Delegate):
    """Outputs are right and float32, whatever the tokens are."""

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(call).float()

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        return replace(result, out=result.out.float())

    def verify(self, call: VerifyCall) -> Tensor:
        return super().verify(call).float()


class Flattening(Delegate):
    """Heads and widths of outputs are one dimension."""

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(call).flatten(-2)

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        return replace(result, out=result.out.flatten(-2))

    def verify(self, call: VerifyCall) -> Tensor:
        return super().verify(call).flatten(-2)


#: Dtypes of states and tokens of every plan and call that ``Recording`` was given.
DTYPES: list[tuple[torch.dtype, torch.dtype]] = []


class Recording(Delegate):
    """Notes the dtypes that it is called with."""

    def prepare(self, plan: GdnPlan) -> None:
        DTYPES.append((plan.state_dtype, plan.token_dtype))
        super().prepare(plan)

    def decode(self, call: DecodeCall) -> Tensor:
        DTYPES.append((call.states.dtype, call.q.dtype))
        return super().decode(call)

    def extend(self, call: ExtendCall) -> ExtendResult:
        DTYPES.append((call.states.dtype, call.q.dtype))
        return super().extend(call)


class Reversing(Delegate):
    """Outputs have the wrong sign: other tokens are chosen."""

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(call).neg_()


class Interrupted(Delegate):
    """As if Ctrl-C were pressed while it decodes."""

    def decode(self, call: DecodeCall) -> Tensor:
        raise KeyboardInterrupt


class Crashing(Delegate):
    """A kernel package's own bug."""

    def decode(self, call: DecodeCall) -> Tensor:
        raise IndexError("a bug of another package")


class Fatal(Delegate):
    """A kernel that takes the process down."""

    def decode(self, call: DecodeCall) -> Tensor:
        os.kill(os.getpid(), signal.SIGSEGV)
        return super().decode(call)


class Modest(Delegate):
    """Says which clause it cannot keep, and offers float64 tokens only."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, deviations={Clause.FINITE: "overflows past a = 40"})

    def supports(self, call: GdnCall) -> Support:
        wrong = not isinstance(call, CommitCall) and call.q.dtype is not torch.float64
        return Support.of(*(["token dtype requires float64"] if wrong else []))


def _entry(name: str, made: type[Delegate]) -> AdapterEntry:
    def probe(_: Platform) -> Support:
        return Support.of()

    def create(_: Platform, __: AdapterOptions) -> Delegate:
        return made()

    return AdapterEntry(port=PORT, name=name, summary="from another package", probe=probe, create=create, rank=-1)


PLAIN = _entry("plain", Delegate)
CLAMPING = _entry("clamping", Clamping)
LOUD = _entry("loud", Loud)
DRIFTING = _entry("drifting", Drifting)
WIDENING = _entry("widening", Widening)
FLATTENING = _entry("flattening", Flattening)
RECORDING = _entry("recording", Recording)
REVERSING = _entry("reversing", Reversing)
INTERRUPTED = _entry("interrupted", Interrupted)
CRASHING = _entry("crashing", Crashing)
FATAL = _entry("fatal", Fatal)
MODEST = _entry("modest", Modest)
