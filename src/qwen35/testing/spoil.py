"""Bad calls: a good call of either port with one thing wrong, and the error that must name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ContractError, DeviceError, DtypeError, LayoutError, ShapeError, ValueRangeError
from qwen35.testing.kit import Kit, Parts
from qwen35.testing.spoiling import (
    elsewhere,
    emptied,
    expanded,
    extra_head,
    fewer_rows,
    flags,
    gates_of_no_kind,
    given,
    host_lengths,
    kept_over_pool,
    longer,
    offsets_of,
    out_over_input,
    out_over_pool,
    own_out,
    own_parent,
    own_parents,
    own_rows,
    param,
    part,
    plan_of_no_kind,
    same_write,
    slot_past_pool,
    slot_twice,
    strided,
    swapped_writes,
    token,
    untouched,
    wider,
    with_field,
    with_gates,
    with_lengths,
    with_log_gates,
    with_plan,
    with_value,
    without,
)

TOKENS = frozenset({Phase.DECODE, Phase.EXTEND, Phase.VERIFY})
EVERY = frozenset(Phase)
WRITERS = frozenset({Phase.DECODE, Phase.EXTEND})
DRAFTS = frozenset({Phase.VERIFY, Phase.COMMIT})
GDN, CONV = "gated_delta_rule", "short_convolution"
BOTH = frozenset({GDN, CONV})


def _as_it_is(call: Any) -> Any:
    return call


@dataclass(frozen=True, slots=True)
class Spoil:
    """``apply`` makes the parts of a good call bad, or ``change`` the call itself; the error must be of type
    ``error`` and name ``argument`` ("pool" stands for states or windows). ``values``: wrong only in values or
    addresses, which are looked at on a CPU alone. ``like`` makes of a good call the good one that it resembles most."""

    name: str
    argument: str
    error: type[ContractError]
    apply: Callable[[Parts], Parts]
    phases: frozenset[Phase] = TOKENS
    ports: frozenset[str] = BOTH
    values: bool = False
    change: Callable[[Any], Any] = _as_it_is
    like: Callable[[Any], Any] = _as_it_is

    def call(self, kit: Kit, phase: Phase, parts: Parts) -> Any:
        """The bad call that ``parts`` make."""
        return self.change(kit.call(phase, self.apply(parts)))


_EXTEND, _VERIFY, _COMMIT = (frozenset({phase}) for phase in (Phase.EXTEND, Phase.VERIFY, Phase.COMMIT))
_GDN, _CONV = frozenset({GDN}), frozenset({CONV})
_GOOD_PLAN, _GOOD_LOG_GATES, _GOOD_SCALE = with_plan(), with_log_gates(), with_field("scale", 1.0)

SPOILS: tuple[Spoil, ...] = (
    # The pool
    Spoil("a pool of another rank", "pool", ShapeError, part("pool", lambda t: t[0]), EVERY),
    Spoil("a pool of another width", "pool", ShapeError, part("pool", wider), TOKENS),
    Spoil("a pool of integers", "pool", DtypeError, part("pool", lambda t: t.to(torch.int32)), EVERY),
    Spoil("a pool of strided slots", "pool", LayoutError, part("pool", strided), EVERY),
    # Slots
    Spoil("one slot too many", "slots", ShapeError, part("slots", longer), TOKENS),
    Spoil("slots in floating point", "slots", DtypeError, part("slots", lambda t: t.float()), EVERY),
    Spoil("slots elsewhere", "slots", DeviceError, part("slots", elsewhere), EVERY),
    Spoil("strided slots", "slots", LayoutError, part("slots", strided), EVERY),
    Spoil("a slot past the pool", "slots", ValueRangeError, slot_past_pool, EVERY, values=True),
    Spoil("a slot under -1", "slots", ValueRangeError, part("slots", with_value(0, -2)), EVERY, values=True),
    Spoil("a slot twice", "slots", ValueRangeError, slot_twice, WRITERS | _COMMIT, values=True),
    Spoil("a write slot twice", "write_slots", ValueRangeError, same_write, WRITERS, values=True),
    Spoil("a write slot too few", "write_slots", ShapeError, lambda p: replace(p, write_slots=p.slots[:-1]), WRITERS),
    # Tokens of the gated delta rule
    Spoil("k of another width", "k", ShapeError, token("k", wider), TOKENS, _GDN),
    Spoil("k of another length", "k", ShapeError, token("k", longer), TOKENS, _GDN),
    Spoil("q of another rank", "q", ShapeError, token("q", lambda t: t[..., 0]), TOKENS, _GDN),
    Spoil("k in another dtype", "k", DtypeError, token("k", lambda t: t.to(torch.float16)), TOKENS, _GDN),
    Spoil("q of integers", "q", DtypeError, token("q", lambda t: t.to(torch.int32)), TOKENS, _GDN),
    Spoil("v elsewhere", "v", DeviceError, token("v", elsewhere), TOKENS, _GDN),
    Spoil("v of more heads than the pool", "states", ShapeError, lambda p: replace(
        p, tokens={**p.tokens, "v": torch.cat([p.tokens["v"], p.tokens["v"]], dim=-2)}), TOKENS, _GDN),
    Spoil("v of a broken head ratio", "v", ShapeError, token("v", extra_head), TOKENS, _GDN),
    Spoil("q strided in its last dimension", "q", LayoutError, token("q", strided), TOKENS, _GDN),
    Spoil("out of another width", "out", ShapeError, own_out(wider), TOKENS),
    Spoil("out in another dtype", "out", DtypeError, own_out(lambda t: t.to(torch.float16)), TOKENS),
    # Gates
    Spoil("gate a of another shape", "gates.a", ShapeError, token("a", longer), TOKENS, _GDN),
    Spoil("gate b of integers", "gates.b", DtypeError, token("b", lambda t: t.to(torch.int32)), TOKENS, _GDN),
    Spoil("A_log of another length", "gates.A_log", ShapeError, param("A_log", longer), TOKENS, _GDN),
    Spoil("dt_bias elsewhere", "gates.dt_bias", DeviceError, param("dt_bias", elsewhere), TOKENS, _GDN),
    # Tokens of the convolution
    Spoil("x of another width", "weight", ShapeError, token("x", wider), TOKENS, _CONV),
    Spoil("x of another rank", "x", ShapeError, token("x", lambda t: t[..., 0]), TOKENS, _CONV),
    Spoil("x of integers", "x", DtypeError, token("x", lambda t: t.to(torch.int32)), TOKENS, _CONV),
    Spoil("x elsewhere", "x", DeviceError, token("x", elsewhere), TOKENS, _CONV),
    Spoil("x strided in its last dimension", "x", LayoutError, token("x", strided), TOKENS, _CONV),
    Spoil("a weight of another width", "windows", ShapeError, param("weight", wider), TOKENS, _CONV),
    Spoil("a weight elsewhere", "weight", DeviceError, param("weight", elsewhere), TOKENS, _CONV),
    Spoil("an unknown activation", "activation", ValueRangeError,
          lambda p: replace(p, params={**p.params, "activation": "gelu"}), TOKENS, _CONV),
    # Sequences
    Spoil("offsets that do not start at 0", "cu_seqlens", ValueRangeError, part("cu_seqlens", with_value(0, 1)),
          _EXTEND, values=True),
    Spoil("offsets that decrease", "cu_seqlens", ValueRangeError, part("cu_seqlens", with_value(1, 99)), _EXTEND,
          values=True),
    Spoil("offsets that do not end at T", "cu_seqlens", ValueRangeError,
          lambda p: replace(p, cu_seqlens=with_value(-1, 1 + next(iter(p.tokens.values())).shape[0])(offsets_of(p))),
          _EXTEND, values=True),
    Spoil("offsets without an entry", "cu_seqlens", ShapeError, part("cu_seqlens", lambda t: t[:0]), _EXTEND),
    Spoil("offsets in floating point", "cu_seqlens", DtypeError, part("cu_seqlens", lambda t: t.float()), _EXTEND),
    Spoil("host lengths of another sum", "seq_lens_host", ValueRangeError, host_lengths(lambda n: (n[0] + 1, *n[1:])),
          _EXTEND),
    Spoil("host lengths of another number", "seq_lens_host", ShapeError, host_lengths(lambda n: (*n, 0)), _EXTEND),
    Spoil("negative host lengths", "seq_lens_host", ValueRangeError,
          host_lengths(lambda n: (-1, n[0] + 1 + n[1], *n[2:])), _EXTEND),
    Spoil("host lengths of another split", "seq_lens_host", ValueRangeError,
          host_lengths(lambda n: (n[0] - 1, n[1] + 1, *n[2:])), _EXTEND, values=True),
    Spoil("one number for host lengths", "seq_lens_host", ContractError, host_lengths(sum), _EXTEND),
    Spoil("host lengths in a tensor", "seq_lens_host", ContractError, host_lengths(torch.tensor), _EXTEND),
    Spoil("host lengths on the device", "seq_lens_host", ContractError,
          given("seq_lens_host", lambda p: offsets_of(p).diff()), _EXTEND),
    *(Spoil(f"host lengths of {what}", "seq_lens_host", ContractError, host_lengths(wrong), _EXTEND, like=with_lengths)
      for what, wrong in (
          ("text", lambda n: tuple(map(str, n))), ("None", lambda n: (None,) * len(n)),
          ("floats", lambda n: tuple(map(float, n))), ("tensors", lambda n: [torch.tensor(length) for length in n]),
          ("bools", lambda n: (True, sum(n) - 1, *(0 for _ in n[2:]))),
      )),
    Spoil("fresh flags of another number", "fresh", ShapeError, flags(1, torch.bool), _EXTEND),
    Spoil("fresh flags of integers", "fresh", DtypeError, flags(0, torch.int32), _EXTEND),
    # Drafts
    Spoil("intermediates of too few rows", "intermediates", ShapeError, fewer_rows, DRAFTS),
    Spoil("intermediates of too few nodes", "intermediates", ShapeError,
          part("intermediates", lambda t: t[:, :-1]), _VERIFY),
    Spoil("intermediates of another width", "intermediates", ShapeError, part("intermediates", wider), DRAFTS),
    Spoil("intermediates of integers", "intermediates", DtypeError,
          part("intermediates", lambda t: t.to(torch.int32)), DRAFTS),
    Spoil("a row past the intermediates", "rows", ValueRangeError, own_rows(lambda b: [*range(b - 1), 99]), DRAFTS,
          values=True),
    Spoil("a row twice", "rows", ValueRangeError, own_rows(lambda b: [0] * b), _VERIFY, values=True),
    Spoil("a node that is its own parent", "parents", ValueRangeError, own_parent, _VERIFY, values=True),
    Spoil("an accepted node past the draft", "last", ValueRangeError, part("last", with_value(0, 99)), _COMMIT,
          values=True),
    Spoil("an accepted node under -1", "last", ValueRangeError, part("last", with_value(0, -2)), _COMMIT, values=True),
    Spoil("one accepted node too many", "last", ShapeError, part("last", longer), _COMMIT),
    Spoil("accepted nodes in floating point", "last", DtypeError, part("last", lambda t: t.float()), _COMMIT),
    Spoil("accepted nodes elsewhere", "last", DeviceError, part("last", elsewhere), _COMMIT),
    Spoil("intermediates elsewhere", "intermediates", DeviceError, part("intermediates", elsewhere), DRAFTS),
    Spoil("rows of another number", "rows", ShapeError, own_rows(lambda b: [*range(b), 0]), DRAFTS),
    Spoil("rows in floating point", "rows", DtypeError, given("rows", lambda p: p.slots.float()), DRAFTS),
    Spoil("rows elsewhere", "rows", DeviceError, given("rows", lambda p: p.slots.to("meta")), DRAFTS),
    Spoil("parents of another draft", "parents", ShapeError, own_parents(wider), _VERIFY),
    Spoil("parents in floating point", "parents", DtypeError, own_parents(lambda t: t.float()), _VERIFY),
    Spoil("parents elsewhere", "parents", DeviceError, own_parents(elsewhere), _VERIFY),
    Spoil("offsets elsewhere", "cu_seqlens", DeviceError, part("cu_seqlens", elsewhere), _EXTEND),
    Spoil("strided offsets", "cu_seqlens", LayoutError, part("cu_seqlens", strided), _EXTEND),
    Spoil("fresh flags elsewhere", "fresh", DeviceError,
          given("fresh", lambda p: torch.zeros_like(p.slots, dtype=torch.bool, device="meta")), _EXTEND),
    Spoil("write slots in floating point", "write_slots", DtypeError,
          given("write_slots", lambda p: p.slots.float()), WRITERS),
    Spoil("write slots elsewhere", "write_slots", DeviceError,
          given("write_slots", lambda p: p.slots.to("meta")), WRITERS),
    Spoil("a write slot that another row reads", "write_slots", ValueRangeError, swapped_writes, WRITERS, values=True),
    Spoil("checkpoints after no token", "checkpoints.every", ValueRangeError, untouched, _EXTEND, _GDN,
          change=with_plan(every=0), like=_GOOD_PLAN),
    Spoil("checkpoints after 2.0 tokens", "checkpoints.every", ValueRangeError, untouched, _EXTEND, _GDN,
          change=with_plan(every=2.0), like=_GOOD_PLAN),
    Spoil("checkpoints after True tokens", "checkpoints.every", ValueRangeError, untouched, _EXTEND, _GDN,
          change=with_plan(every=True), like=_GOOD_PLAN),
    Spoil("checkpoint starts in int32", "checkpoints.starts", DtypeError, untouched, _EXTEND, _GDN,
          change=with_plan(starts=lambda t: t.to(torch.int32)), like=_GOOD_PLAN),
    Spoil("one checkpoint start too many", "checkpoints.starts", ShapeError, untouched, _EXTEND, _GDN,
          change=with_plan(starts=longer), like=_GOOD_PLAN),
    Spoil("checkpoint starts elsewhere", "checkpoints.starts", DeviceError, untouched, _EXTEND, _GDN,
          change=with_plan(starts=elsewhere), like=_GOOD_PLAN),
    Spoil("checkpoint starts that do not fit", "checkpoints.starts", ValueRangeError, untouched, _EXTEND, _GDN,
          values=True, change=with_plan(starts=with_value(-1, 99)), like=_GOOD_PLAN),
    Spoil("a negative checkpoint count", "checkpoints.count", ValueRangeError, untouched, _EXTEND, _GDN,
          change=with_plan(count=-1), like=_GOOD_PLAN),
    Spoil("a checkpoint too many", "count", ValueRangeError, untouched, _EXTEND, _GDN, values=True,
          change=with_plan(count=lambda n: n + 1), like=_GOOD_PLAN),
    # Outputs
    Spoil("out elsewhere", "out", DeviceError, own_out(elsewhere), TOKENS),
    Spoil("out strided in its last dimension", "out", LayoutError, own_out(strided), TOKENS),
    Spoil("out whose rows share an address", "out", LayoutError, own_out(expanded), TOKENS),
    Spoil("out over an input", "out", LayoutError, out_over_input, TOKENS, values=True),
    Spoil("out over the pool", "out", LayoutError, out_over_pool, TOKENS, values=True),
    Spoil("intermediates over the pool", "intermediates", LayoutError, kept_over_pool, DRAFTS, values=True),
    Spoil("intermediates whose rows share an address", "intermediates", LayoutError,
          part("intermediates", expanded), DRAFTS),
    # What is no tensor, and what is none at all
    *(Spoil(f"{name} is None", name, ContractError, untouched, TOKENS, _GDN, change=without(name))
      for name in ("q", "k", "v", "states", "gates")),
    *(Spoil(f"gate {name} is None", f"gates.{name}", ContractError, untouched, TOKENS, _GDN,
            change=with_gates(**{name: None})) for name in ("a", "b", "A_log", "dt_bias")),
    *(Spoil(f"gate {name} is None", f"gates.{name}", ContractError, untouched, TOKENS, _GDN,
            change=with_log_gates(**{name: None}), like=_GOOD_LOG_GATES) for name in ("g", "beta")),
    *(Spoil(f"{name} is None", name, ContractError, untouched, TOKENS, _CONV, change=without(name))
      for name in ("x", "weight", "windows")),
    Spoil("slots are None", "slots", ContractError, untouched, EVERY, change=without("slots")),
    Spoil("slots in a list", "slots", ContractError, untouched, EVERY, values=True, change=with_field("slots", [1, 0])),
    Spoil("cu_seqlens is None", "cu_seqlens", ContractError, untouched, _EXTEND, change=without("cu_seqlens")),
    Spoil("intermediates are None", "intermediates", ContractError, untouched, DRAFTS, change=without("intermediates")),
    Spoil("last is None", "last", ContractError, untouched, _COMMIT, change=without("last")),
    # What has the fields and is of no kind
    Spoil("gates of no kind", "gates", ContractError, untouched, TOKENS, _GDN, change=gates_of_no_kind),
    Spoil("a checkpoint plan of no kind", "checkpoints", ContractError, untouched, _EXTEND, _GDN,
          change=plan_of_no_kind, like=_GOOD_PLAN),
    # Numbers
    *(Spoil(f"scale {value!r}", "scale", ValueRangeError, untouched, TOKENS, _GDN, change=with_field("scale", value),
            like=_GOOD_SCALE) for value in (float("nan"), float("inf"), "1", True, torch.tensor(1.0))),
    Spoil("log gates of another shape", "gates.g", ShapeError, untouched, TOKENS, _GDN,
          change=with_log_gates(g=longer), like=_GOOD_LOG_GATES),
    Spoil("beta in half precision", "gates.beta", DtypeError, untouched, TOKENS, _GDN,
          change=with_log_gates(beta=lambda t: t.to(torch.float16)), like=_GOOD_LOG_GATES),
    Spoil("q of no head", "H >= 1", ShapeError, emptied("q", -2), TOKENS, _GDN),
    Spoil("q of no width", "K >= 1", ShapeError, emptied("q", -1), TOKENS, _GDN),
    Spoil("v of no head", "HV >= 1", ShapeError, emptied("v", -2), TOKENS, _GDN),
    Spoil("v of no width", "V >= 1", ShapeError, emptied("v", -1), TOKENS, _GDN),
    Spoil("a weight of width 1", "W >= 2", ShapeError, param("weight", lambda t: t[:, :1]), TOKENS, _CONV),
    Spoil("a pool of width 1", "W >= 2", ShapeError, part("pool", lambda t: t[..., :0]), EVERY, _CONV),
    Spoil("a pool of no head", "HV >= 1", ShapeError, part("pool", lambda t: t[:, :0]), EVERY, _GDN),
    Spoil("bias of another length", "bias", ShapeError, param("bias", longer), TOKENS, _CONV),
    Spoil("bias elsewhere", "bias", DeviceError, param("bias", elsewhere), TOKENS, _CONV),
    Spoil("bias of integers", "bias", DtypeError, param("bias", lambda t: t.to(torch.int32)), TOKENS, _CONV),
    Spoil("weight of integers", "weight", DtypeError, param("weight", lambda t: t.to(torch.int32)), TOKENS, _CONV),
)  # fmt: skip


def spoils_of(port: str, phase: Phase, *, values: bool = True) -> tuple[Spoil, ...]:
    """The bad calls of one phase; without ``values`` only those that shapes, dtypes and devices show."""
    return tuple(
        spoil for spoil in SPOILS
        if port in spoil.ports and phase in spoil.phases and (values or not spoil.values)
    )  # fmt: skip
