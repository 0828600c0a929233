"""Bad calls: a good call of either port with one thing wrong, and the error that must name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ContractError, DeviceError, DtypeError, LayoutError, ShapeError, ValueRangeError
from qwen35.testing.kit import Parts

TOKENS = frozenset({Phase.DECODE, Phase.EXTEND, Phase.VERIFY})
EVERY = frozenset(Phase)
WRITERS = frozenset({Phase.DECODE, Phase.EXTEND})
DRAFTS = frozenset({Phase.VERIFY, Phase.COMMIT})
GDN, CONV = "gated_delta_rule", "short_convolution"
BOTH = frozenset({GDN, CONV})


@dataclass(frozen=True, slots=True)
class Spoil:
    """``apply`` makes a good call bad; the error must be of type ``error`` and name ``argument`` ("pool" stands
    for states or windows). ``values``: wrong only in values, which hosts know on a CPU alone."""

    name: str
    argument: str
    error: type[ContractError]
    apply: Callable[[Parts], Parts]
    phases: frozenset[Phase] = TOKENS
    ports: frozenset[str] = BOTH
    values: bool = False


def _token(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, tokens={**p.tokens, name: change(p.tokens[name])})


def _param(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, params={**p.params, name: change(p.params[name])})


def _part(name: str, change: Callable[[Any], Any]) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, **{name: change(getattr(p, name))})


def _longer(t: Tensor) -> Tensor:
    return torch.cat([t, t[-1:]])


def _wider(t: Tensor) -> Tensor:
    return torch.cat([t, t[..., -1:]], dim=-1)


def _strided(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def _meta(t: Tensor) -> Tensor:
    return t.to("meta")


def _set(index: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[index] = value
        return t

    return change


def _extra_head(t: Tensor) -> Tensor:
    return torch.cat([t, t[..., -1:, :]], dim=-2)


def _past(p: Parts) -> Parts:
    return replace(p, slots=_set(0, p.pool.shape[0])(p.slots))


def _twice(p: Parts) -> Parts:
    return replace(p, slots=_set(1, int(p.slots[0]))(p.slots), write_slots=None)


def _same_write(p: Parts) -> Parts:
    return replace(p, write_slots=torch.zeros_like(p.slots))


def _out(change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    def apply(p: Parts) -> Parts:
        like = p.tokens["v"] if "v" in p.tokens else p.tokens["x"]
        return replace(p, out=change(torch.full_like(like, float("nan"))))

    return apply


def _host(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Parts], Parts]:
    def apply(p: Parts) -> Parts:
        assert p.cu_seqlens is not None
        return replace(p, seq_lens_host=change(tuple(p.cu_seqlens.diff().tolist())))

    return apply


def _flags(shape_change: int, dtype: torch.dtype) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, fresh=p.slots.new_zeros(p.slots.shape[0] + shape_change, dtype=dtype))


def _orphan(p: Parts) -> Parts:
    """Node 0 of row 0 as its own parent."""
    batch, draft = next(iter(p.tokens.values())).shape[:2]
    parents = torch.arange(-1, draft - 1, device=p.slots.device, dtype=torch.int32).repeat(batch, 1)
    parents[0, 0] = 0
    return replace(p, parents=parents)


def _rows(values: Callable[[int], list[int]]) -> Callable[[Parts], Parts]:
    return lambda p: replace(p, rows=p.slots.new_tensor(values(p.slots.shape[0])))


def _fewer_rows(p: Parts) -> Parts:
    assert p.intermediates is not None
    return replace(p, intermediates=p.intermediates[:-1], rows=None)


_EXTEND, _VERIFY, _COMMIT = (frozenset({phase}) for phase in (Phase.EXTEND, Phase.VERIFY, Phase.COMMIT))
_GDN, _CONV = frozenset({GDN}), frozenset({CONV})

SPOILS: tuple[Spoil, ...] = (
    # The pool
    Spoil("a pool of another rank", "pool", ShapeError, _part("pool", lambda t: t[0]), EVERY),
    Spoil("a pool of another width", "pool", ShapeError, _part("pool", _wider), TOKENS),
    Spoil("a pool of integers", "pool", DtypeError, _part("pool", lambda t: t.to(torch.int32)), EVERY),
    Spoil("a pool of strided slots", "pool", LayoutError, _part("pool", _strided), EVERY),
    # Slots
    Spoil("one slot too many", "slots", ShapeError, _part("slots", _longer), TOKENS),
    Spoil("slots in floating point", "slots", DtypeError, _part("slots", lambda t: t.float()), EVERY),
    Spoil("slots elsewhere", "slots", DeviceError, _part("slots", _meta), EVERY),
    Spoil("strided slots", "slots", LayoutError, _part("slots", _strided), EVERY),
    Spoil("a slot past the pool", "slots", ValueRangeError, _past, EVERY, values=True),
    Spoil("a slot under -1", "slots", ValueRangeError, _part("slots", _set(0, -2)), EVERY, values=True),
    Spoil("a slot twice", "slots", ValueRangeError, _twice, WRITERS | _COMMIT, values=True),
    Spoil("a write slot twice", "write_slots", ValueRangeError, _same_write, WRITERS, values=True),
    Spoil("a write slot too few", "write_slots", ShapeError, lambda p: replace(p, write_slots=p.slots[:-1]), WRITERS),
    # Tokens of the gated delta rule
    Spoil("k of another width", "k", ShapeError, _token("k", _wider), TOKENS, _GDN),
    Spoil("k of another length", "k", ShapeError, _token("k", _longer), TOKENS, _GDN),
    Spoil("q of another rank", "q", ShapeError, _token("q", lambda t: t[..., 0]), TOKENS, _GDN),
    Spoil("k in another dtype", "k", DtypeError, _token("k", lambda t: t.to(torch.float16)), TOKENS, _GDN),
    Spoil("q of integers", "q", DtypeError, _token("q", lambda t: t.to(torch.int32)), TOKENS, _GDN),
    Spoil("v elsewhere", "v", DeviceError, _token("v", _meta), TOKENS, _GDN),
    Spoil("v of more heads than the pool", "states", ShapeError, lambda p: replace(
        p, tokens={**p.tokens, "v": torch.cat([p.tokens["v"], p.tokens["v"]], dim=-2)}), TOKENS, _GDN),
    Spoil("v of a broken head ratio", "v", ShapeError, _token("v", _extra_head), TOKENS, _GDN),
    Spoil("q strided in its last dimension", "q", LayoutError, _token("q", _strided), TOKENS, _GDN),
    Spoil("out of another width", "out", ShapeError, _out(_wider), TOKENS),
    Spoil("out in another dtype", "out", DtypeError, _out(lambda t: t.to(torch.float16)), TOKENS),
    # Gates
    Spoil("gate a of another shape", "gates.a", ShapeError, _token("a", _longer), TOKENS, _GDN),
    Spoil("gate b of integers", "gates.b", DtypeError, _token("b", lambda t: t.to(torch.int32)), TOKENS, _GDN),
    Spoil("A_log of another length", "gates.A_log", ShapeError, _param("A_log", _longer), TOKENS, _GDN),
    Spoil("dt_bias elsewhere", "gates.dt_bias", DeviceError, _param("dt_bias", _meta), TOKENS, _GDN),
    # Tokens of the convolution
    Spoil("x of another width", "weight", ShapeError, _token("x", _wider), TOKENS, _CONV),
    Spoil("x of another rank", "x", ShapeError, _token("x", lambda t: t[..., 0]), TOKENS, _CONV),
    Spoil("x of integers", "x", DtypeError, _token("x", lambda t: t.to(torch.int32)), TOKENS, _CONV),
    Spoil("x elsewhere", "x", DeviceError, _token("x", _meta), TOKENS, _CONV),
    Spoil("x strided in its last dimension", "x", LayoutError, _token("x", _strided), TOKENS, _CONV),
    Spoil("a weight of another width", "windows", ShapeError, _param("weight", _wider), TOKENS, _CONV),
    Spoil("a weight elsewhere", "weight", DeviceError, _param("weight", _meta), TOKENS, _CONV),
    Spoil("an unknown activation", "activation", ValueRangeError,
          lambda p: replace(p, params={**p.params, "activation": "gelu"}), TOKENS, _CONV),
    # Sequences
    Spoil("offsets that do not start at 0", "cu_seqlens", ValueRangeError, _part("cu_seqlens", _set(0, 1)), _EXTEND,
          values=True),
    Spoil("offsets that decrease", "cu_seqlens", ValueRangeError, _part("cu_seqlens", _set(1, 99)), _EXTEND,
          values=True),
    Spoil("offsets that do not end at T", "cu_seqlens", ValueRangeError,
          lambda p: replace(p, cu_seqlens=_set(-1, 1 + next(iter(p.tokens.values())).shape[0])(_cu(p))), _EXTEND,
          values=True),
    Spoil("offsets without an entry", "cu_seqlens", ShapeError, _part("cu_seqlens", lambda t: t[:0]), _EXTEND),
    Spoil("offsets in floating point", "cu_seqlens", DtypeError, _part("cu_seqlens", lambda t: t.float()), _EXTEND),
    Spoil("host lengths of another sum", "seq_lens_host", ValueRangeError, _host(lambda n: (n[0] + 1, *n[1:])),
          _EXTEND),
    Spoil("host lengths of another number", "seq_lens_host", ShapeError, _host(lambda n: (*n, 0)), _EXTEND),
    Spoil("negative host lengths", "seq_lens_host", ValueRangeError, _host(lambda n: (-1, n[0] + 1 + n[1], *n[2:])),
          _EXTEND),
    Spoil("host lengths of another split", "seq_lens_host", ValueRangeError,
          _host(lambda n: (n[0] - 1, n[1] + 1, *n[2:])), _EXTEND, values=True),
    Spoil("fresh flags of another number", "fresh", ShapeError, _flags(1, torch.bool), _EXTEND),
    Spoil("fresh flags of integers", "fresh", DtypeError, _flags(0, torch.int32), _EXTEND),
    # Drafts
    Spoil("intermediates of too few rows", "intermediates", ShapeError, _fewer_rows, DRAFTS),
    Spoil("intermediates of too few nodes", "intermediates", ShapeError,
          _part("intermediates", lambda t: t[:, :-1]), _VERIFY),
    Spoil("intermediates of another width", "intermediates", ShapeError, _part("intermediates", _wider), DRAFTS),
    Spoil("intermediates of integers", "intermediates", DtypeError,
          _part("intermediates", lambda t: t.to(torch.int32)), DRAFTS),
    Spoil("a row past the intermediates", "rows", ValueRangeError, _rows(lambda b: [*range(b - 1), 99]), DRAFTS,
          values=True),
    Spoil("a row twice", "rows", ValueRangeError, _rows(lambda b: [0] * b), DRAFTS, values=True),
    Spoil("a node that is its own parent", "parents", ValueRangeError, _orphan, _VERIFY, values=True),
    Spoil("an accepted node past the draft", "last", ValueRangeError, _part("last", _set(0, 99)), _COMMIT,
          values=True),
    Spoil("an accepted node under -1", "last", ValueRangeError, _part("last", _set(0, -2)), _COMMIT, values=True),
    Spoil("one accepted node too many", "last", ShapeError, _part("last", _longer), _COMMIT),
)  # fmt: skip


def _cu(parts: Parts) -> Tensor:
    assert parts.cu_seqlens is not None
    return parts.cu_seqlens


def spoils_of(port: str, phase: Phase, *, values: bool = True) -> tuple[Spoil, ...]:
    """The bad calls of one phase; without ``values`` only those that shapes, dtypes and devices show."""
    return tuple(
        spoil for spoil in SPOILS
        if port in spoil.ports and phase in spoil.phases and (values or not spoil.values)
    )  # fmt: skip
