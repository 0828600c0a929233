"""What the table of bad calls is made of: functions that make the parts of a good call, or the call, bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qwen35.ports.gated_delta_rule import ExtendCall, LogGates
from qwen35.testing.gdn_kit import checkpoint_plan
from qwen35.testing.kit import Parts


def token(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, tokens={**p.tokens, name: change(p.tokens[name])})


def param(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    def apply(p: Parts) -> Parts:
        value = p.params[name]
        if value is None:  # a bias: as good a one as any
            value = p.tokens["x"].new_zeros(p.tokens["x"].shape[-1])
        return replace(p, params={**p.params, name: change(value)})

    return apply


def part(name: str, change: Callable[[Any], Any]) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, **{name: change(getattr(p, name))})


def longer(t: Tensor) -> Tensor:
    return torch.cat([t, t[-1:]])


def wider(t: Tensor) -> Tensor:
    return torch.cat([t, t[..., -1:]], dim=-1)


def strided(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def elsewhere(t: Tensor) -> Tensor:
    return t.to("meta")


def with_value(index: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[index] = value
        return t

    return change


def extra_head(t: Tensor) -> Tensor:
    return torch.cat([t, t[..., -1:, :]], dim=-2)


def slot_past_pool(p: Parts) -> Parts:
    return replace(p, slots=with_value(0, p.pool.shape[0])(p.slots))


def slot_twice(p: Parts) -> Parts:
    return replace(p, slots=with_value(1, int(p.slots[0]))(p.slots), write_slots=None)


def same_write(p: Parts) -> Parts:
    return replace(p, write_slots=torch.zeros_like(p.slots))


def swapped_writes(p: Parts) -> Parts:
    """Row 0 writes what row 1 reads, and the other way round."""
    turn = list(range(p.slots.shape[0]))
    turn[:2] = 1, 0
    return replace(p, write_slots=p.slots[turn])


def own_out(change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    def apply(p: Parts) -> Parts:
        like = p.tokens["v"] if "v" in p.tokens else p.tokens["x"]
        return replace(p, out=change(torch.full_like(like, float("nan"))))

    return apply


def like_out(p: Parts) -> Tensor:
    return p.tokens["v"] if "v" in p.tokens else p.tokens["x"]


def expanded(t: Tensor) -> Tensor:
    """All rows at one address."""
    return t[:1].expand_as(t)


def out_over_input(p: Parts) -> Parts:
    return replace(p, out=like_out(p))


def out_over_pool(p: Parts) -> Parts:
    like = like_out(p)
    both = torch.zeros(p.pool.numel() + like.numel(), dtype=like.dtype, device=like.device)
    # The last element of the pool is the first of out.
    pool = both[: p.pool.numel()].view(p.pool.shape)
    start = p.pool.numel() - 1
    return replace(p, pool=pool, out=both[start : start + like.numel()].view(like.shape))


def kept_over_pool(p: Parts) -> Parts:
    """Intermediates that begin in the last slot of the pool."""
    assert p.intermediates is not None
    slots, kept = p.pool.shape[0], p.intermediates
    rows = slots + kept.shape[0] * kept.shape[1]
    both = torch.zeros(rows, *p.pool.shape[1:], dtype=p.pool.dtype, device=p.pool.device)
    inside = both[slots - 1 : slots - 1 + kept.shape[0] * kept.shape[1]]
    return replace(p, pool=both[:slots], intermediates=inside.view(kept.shape))


def given(name: str, like: Callable[[Parts], Tensor]) -> Callable[[Parts], Parts]:
    return lambda p: part(name, lambda _: like(p))(p)


def own_parents(change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    def apply(p: Parts) -> Parts:
        batch, draft = next(iter(p.tokens.values())).shape[:2]
        chain = torch.arange(-1, draft - 1, device=p.slots.device, dtype=torch.int32)
        return replace(p, parents=change(chain.repeat(batch, 1)))

    return apply


def with_plan(**changes: Any) -> Callable[[Any], Any]:
    """A good checkpoint plan with fields replaced; a function is given the good field."""

    def change(call: ExtendCall) -> ExtendCall:
        plan = checkpoint_plan(call.cu_seqlens, 2)
        new = {name: to(getattr(plan, name)) if callable(to) else to for name, to in changes.items()}
        return replace(call, checkpoints=replace(plan, **new))

    return change


def with_lengths(call: ExtendCall) -> ExtendCall:
    """Good lengths on the host."""
    return replace(call, seq_lens_host=tuple(call.cu_seqlens.diff().tolist()))


def plan_of_no_kind(call: ExtendCall) -> ExtendCall:
    """A good checkpoint plan's fields in another class."""
    plan: Any = checkpoint_plan(call.cu_seqlens, 2)
    return replace(call, checkpoints=SimpleNamespace(every=plan.every, starts=plan.starts, count=plan.count))  # type: ignore[arg-type]


def gates_of_no_kind(call: Any) -> Any:
    """Good raw gates' fields in another class."""
    given = call.gates
    return replace(call, gates=SimpleNamespace(a=given.a, b=given.b, A_log=given.A_log, dt_bias=given.dt_bias))


def without(name: str) -> Callable[[Any], Any]:
    """None where a tensor is required."""
    return lambda call: replace(call, **{name: None})


def with_gates(**changes: Any) -> Callable[[Any], Any]:
    return lambda call: replace(call, gates=replace(call.gates, **changes))


def with_log_gates(**changes: Any) -> Callable[[Any], Any]:
    """Good log gates with fields replaced; a function is given the good field."""

    def change(call: Any) -> Any:
        a = call.gates.a.to(torch.float32)
        gates = LogGates(g=-a.abs(), beta=torch.sigmoid(a))
        new = {name: to(getattr(gates, name)) if callable(to) else to for name, to in changes.items()}
        return replace(call, gates=replace(gates, **new))

    return change


def with_field(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda call: replace(call, **{name: value})


def emptied(name: str, dim: int) -> Callable[[Parts], Parts]:
    return token(name, lambda t: t.narrow(dim, 0, 0))


def host_lengths(change: Callable[[tuple[int, ...]], Any]) -> Callable[[Parts], Parts]:
    def apply(p: Parts) -> Parts:
        assert p.cu_seqlens is not None
        return replace(p, seq_lens_host=change(tuple(p.cu_seqlens.diff().tolist())))

    return apply


def flags(shape_change: int, dtype: torch.dtype) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, fresh=p.slots.new_zeros(p.slots.shape[0] + shape_change, dtype=dtype))


def own_parent(p: Parts) -> Parts:
    """Node 0 of row 0 as its own parent."""
    batch, draft = next(iter(p.tokens.values())).shape[:2]
    parents = torch.arange(-1, draft - 1, device=p.slots.device, dtype=torch.int32).repeat(batch, 1)
    parents[0, 0] = 0
    return replace(p, parents=parents)


def own_rows(values: Callable[[int], list[int]]) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, rows=p.slots.new_tensor(values(p.slots.shape[0])))


def untouched(p: Parts) -> Parts:
    return p


def fewer_rows(p: Parts) -> Parts:
    assert p.intermediates is not None
    return replace(p, intermediates=p.intermediates[:-1], rows=None)


def offsets_of(parts: Parts) -> Tensor:
    assert parts.cu_seqlens is not None
    return parts.cu_seqlens
