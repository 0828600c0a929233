"""The calls that an experiment times: random tokens in the range of a trained model, distinct states, random slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GdnPlan, RawGates, VerifyCall

TokenCall = DecodeCall | ExtendCall | VerifyCall


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the experiment: ``lengths`` are the tokens of each row or sequence of the call."""

    phase: Phase
    lengths: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def label(self) -> str:
        """ "decode 64", "extend 16x1024+1x7", "verify 8x4"."""
        if self.phase is Phase.DECODE:
            return f"decode {self.batch}"
        runs = [(len(list(run)), length) for length, run in groupby(self.lengths)]
        return f"{self.phase} " + "+".join(f"{count}x{length}" for count, length in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What every call of an experiment shares. ``null_slot``: reserved, never used by a live row."""

    geometry: GdnGeometry
    token_dtype: torch.dtype
    state_dtype: torch.dtype
    device: torch.device
    null_slot: int | None = None

    def plan(self, row: Row) -> GdnPlan:
        """The plan that admits exactly the calls of ``row``."""
        return GdnPlan(
            geometry=self.geometry, state_dtype=self.state_dtype, device=self.device, max_batch=row.batch,
            max_tokens=row.tokens, max_draft=max(row.lengths) if row.phase is Phase.VERIFY else 0,
            token_dtype=self.token_dtype, null_slot=self.null_slot,
        )  # fmt: skip

    def bytes_moved(self, row: Row) -> int:
        """The fewest bytes that ``row`` moves: each state read once, each new state written once (in verify one
        a draft token, in the other phases one a sequence), tokens and gates read, outputs written."""
        g = self.geometry
        written = row.tokens if row.phase is Phase.VERIFY else row.batch
        state = (row.batch + written) * g.state_elements * self.state_dtype.itemsize
        token = 2 * g.key_heads * g.key_width + 2 * g.value_heads * g.value_width + 2 * g.value_heads
        return state + row.tokens * token * self.token_dtype.itemsize


def random_pool(layout: Layout, slots: int, generator: torch.Generator) -> Tensor:
    """``slots`` distinct states [N, HV, V, K] of the size that a layer's states settle at."""
    g = layout.geometry
    shape = (slots, g.value_heads, g.value_width, g.key_width)
    pool = torch.empty(shape, dtype=layout.state_dtype, device=layout.device)
    for slot in pool:  # a slot at a time: the float32 draw of a whole pool would double its memory
        slot.copy_(torch.randn(shape[1:], generator=generator, device=layout.device) * 0.1)
    return pool


def live_slots(layout: Layout, count: int, pool: int, generator: torch.Generator) -> Tensor:
    """``count`` distinct slots of a pool of ``pool``, in random order, int32; never the null slot."""
    order = torch.randperm(pool, generator=generator, device=layout.device).to(torch.int32)
    if layout.null_slot is not None:
        order = order[order != layout.null_slot]
    return order[:count].contiguous()


def random_call(layout: Layout, row: Row, states: Tensor, slots: Tensor, generator: torch.Generator) -> TokenCall:
    """A call of ``row`` with fresh tokens; outputs and intermediates are poisoned with NaN."""
    g, device = layout.geometry, layout.device
    lead = (row.batch, row.lengths[0]) if row.phase is Phase.VERIFY else (row.tokens,)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(layout.token_dtype)

    gates = RawGates(
        a=draw(*lead, g.value_heads), b=draw(*lead, g.value_heads),
        A_log=torch.rand(g.value_heads, generator=generator, device=device).mul_(15.0).add_(1.0).log_(),
        dt_bias=draw(g.value_heads) - 4.0,
    )  # fmt: skip
    q, k = draw(*lead, g.key_heads, g.key_width), draw(*lead, g.key_heads, g.key_width)
    v = draw(*lead, g.value_heads, g.value_width)
    out = torch.full_like(v, float("nan"))
    if row.phase is Phase.DECODE:
        return DecodeCall(q=q, k=k, v=v, gates=gates, states=states, slots=slots, out=out)
    if row.phase is Phase.EXTEND:
        return ExtendCall(
            q=q, k=k, v=v, gates=gates, states=states, slots=slots, cu_seqlens=offsets(row.lengths, device),
            seq_lens_host=row.lengths, out=out,
        )  # fmt: skip
    shape = (*lead, g.value_heads, g.value_width, g.key_width)
    nodes = torch.full(shape, float("nan"), dtype=layout.state_dtype, device=device)
    return VerifyCall(q=q, k=k, v=v, gates=gates, states=states, slots=slots, intermediates=nodes, out=out)


def raw_gates(call: TokenCall) -> RawGates:
    """The gates of a call that ``random_call`` made."""
    if not isinstance(call.gates, RawGates):
        raise ConfigurationError(f"experiments use raw gates, got {type(call.gates).__name__}")
    return call.gates


def offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``cu_seqlens`` of these lengths, int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of a call that is compared with the oracle: whole sequences, and whole query/key heads with
    their value heads. ``indices`` are the positions of the call's rows or sequences."""

    indices: tuple[int, ...]
    key_heads: tuple[int, ...]
    lengths: tuple[int, ...]
    head_ratio: int

    @property
    def value_heads(self) -> tuple[int, ...]:
        return tuple(h * self.head_ratio + i for h in self.key_heads for i in range(self.head_ratio))

    def tokens(self, row: Row) -> list[int]:
        """Positions of the sampled tokens in a packed call; for decode and verify the rows."""
        if row.phase is not Phase.EXTEND:
            return list(self.indices)
        starts = [0, *accumulate(row.lengths)]
        return [t for i in self.indices for t in range(starts[i], starts[i + 1])]


def choose_sample(layout: Layout, row: Row, budget: int) -> Sample:
    """As many sequences (first and last among them) and heads as ``budget`` state updates of one element allow.

    At least one sequence and one query/key head stay, whatever the budget.
    """
    g = layout.geometry
    head_cost = g.head_ratio * g.value_width * g.key_width
    longest = max(1, *row.lengths)
    # a quarter of the budget for one sequence: four sequences of a few heads show more than one of all heads
    heads = _spread(g.key_heads, max(1, min(g.key_heads, budget // (4 * longest * head_cost))))
    affordable = budget // (len(heads) * head_cost * longest)
    indices = _spread(row.batch, max(1, min(row.batch, affordable)))
    return Sample(indices, heads, tuple(row.lengths[i] for i in indices), g.head_ratio)


def sampled_call(call: TokenCall, row: Row, sample: Sample, before: Tensor) -> TokenCall:
    """The sampled part of ``call`` on the CPU, on a pool of its own in float64.

    ``before`` are the states [B, HV, V, K] that the sampled call's rows started from, in the call's order.
    """
    at = torch.tensor(sample.tokens(row), device=call.q.device)
    key = torch.tensor(sample.key_heads, device=call.q.device)
    value = torch.tensor(sample.value_heads, device=call.q.device)
    axis, given = call.q.dim() - 2, raw_gates(call)
    gates = RawGates(
        a=_take(given.a, at, value, axis), b=_take(given.b, at, value, axis),
        A_log=given.A_log[value].cpu(), dt_bias=given.dt_bias[value].cpu(),
    )  # fmt: skip
    rows = torch.tensor(sample.indices, device=before.device)
    states = before[rows][:, value.to(before.device)].cpu().double()
    out = torch.full((*at.shape, *call.v.shape[1:axis], len(value), call.v.shape[-1]), float("nan")).double()
    count = len(sample.indices)
    slots = torch.arange(count, dtype=torch.int32)
    q, k = _take(call.q, at, key, axis).double(), _take(call.k, at, key, axis).double()
    v = _take(call.v, at, value, axis).double()
    if isinstance(call, DecodeCall):
        return DecodeCall(q=q, k=k, v=v, gates=gates, states=states, slots=slots, out=out)
    if isinstance(call, ExtendCall):
        return ExtendCall(
            q=q, k=k, v=v, gates=gates, states=states, slots=slots, out=out,
            cu_seqlens=offsets(sample.lengths, torch.device("cpu")), seq_lens_host=sample.lengths,
        )  # fmt: skip
    nodes = torch.full((count, call.q.shape[1], *states.shape[1:]), float("nan"), dtype=torch.float64)
    return VerifyCall(q=q, k=k, v=v, gates=gates, states=states, slots=slots, intermediates=nodes, out=out)


def sampled_results(call: TokenCall, row: Row, sample: Sample, out: Tensor) -> tuple[Tensor, Tensor]:
    """What the sample covers of a finished call: outputs, and the states it left (verify: its intermediates)."""
    axis = call.q.dim() - 2
    at = torch.tensor(sample.tokens(row), device=out.device)
    value = torch.tensor(sample.value_heads, device=out.device)
    rows = torch.tensor(sample.indices, device=out.device)
    outputs = out.index_select(0, at).index_select(axis, value)
    if isinstance(call, VerifyCall):
        return outputs.cpu(), call.intermediates[rows].index_select(2, value).cpu()
    return outputs.cpu(), call.states[call.slots[rows].long()].index_select(1, value).cpu()


def with_states(call: TokenCall, states: Tensor) -> TokenCall:
    """``call`` on another pool, with outputs and intermediates poisoned afresh."""
    poisoned = None if call.out is None else torch.full_like(call.out, float("nan"))
    if isinstance(call, VerifyCall):
        nodes = torch.full_like(call.intermediates, float("nan"))
        return replace(call, states=states, out=poisoned, intermediates=nodes)
    return replace(call, states=states, out=poisoned)


def _take(tensor: Tensor, at: Tensor, heads: Tensor, axis: int) -> Tensor:
    return tensor.index_select(0, at).index_select(axis, heads).cpu()


def _spread(size: int, count: int) -> tuple[int, ...]:
    """``count`` of ``range(size)``, evenly spread, the first and (from two on) the last among them."""
    if count == 1:
        return (0,)
    return tuple(sorted({round(i * (size - 1) / (count - 1)) for i in range(count)}))
