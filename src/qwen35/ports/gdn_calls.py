"""Call objects of the GDN contract: tensors only, nothing is checked when one is made.

H query/key heads, HV value heads, K key width, V value width, B batch rows, S sequences, T tokens, N pool
slots, R intermediate rows. Token tensors may be views of a packed projection: only their last dimension must
be contiguous. ``states`` is the pool [N, HV, V, K], K contiguous, float32 or bfloat16; its slot stride may
exceed HV*V*K. ``slots`` are int32 (int64 accepted), -1 marks padding. ``write_slots`` (None: ``slots``) may
name another slot to write, -1 writes none; no row may write a slot that another live row writes or reads, or
the order of the rows would show. ``scale`` None means K**-0.5. ``out`` (None: made by the adapter) receives the
output and is the object returned; like everything that a call writes it shares no memory with the call's other
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.domain.capabilities import Phase
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports._device import with_index


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGates:
    """``a``, ``b`` [..., HV] as projected; ``A_log``, ``dt_bias`` [HV] parameters.

    log decay = -exp(A_log) * softplus(a + dt_bias); beta = sigmoid(b); both in float32.
    """

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGates:
    """``g`` [..., HV] log decay (at most 0) and ``beta`` [..., HV], sigmoid applied; both float32."""

    g: Tensor
    beta: Tensor


Gates = RawGates | LogGates


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall:
    """One token a row: q, k [B, H, K], v [B, HV, V], gates [B, HV], slots [B], out [B, HV, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    states: Tensor
    slots: Tensor
    write_slots: Tensor | None = None
    scale: float | None = None
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Keep the state after every ``every`` tokens of each sequence.

    ``starts`` [S+1] int64: sequence s owns checkpoint rows starts[s] to starts[s+1] - 1; its row i holds the
    state after (i + 1) * every tokens. ``count`` is the total, known to the host.
    """

    every: int
    starts: Tensor
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendCall:
    """Packed sequences: q, k [T, H, K], v [T, HV, V], gates [T, HV], slots [S], out [T, HV, V].

    ``cu_seqlens`` [S+1] int32 or int64: offsets from 0 to T. ``seq_lens_host``: the lengths, where the host
    knows them. ``fresh`` [S] bool: start from zero whatever the slot holds.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    states: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    seq_lens_host: tuple[int, ...] | None = None
    fresh: Tensor | None = None
    write_slots: Tensor | None = None
    checkpoints: CheckpointPlan | None = None
    scale: float | None = None
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendResult:
    """``out`` [T, HV, V] and, where planned, ``checkpoints`` [count, HV, V, K] in the pool's dtype."""

    out: Tensor
    checkpoints: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCall:
    """Draft tokens: q, k [B, T, H, K], v [B, T, HV, V], gates [B, T, HV], slots [B], out [B, T, HV, V].

    ``intermediates`` [R, T', HV, V, K], T' at least T: batch row i writes row ``rows[i]`` (None: row i); node t holds
    the state after that node. Only padding rows may share a row, and they write none.
    ``parents`` [B, T] int32: the node each node continues from, -1 for the pool's state; a parent comes
    before its child. None: a chain.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    states: Tensor
    slots: Tensor
    intermediates: Tensor
    rows: Tensor | None = None
    parents: Tensor | None = None
    scale: float | None = None
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCall:
    """Copy the state after node ``last[i]`` of row ``rows[i]`` to slot ``slots[i]``.

    Where the slot or the node is -1 nothing is copied, and the other entries of row i do not matter. Several rows may
    copy from one row of the intermediates, none to the slot of another.
    """

    states: Tensor
    slots: Tensor
    intermediates: Tensor
    last: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnPlan:
    """The largest calls to come. ``prepare`` fixes scratch and branches for them.

    ``max_batch`` rows or sequences, ``max_tokens`` tokens of one extend, ``max_draft`` tokens a row of verify
    (0: no verify), none negative. ``null_slot``: a slot whose content is nobody's. ``may_pad``: rows may carry slot -1.
    ``device`` "cuda" becomes the current GPU, since tensors always name theirs.
    """

    geometry: GdnGeometry
    state_dtype: torch.dtype
    device: torch.device
    max_batch: int
    max_tokens: int
    max_draft: int = 0
    token_dtype: torch.dtype = torch.bfloat16
    null_slot: int | None = None
    may_pad: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", with_index(self.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What a graph replay is about to read and write: the tensors on which the captured branch hangs."""

    phase: Phase
    states: Tensor
    intermediates: Tensor | None = None
