"""Checks of the GDN calls. Every implementation of the port calls these before it writes anything.

What the host knows is checked always: shapes, dtypes, devices, strides, ``seq_lens_host``, and the values of
index tensors that live on the CPU. Values on a device are read only with ``values=True`` (checked mode, which
synchronises). Whether tensors share memory is looked at on the CPU and with ``values=True``: addresses are no
part of a layout, by which later calls are admitted unseen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.domain.errors import ContractError, DtypeError, ShapeError, ValueRangeError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports import _checks as check
from qwen35.ports._aliasing import Named, apart, no_overlap
from qwen35.ports.gdn_calls import (
    CheckpointPlan,
    CommitCall,
    DecodeCall,
    ExtendCall,
    Gates,
    LogGates,
    RawGates,
    VerifyCall,
)

TokenCall = DecodeCall | ExtendCall | VerifyCall


def call_geometry(call: TokenCall) -> GdnGeometry:
    """The geometry that the shapes of a call imply. Raises ``ConfigurationError`` for a bad head ratio."""
    return GdnGeometry(
        key_heads=call.q.shape[-2], value_heads=call.v.shape[-2],
        key_width=call.q.shape[-1], value_width=call.v.shape[-1],
    )  # fmt: skip


def check_decode(call: DecodeCall, values: bool = False) -> None:
    """Raise a ``ContractError`` where ``call`` does not meet the contract."""
    check.kind("decode", call, DecodeCall)
    batch = _tokens(call, 1, "[B, {}]")[0]
    _slots(call.slots, call.write_slots, batch, call.states, values)
    if values or call.states.is_cpu:
        index = (("slots", call.slots), ("write_slots", call.write_slots))
        apart((("out", call.out), ("states", call.states)), (*_inputs(call), *index))


def check_extend(call: ExtendCall, values: bool = False) -> None:
    """Raise a ``ContractError`` where ``call`` does not meet the contract."""
    check.kind("extend", call, ExtendCall)
    (tokens,) = _tokens(call, 1, "[T, {}]")
    check.rank("cu_seqlens", call.cu_seqlens, 1, "[S+1]")
    sequences = call.cu_seqlens.shape[0] - 1
    if sequences < 0:
        raise ShapeError("cu_seqlens must be [S+1] with at least one entry, got none")
    on = call.states.device
    check.vector("cu_seqlens", call.cu_seqlens, sequences + 1, on, check.INDEX_DTYPES, "[S+1]")
    if call.seq_lens_host is not None:
        check.host_lengths(call.seq_lens_host, sequences, tokens)
    if call.fresh is not None:
        check.vector("fresh", call.fresh, sequences, on, (torch.bool,), "[S]")
    if values or check.host_values(call.cu_seqlens):
        check.offsets(call.cu_seqlens, tokens, call.seq_lens_host)
    _checkpoints(call, sequences, values)
    _slots(call.slots, call.write_slots, sequences, call.states, values)
    if values or call.states.is_cpu:
        index: list[Named] = [("slots", call.slots), ("write_slots", call.write_slots), ("fresh", call.fresh)]
        index.append(("cu_seqlens", call.cu_seqlens))
        apart((("out", call.out), ("states", call.states)), (*_inputs(call), *index))


def check_verify(call: VerifyCall, values: bool = False) -> None:
    """Raise a ``ContractError`` where ``call`` does not meet the contract."""
    check.kind("verify", call, VerifyCall)
    batch, draft = _tokens(call, 2, "[B, T, {}]")
    _intermediates(call.intermediates, call.states)
    if call.intermediates.shape[1] < draft:
        raise ShapeError(f"intermediates must hold T >= {draft} nodes, got {call.intermediates.shape[1]}")
    check.vector("slots", call.slots, batch, call.states.device, check.INDEX_DTYPES, "[B]")
    if call.parents is not None:
        check.shape("parents", call.parents, (batch, draft), "[B, T]")
    read = values or check.host_values(call.slots, call.rows, call.parents)
    if read:
        check.in_range("slots", call.slots, -1, call.states.shape[0], "-1 or a slot")
    check.rows_and_parents(call.rows, call.parents, call.slots, call.intermediates.shape[0], read)
    if values or call.states.is_cpu:
        index = (("slots", call.slots), ("rows", call.rows), ("parents", call.parents))
        written = (("out", call.out), ("intermediates", call.intermediates))
        apart(written, (("states", call.states), *_inputs(call), *index))


def check_commit(call: CommitCall, values: bool = False) -> None:
    """Raise a ``ContractError`` where ``call`` does not meet the contract."""
    check.kind("commit", call, CommitCall)
    _states(call.states)
    _intermediates(call.intermediates, call.states)
    check.rank("slots", call.slots, 1, "[B]")
    batch = call.slots.shape[0]
    check.vector("last", call.last, batch, call.states.device, check.INDEX_DTYPES, "[B]")
    check.vector("slots", call.slots, batch, call.states.device, check.INDEX_DTYPES, "[B]")
    rows, nodes = call.intermediates.shape[:2]
    check.rows_and_parents(call.rows, None, call.slots, rows, values=False)
    if values or check.host_values(call.slots, call.rows, call.last):
        check.commit_values(call.slots, call.last, call.rows, call.states.shape[0], rows, nodes)
        index = (("slots", call.slots), ("last", call.last), ("rows", call.rows))
        apart((("states", call.states),), (("intermediates", call.intermediates), *index))


def _states(states: Tensor) -> None:
    check.rank("states", states, 4, "[N, HV, V, K]")
    check.dtype("states", states, check.STATE_DTYPES)
    check.sizes("states", states, list(zip(("HV", "V", "K"), states.shape[1:], (1, 1, 1), strict=True)))
    check.dense_tail("states", states, 3)


def _intermediates(intermediates: Tensor, states: Tensor) -> None:
    check.rank("intermediates", intermediates, 5, "[R, T, HV, V, K]")
    if intermediates.shape[2:] != states.shape[1:]:
        raise ShapeError(
            f"intermediates must end in the states' [HV, V, K] = {list(states.shape[1:])}, "
            f"got {list(intermediates.shape)}"
        )
    check.dtype("intermediates", intermediates, check.STATE_DTYPES)
    check.device("intermediates", intermediates, states.device)
    check.dense_tail("intermediates", intermediates, 3)


def _tokens(call: TokenCall, lead: int, why: str) -> tuple[int, ...]:
    """Check q, k, v, gates, states and out; return the leading sizes ([B], [T] or [B, T])."""
    _states(call.states)
    q, k, v, states = call.q, call.k, call.v, call.states
    check.rank("q", q, lead + 2, why.format("H, K"))
    leading = tuple(q.shape[:lead])
    heads, width = q.shape[-2:]
    check.sizes("q", q, (("H", heads, 1), ("K", width, 1)))
    check.rank("v", v, lead + 2, why.format("HV, V"))
    value_heads, value_width = v.shape[-2:]
    check.sizes("v", v, (("HV", value_heads, 1), ("V", value_width, 1)))
    check.shape("k", k, (*leading, heads, width), why.format("H, K"))
    check.shape("v", v, (*leading, value_heads, value_width), why.format("HV, V"))
    if value_heads % heads:
        raise ShapeError(f"v must have a multiple of q's H = {heads} heads, got HV = {value_heads}")
    check.shape("states", states, (states.shape[0], value_heads, value_width, width), "[N, HV, V, K]")
    check.dtype("q", q, check.TOKEN_DTYPES)
    named: list[tuple[str, Tensor]] = [("q", q), ("k", k), ("v", v)]
    if call.out is not None:
        check.shape("out", call.out, (*leading, value_heads, value_width), why.format("HV, V"))
        named.append(("out", call.out))
    for name, tensor in named:
        if tensor.dtype != q.dtype:
            raise DtypeError(f"{name} must be {q.dtype} like q, got {tensor.dtype}")
        check.device(name, tensor, states.device)
        check.last_contiguous(name, tensor)
    if call.out is not None:
        no_overlap("out", call.out)
    check.finite("scale", call.scale)
    _gates(call.gates, (*leading, value_heads), why.format("HV"), states.device)
    return leading


def _gates(gates: Gates, expected: tuple[int, ...], why: str, on: torch.device) -> None:
    if isinstance(gates, LogGates):
        named = (("gates.g", gates.g), ("gates.beta", gates.beta))
        allowed: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    elif not isinstance(gates, RawGates):
        raise ContractError(f"gates must be RawGates or LogGates, got {type(gates).__name__}")
    else:
        named = (("gates.a", gates.a), ("gates.b", gates.b))
        allowed = check.TOKEN_DTYPES
        for name, parameter in (("gates.A_log", gates.A_log), ("gates.dt_bias", gates.dt_bias)):
            check.vector(name, parameter, expected[-1], on, check.TOKEN_DTYPES, "[HV]")
    for name, tensor in named:
        check.shape(name, tensor, expected, why)
        check.dtype(name, tensor, allowed)
        check.device(name, tensor, on)
        check.last_contiguous(name, tensor)


def _inputs(call: TokenCall) -> tuple[Named, ...]:
    """What every call of tokens only reads."""
    gates = call.gates
    tokens = (("q", call.q), ("k", call.k), ("v", call.v))
    if isinstance(gates, LogGates):
        return (*tokens, ("gates.g", gates.g), ("gates.beta", gates.beta))
    parameters = (("gates.A_log", gates.A_log), ("gates.dt_bias", gates.dt_bias))
    return (*tokens, ("gates.a", gates.a), ("gates.b", gates.b), *parameters)


def _slots(slots: Tensor, write_slots: Tensor | None, size: int, states: Tensor, values: bool) -> None:
    check.vector("slots", slots, size, states.device, check.INDEX_DTYPES, "one a sequence")
    if write_slots is not None:
        check.vector("write_slots", write_slots, size, states.device, check.INDEX_DTYPES, "one a sequence")
    if values or check.host_values(slots, write_slots):
        check.slot_values(slots, write_slots, states.shape[0])


def _checkpoints(call: ExtendCall, sequences: int, values: bool) -> None:
    plan = call.checkpoints
    if plan is None:
        return
    if not isinstance(plan, CheckpointPlan):
        raise ContractError(f"checkpoints must be a CheckpointPlan, got {type(plan).__name__}")
    check.integer("checkpoints.every", plan.every, 1)
    check.integer("checkpoints.count", plan.count, 0)
    check.vector("checkpoints.starts", plan.starts, sequences + 1, call.states.device, (torch.int64,), "[S+1]")
    if not (values or check.host_values(plan.starts)):
        return
    lengths = call.cu_seqlens.diff().to(torch.int64)
    expected = torch.zeros_like(plan.starts)
    expected[1:] = (lengths // plan.every).cumsum(0)
    if not torch.equal(expected, plan.starts) or int(expected[-1]) != plan.count:
        raise ValueRangeError(
            f"checkpoints.starts must be the running sum of length // {plan.every} = {expected.tolist()} with count "
            f"{int(expected[-1])}, got {plan.starts.tolist()} with count {plan.count}"
        )
