"""Decode calls of one layout: what is settled about them once, and the short way that each then goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qwen35.adapters._kernels.rows import RowOperations
from qwen35.adapters.flashinfer.compiled import DecodeLayout
from qwen35.adapters.flashinfer.index_scratch import IndexPlaces
from qwen35.adapters.flashinfer.mends import ALIGNMENT, SOFTPLUS_LIMIT, Mend
from qwen35.adapters.flashinfer.parameters import Float32
from qwen35.adapters.flashinfer.steps import PoolDecode
from qwen35.domain.alignment import misalignment
from qwen35.ports._layout import LayoutCheck, layout_check
from qwen35.ports.gdn_calls import DecodeCall, RawGates

_LOW_BITS = ALIGNMENT - 1


class KnownDecode:
    """Decode calls that look like ``call``, which was admitted with ``mend``.

    ``recall`` says whether another call does, ``run`` serves one that does, from ``call`` on. ``rows_fit``: rows are as
    aligned as addresses must be.
    """

    def __init__(
        self, call: DecodeCall, gates: RawGates, mend: Mend, kernel: PoolDecode, rows: RowOperations,
        parameters: tuple[Float32, Float32], places: IndexPlaces | None, stream_of: Callable[[torch.device], int],
    ) -> None:  # fmt: skip
        self.branch = mend.branch
        #: FlashInfer's function, and the kernel that it compiled once that was found.
        self._kernel, self._compiled, self._places = kernel.launch, kernel.compiled, places
        self._index = rows.kept_index(
            read_padding=mend.read_padding, write_padding=mend.write_padding, limit=SOFTPLUS_LIMIT
        )
        self._zero = rows.kept_zero_rows() if mend.zero else None
        self._stream_of, self._device = stream_of, call.slots.device
        self._A_log, self._dt_bias = parameters
        self._given_scale = type(call.scale), call.scale  # 1.0 is no True, and a tensor's value is not asked
        self._scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
        self._makes_out, self._writes_read = call.out is None, call.write_slots is None
        self._dense = call.v.is_contiguous()
        tokens = (call.q, call.k, call.v, gates.a, gates.b, *(() if call.out is None else (call.out,)))
        self._packed = not all(t.is_contiguous() for t in tokens)
        self._empty, self._one_row = 0 in call.q.shape, call.q.shape[0] == 1
        tensors = _tensors(call, gates)
        aligned = [t for t in tensors if t is not gates.A_log and t is not gates.dt_bias]  # of those, copies are made
        self.rows_fit = not any(misalignment(t, t.element_size(), ALIGNMENT) for t in aligned)
        self._same: LayoutCheck = layout_check(tensors)

    def compare_with(self, call: DecodeCall) -> None:
        """Recall by ``call``, whose layout is the same, from now on: the comparison hangs on the autograd mode."""
        if isinstance(call.gates, RawGates):
            self._same = layout_check(_tensors(call, call.gates))

    def recall(self, call: DecodeCall) -> bool:
        """Whether ``call`` looks like the admitted one, and every address that counts is aligned."""
        if type(call) is not DecodeCall:  # an extend has the same fields
            return False
        gates, out, write = call.gates, call.out, call.write_slots
        if type(gates) is not RawGates or (out is None) is not self._makes_out:
            return False
        if (write is None) is not self._writes_read or (type(call.scale), call.scale) != self._given_scale:
            return False
        q, k, v, states, slots, a, b = call.q, call.k, call.v, call.states, call.slots, gates.a, gates.b
        if out is None and write is None:
            if not self._same(q, k, v, states, slots, a, b, gates.A_log, gates.dt_bias):
                return False
            joined = 0
        elif not self._same(*_tensors(call, gates)):
            return False
        else:
            joined = (0 if out is None else out.data_ptr()) | (0 if write is None else write.data_ptr())
        joined |= q.data_ptr() | k.data_ptr() | v.data_ptr() | states.data_ptr() | slots.data_ptr()
        return not (joined | a.data_ptr() | b.data_ptr()) & _LOW_BITS

    def run(self, call: DecodeCall) -> Tensor:
        """Serve ``call``; returns out [B, HV, V]. Mutates the written slots and ``call.out``."""
        v, out = call.v, call.out
        gates: Any = call.gates  # raw, as those of the admitted call
        if out is None:
            out = torch.empty_like(v) if self._dense else torch.empty_like(v, memory_format=torch.contiguous_format)
        if self._empty:
            return out
        A_log, dt_bias = self._A_log(gates.A_log), self._dt_bias(gates.dt_bias)
        slots, zero, places = call.slots, self._zero, self._places
        read, write, clamped, stream = slots, None, None, 0
        if zero is not None or places is not None:
            stream = self._stream_of(self._device)
        if places is not None:
            place = places(call, stream)
            read, clamped = place.read, place.clamped
            self._index(slots, call.write_slots, read, place.write, gates.a, dt_bias, clamped, stream)
            if not self._writes_read:
                write = place.write
        if self._one_row:  # the same tensors, made in less time
            q, k, v, b, rows = call.q[None], call.k[None], v[None], gates.b[None], out[None]
            a = gates.a[None] if clamped is None else clamped
        else:
            q, k, v = call.q.unsqueeze(1), call.k.unsqueeze(1), v.unsqueeze(1)
            b, rows = gates.b.unsqueeze(1), out.unsqueeze(1)
            a = gates.a.unsqueeze(1) if clamped is None else clamped
        self._kernel(q, k, v, a, b, A_log, dt_bias, self._scale, rows, call.states, read, write)
        if self._compiled is not None:
            self._take_compiled(q, v, call.states, write is not None)
        if zero is not None:
            zero(out, slots, stream)
        return out

    def _take_compiled(self, q: Tensor, v: Tensor, states: Tensor, split: bool) -> None:
        """From now on launch what FlashInfer's function has just launched, where that can be found."""
        compiled, self._compiled = self._compiled, None
        layout = DecodeLayout.of(q, v, self._scale, states, split=split, packed=self._packed)
        found = None if compiled is None else compiled.trusted(layout)
        if found is not None:
            self._kernel = found


def _tensors(call: DecodeCall, gates: RawGates) -> tuple[Tensor, ...]:
    """Every tensor of ``call``; those that may be missing last."""
    some: tuple[Tensor, ...] = (
        call.q, call.k, call.v, call.states, call.slots, gates.a, gates.b, gates.A_log, gates.dt_bias,
    )  # fmt: skip
    if call.out is not None:
        some += (call.out,)
    return some if call.write_slots is None else (*some, call.write_slots)
