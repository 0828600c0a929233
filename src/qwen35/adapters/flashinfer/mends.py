"""What has to be done around FlashInfer's kernels so that a call keeps the contract: decisions, no launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qwen35.domain.platform import Platform
from qwen35.ports.gdn_calls import DecodeCall, ExtendCall, GdnPlan, VerifyCall

#: Bytes. The bfloat16 kernels are compiled for 32-byte aligned pointers, the others for 16.
ALIGNMENT = 32
#: Kernels address these buffers with 32-bit element offsets.
MAX_ELEMENTS = 2**31
#: Tokens of one chunk of the chunked prefill; checkpoints fall on its multiples.
CHUNK = 64
#: exp(88.8) is past float32. Kernels that take log(1 + exp(x)) of every x give NaN there.
SOFTPLUS_LIMIT = 85.0

SplitChoice = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How the kernels of one state dtype treat what the contract settles, measured by ``prepare``.

    ``skips_padding``: slot -1 touches no slot of the pool and no intermediate row. ``finite_softplus``: a gate input
    past 88 gives no NaN. ``borrows_first_slot``: of the pool, decode touches slot 0 for slot -1, and nothing else.
    """

    skips_padding: bool
    finite_softplus: bool
    borrows_first_slot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """One call's detours; ``refusal`` where none of them keeps the contract.

    ``index``: slots go through an index launch, ``read_padding`` and ``write_padding`` standing for -1.
    ``clamp``: gate inputs are limited in the same launch. ``zero``: padded output rows are zeroed afterwards.
    ``scratch``: intermediates are written in scratch and scattered.
    """

    refusal: str | None = None
    index: bool = False
    read_padding: int = -1
    write_padding: int = -1
    wide: bool = False
    clamp: bool = False
    zero: bool = False
    scratch: bool = False

    @property
    def branch(self) -> str:
        """In words, for the record of branches taken."""
        detours = {
            "null slot": self.read_padding >= 0 or self.write_padding >= 0, "indices converted": self.index,
            "gates clamped": self.clamp, "padding zeroed": self.zero, "intermediates scattered": self.scratch,
        }  # fmt: skip
        named = [name for name, taken in detours.items() if taken]
        return self.refusal or ", ".join(["pool by index", *named])


def decode_mend(call: DecodeCall, plan: GdnPlan, behaviour: Behaviour) -> Mend:
    """Decode. A kernel that skips padding needs nothing; one that uses a slot of its own needs the null slot, and where
    the two are one, -1 may reach it as it is. (Not as a write slot: a padded row may have a live one.)"""
    null, size = plan.null_slot, call.states.shape[0]
    if null is not None and not 0 <= null < size:
        return Mend(refusal=f"null slot requires a slot of the pool of {size}, got {null}")
    sacrificial = plan.may_pad and not behaviour.skips_padding
    if sacrificial and null is None:
        return Mend(
            refusal="rows that may pad require a null slot in the plan: for slot -1 the bfloat16 kernel reads and "
            "writes slot 0, got none"
        )
    if call.write_slots is not None and null is None:
        return Mend(
            refusal="write slots require a null slot in every plan for this geometry, these dtypes and this device: "
            "for write slot -1 the kernel writes slot 0, got none"
        )
    spare = -1 if null is None else null
    clamp = not behaviour.finite_softplus
    redirect = sacrificial and not (null == 0 and behaviour.borrows_first_slot)
    return Mend(
        index=redirect or clamp or call.write_slots is not None or _unfit_index(call.slots, torch.int32),
        read_padding=spare if sacrificial else -1,
        write_padding=spare if sacrificial or call.write_slots is not None else -1,
        clamp=clamp,
        zero=sacrificial,
    )


def verify_mend(call: VerifyCall, plan: GdnPlan, behaviour: Behaviour) -> Mend:
    """Verify. The kernel writes row i of a dense [B, T] buffer for batch row i, and no slot."""
    batch, draft = call.q.shape[:2]
    state, nodes = call.states[0].numel(), call.intermediates
    if batch == draft == 1 and call.states.dtype == torch.float32:
        return Mend(refusal="verify of one row's one token requires a bfloat16 state: the float32 kernel won't compile")
    if batch * draft * state >= MAX_ELEMENTS:
        return Mend(refusal=f"verify requires B*T*HV*V*K below 2**31, got {batch * draft * state}")
    direct = (
        call.rows is None
        and nodes.shape[1] == draft
        and nodes.is_contiguous()
        and nodes.dtype == call.states.dtype
        and nodes.data_ptr() % ALIGNMENT == 0
        and (behaviour.skips_padding or not plan.may_pad)
    )
    # The float32 kernel multiplies slot and slot size in the index's dtype; the bfloat16 kernel widens by itself.
    wide = call.states.dtype == torch.float32 and call.states.shape[0] * call.states.stride(0) >= MAX_ELEMENTS
    clamp = not behaviour.finite_softplus
    return Mend(
        index=clamp or _unfit_index(call.slots, torch.int64 if wide else torch.int32), wide=wide, clamp=clamp,
        zero=plan.may_pad, scratch=not direct,
    )  # fmt: skip


def split_prefill(choice: SplitChoice, platform: Platform, call: ExtendCall) -> bool:
    """Whether the sequence-split kernel runs. "auto" is: no checkpoints, sequences of 1,024 tokens or more on
    average (two of the kernel's smallest splits), and so few of them that the one-pass kernel, a block a sequence and
    value head, leaves idle more than half of the multiprocessors (more than three quarters on compute capability
    10)."""
    if choice != "auto":
        return choice == "on"
    sequences, blocks = call.slots.shape[0], call.slots.shape[0] * call.v.shape[1]
    major = platform.compute_capability[0] if platform.compute_capability else 0
    few = blocks * (4 if major == 10 else 2) < platform.multiprocessors
    return call.checkpoints is None and few and call.v.shape[0] >= 1024 * sequences


def extend_reasons(call: ExtendCall, choice: SplitChoice) -> Iterable[str]:
    """What extend refuses beyond the shared capabilities."""
    state = call.states[0].numel() if call.states.shape[0] else 0
    if call.scale is not None and call.scale == 0.0:
        yield "scale requires a number other than 0.0, which FlashInfer's prefill reads as the default"
    if call.checkpoints is not None and choice == "on":
        yield "checkpoints require the one-pass kernel, got prefill_split on"
    if call.slots.shape[0] * state >= MAX_ELEMENTS:
        yield f"extend requires S*HV*V*K below 2**31, got {call.slots.shape[0] * state}"
    if call.checkpoints is not None and call.checkpoints.count * state >= MAX_ELEMENTS:
        yield f"checkpoints require count*HV*V*K below 2**31, got {call.checkpoints.count * state}"


def step_reasons(call: DecodeCall | VerifyCall) -> Iterable[str]:
    """What decode and verify refuse beyond the shared capabilities, by which the gates are raw."""
    gates: Any = call.gates
    for name, gate in (("a", gates.a), ("b", gates.b)):
        if gate.dtype != torch.bfloat16:
            yield f"gates.{name} requires bfloat16, got {str(gate.dtype).removeprefix('torch.')}"
    pitch = call.states.stride(0) * call.states.element_size()
    if call.states.shape[0] > 1 and pitch % ALIGNMENT:
        yield f"slot stride requires a multiple of {ALIGNMENT} bytes, got {pitch}"
    yield from alignment_reasons(
        {"q": call.q, "k": call.k, "v": call.v, "gates.a": gates.a, "gates.b": gates.b,
         "states": call.states, "out": call.out}
    )  # fmt: skip


def fit(tensor: Tensor) -> bool:
    """Dense and aligned, as the prefill kernels need their tensors."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def alignment_reasons(tensors: Mapping[str, Tensor | None]) -> Iterable[str]:
    """One reason for each tensor whose address is not a multiple of ``ALIGNMENT``."""
    for name, tensor in tensors.items():
        off = 0 if tensor is None or not tensor.numel() else tensor.data_ptr() % ALIGNMENT
        if off:
            yield f"{name} requires {ALIGNMENT}-byte alignment, got an address {off} bytes off"


def _unfit_index(slots: Tensor, dtype: torch.dtype) -> bool:
    return slots.dtype != dtype or slots.data_ptr() % ALIGNMENT != 0
