"""``RowOperations`` in Triton. Imported only inside factories. Offsets are 64-bit: pools pass 2**31 elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import LOW_BITS, KeptLaunch, KeptLaunches, programs_for
from qwen35.adapters._kernels.prefill_kernels import launch_prefill_inputs
from qwen35.adapters._kernels.rows import IndexLaunch, ZeroLaunch
from qwen35.domain.alignment import power_of_two
from qwen35.ports.gdn_calls import CommitCall, Gates

#: Elements of one program of a row copy: 16 KiB of float32, so that a slot of 2 MiB spreads over 128 programs.
BLOCK = 4096
#: Programs that share one padded sequence in ``zero_ranges``.
RANGE_PROGRAMS = 32


_INDEX_POINTERS = ["slots", "write_slots", "read", "write", "a", "dt_bias", "clamped"]


@triton.jit(
    do_not_specialize=["read_padding", "write_padding"], do_not_specialize_on_alignment=_INDEX_POINTERS
)  # fmt: skip
def index_kernel(
    slots, write_slots, read, write, a, dt_bias, clamped, read_padding, write_padding, stride_row, stride_token,
    count, limit, HEADS: tl.constexpr, HAS_WRITE: tl.constexpr, CLAMP: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    target = slot
    if HAS_WRITE:
        target = tl.load(write_slots + row).to(tl.int64)
    padded = slot < 0
    tl.store(read + row, tl.where(padded, read_padding, slot).to(read.dtype.element_ty))
    tl.store(write + row, tl.where(padded | (target < 0), write_padding, target).to(write.dtype.element_ty))
    if CLAMP:
        for start in range(0, count, BLOCK_A):
            at = start + tl.arange(0, BLOCK_A)
            inside = at < count
            head = at % HEADS
            x = tl.load(a + row * stride_row + (at // HEADS) * stride_token + head, mask=inside, other=0.0)
            top = limit - tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
            x = x.to(tl.float32)
            x = tl.where(x > top, top, x)
            tl.store(clamped + row * count + at, x.to(clamped.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def zero_rows_kernel(out, slots, stride_row, stride_token, stride_head, count, HEADS: tl.constexpr, WIDTH: tl.constexpr,
               BLOCK_E: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) >= 0:
        return
    at = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    head = (at // WIDTH) % HEADS
    token = at // (WIDTH * HEADS)
    where = row * stride_row + token * stride_token + head * stride_head + at % WIDTH
    tl.store(out + where, tl.zeros([BLOCK_E], out.dtype.element_ty), mask=at < count)


@triton.jit
def _zero_ranges(rows, offsets, slots, width, BLOCK_E: tl.constexpr):
    sequence = tl.program_id(0)
    if tl.load(slots + sequence) >= 0:
        return
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    for row in range(start + tl.program_id(1), end, tl.num_programs(1)):
        for first in range(0, width, BLOCK_E):
            at = first + tl.arange(0, BLOCK_E)
            tl.store(rows + row * width + at, tl.zeros([BLOCK_E], rows.dtype.element_ty), mask=at < width)


@triton.jit
def _gather(states, slots, fresh, out, stride_slot, count, HAS_FRESH: tl.constexpr, BLOCK_E: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    live = slot >= 0
    if HAS_FRESH:
        live = live & (tl.load(fresh + row).to(tl.int32) == 0)
    at = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = at < count
    x = tl.load(states + slot * stride_slot + at, mask=inside & live, other=0.0)
    tl.store(out + row * count + at, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scatter(source, states, slots, write_slots, cu_seqlens, stride_slot, count, HAS_WRITE: tl.constexpr,
             BLOCK_E: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    target = slot
    if HAS_WRITE:
        target = tl.load(write_slots + row).to(tl.int64)
    if (slot < 0) | (target < 0) | (tl.load(cu_seqlens + row) == tl.load(cu_seqlens + row + 1)):
        return
    at = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = at < count
    x = tl.load(source + row * count + at, mask=inside)
    tl.store(states + target * stride_slot + at, x.to(states.dtype.element_ty), mask=inside)


@triton.jit
def _scatter_nodes(source, intermediates, slots, rows, stride_row, stride_node, count, TOKENS: tl.constexpr,
                   HAS_ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    i = node // TOKENS
    if tl.load(slots + i) < 0:
        return
    target = i
    if HAS_ROWS:
        target = tl.load(rows + i).to(tl.int64)
    at = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = at < count
    x = tl.load(source + node * count + at, mask=inside)
    where = intermediates + target * stride_row + (node % TOKENS) * stride_node
    tl.store(where + at, x.to(intermediates.dtype.element_ty), mask=inside)


@triton.jit
def _commit(states, intermediates, slots, rows, last, stride_slot, stride_row, stride_node, count,
            HAS_ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    node = tl.load(last + i).to(tl.int64)
    if (slot < 0) | (node < 0):
        return
    row = i
    if HAS_ROWS:
        row = tl.load(rows + i).to(tl.int64)
    at = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = at < count
    x = tl.load(intermediates + row * stride_row + node * stride_node + at, mask=inside)
    tl.store(states + slot * stride_slot + at, x.to(states.dtype.element_ty), mask=inside)


class TritonIndex:
    """See ``IndexLaunch``."""

    __slots__ = ("_launch", "_limit", "_paddings")

    def __init__(self, read_padding: int, write_padding: int, limit: float) -> None:
        self._paddings, self._limit = (read_padding, write_padding), limit
        self._launch: KeptLaunch | None = None

    def __call__(
        self, slots: Tensor, write_slots: Tensor | None, read: Tensor, write: Tensor, a: Tensor | None,
        dt_bias: Tensor | None, clamped: Tensor | None, stream: int,
    ) -> None:  # fmt: skip
        """See ``IndexLaunch``."""
        launch = self._launch
        if launch is None:
            launch = self._launch = self._like(slots, write_slots, a if clamped is not None else None)
        if write_slots is None:
            write_slots = slots
        if clamped is None or a is None or dt_bias is None:
            a = dt_bias = clamped = slots
        if launch.kept:
            launch.again(
                stream, slots.data_ptr(), write_slots.data_ptr(), read.data_ptr(), write.data_ptr(), a.data_ptr(),
                dt_bias.data_ptr(), clamped.data_ptr(),
            )  # fmt: skip
        else:
            launch.first(True, slots, write_slots, read, write, a, dt_bias, clamped)

    def _like(self, slots: Tensor, write_slots: Tensor | None, a: Tensor | None) -> KeptLaunch:
        heads, count, strides = 1, 0, (0, 0)
        if a is not None:
            heads, count = a.shape[-1], a[0].numel()
            strides = a.stride(0), a.stride(1) if a.dim() == 3 else 0
        block = min(1024, max(32, power_of_two(count)))
        rest = (*self._paddings, *strides, count, self._limit, heads, write_slots is not None, a is not None, block)
        return KeptLaunch(index_kernel, (slots.shape[0], 1, 1), rest, num_warps=1)


class TritonZeroRows:
    """See ``ZeroLaunch``."""

    __slots__ = ("_launch",)

    def __init__(self) -> None:
        self._launch: KeptLaunch | None = None

    def __call__(self, out: Tensor, slots: Tensor, stream: int) -> None:
        """See ``ZeroLaunch``."""
        launch = self._launch
        if launch is None:
            launch = self._launch = self._like(out)
        address = out.data_ptr()
        if launch.kept and not address & LOW_BITS:
            launch.again(stream, address, slots.data_ptr())
        else:
            launch.first(not address & LOW_BITS, out, slots)

    def _like(self, out: Tensor) -> KeptLaunch:
        heads, width = out.shape[-2:]
        count = out[0].numel()
        strides = out.stride(0), out.stride(1) if out.dim() == 4 else 0, out.stride(-2)
        grid = out.shape[0], programs_for(count, BLOCK), 1
        return KeptLaunch(zero_rows_kernel, grid, (*strides, count, heads, width, BLOCK))


kept_zero_ranges = KeptLaunches(_zero_ranges)
kept_gather = KeptLaunches(_gather, num_warps=8)
kept_scatter = KeptLaunches(_scatter, num_warps=8)


class TritonRows:
    """See ``RowOperations``."""

    def index(
        self, slots: Tensor, write_slots: Tensor | None, read: Tensor, write: Tensor, *, read_padding: int,
        write_padding: int, a: Tensor | None = None, dt_bias: Tensor | None = None, clamped: Tensor | None = None,
        limit: float = 0.0,
    ) -> None:  # fmt: skip
        """See ``RowOperations``."""
        TritonIndex(read_padding, write_padding, limit)(slots, write_slots, read, write, a, dt_bias, clamped, 0)

    def kept_index(self, *, read_padding: int, write_padding: int, limit: float) -> IndexLaunch:
        """See ``RowOperations``."""
        return TritonIndex(read_padding, write_padding, limit)

    def zero_rows(self, out: Tensor, slots: Tensor) -> None:
        """See ``RowOperations``."""
        TritonZeroRows()(out, slots, 0)

    def kept_zero_rows(self) -> ZeroLaunch:
        """See ``RowOperations``."""
        return TritonZeroRows()

    def zero_ranges(self, rows: Tensor, offsets: Tensor, slots: Tensor) -> None:
        """See ``RowOperations``."""
        if rows.numel():
            width = rows.numel() // rows.shape[0]
            kept_zero_ranges((slots.shape[0], RANGE_PROGRAMS, 1), (width, BLOCK), rows, offsets, slots)

    def gather_states(self, states: Tensor, slots: Tensor, fresh: Tensor | None, out: Tensor) -> None:
        """See ``RowOperations``."""
        count = states[0].numel()
        kept_gather(
            (slots.shape[0], programs_for(count, BLOCK), 1), (states.stride(0), count, fresh is not None, BLOCK),
            states, slots, slots if fresh is None else fresh, out,
        )  # fmt: skip

    def scatter_states(
        self, source: Tensor, states: Tensor, slots: Tensor, write_slots: Tensor | None, cu_seqlens: Tensor
    ) -> None:
        """See ``RowOperations``."""
        count = states[0].numel()
        kept_scatter(
            (slots.shape[0], programs_for(count, BLOCK), 1), (states.stride(0), count, write_slots is not None, BLOCK),
            source, states, slots, slots if write_slots is None else write_slots, cu_seqlens,
        )  # fmt: skip

    def scatter_nodes(self, source: Tensor, intermediates: Tensor, slots: Tensor, rows: Tensor | None) -> None:
        """See ``RowOperations``."""
        batch, tokens = source.shape[:2]
        count = source[0, 0].numel()
        _scatter_nodes[(batch * tokens, programs_for(count, BLOCK))](
            source, intermediates, slots, slots if rows is None else rows, *intermediates.stride()[:2], count,
            TOKENS=tokens, HAS_ROWS=rows is not None, BLOCK_E=BLOCK, num_warps=8,
        )  # fmt: skip

    def commit(self, call: CommitCall) -> None:
        """See ``RowOperations``."""
        count = call.states[0].numel()
        _commit[(call.slots.shape[0], programs_for(count, BLOCK))](
            call.states, call.intermediates, call.slots, call.slots if call.rows is None else call.rows, call.last,
            call.states.stride(0), *call.intermediates.stride()[:2], count, HAS_ROWS=call.rows is not None,
            BLOCK_E=BLOCK, num_warps=8,
        )  # fmt: skip

    def prefill_inputs(
        self, q: Tensor, k: Tensor, gates: Gates, cu_seqlens: Tensor, *, q_out: Tensor, k_out: Tensor, decay: Tensor,
        beta: Tensor, cu_out: Tensor, v: Tensor | None = None, v_out: Tensor | None = None, linear: bool = True,
        slots: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See ``RowOperations``."""
        launch_prefill_inputs(q, k, gates, cu_seqlens, q_out, k_out, decay, beta, cu_out, v, v_out, linear, slots)
