"""From a case to tensors: seeded values, in the layouts that the case asks for, with every buffer at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from qwen35.domain.capabilities import Phase
from qwen35.testing.case import Case, Strides
from qwen35.testing.kit import Kit, Parts
from qwen35.testing.tensors import PAGE_GAP, Slab, generator, normal, slab, slabs_apart

#: Extra columns of a packed projection that belong to nobody (the z of q, k, v, z).
PACK_GAP = 8


@dataclass(frozen=True, slots=True)
class Made:
    """The parts of a call and the buffers behind them; ``inputs`` are those that are only read."""

    parts: Parts
    pool: Slab
    inputs: Mapping[str, Tensor]
    out: Slab | None = None
    intermediates: Slab | None = None


def make_parts(kit: Kit, case: Case[Any], device: torch.device) -> Made:
    """Every tensor of ``case`` on ``device``."""
    source = generator(case.seed, device)
    inputs: dict[str, Tensor] = {}
    pool = _states((case.pool, *case.sizes.slot_shape), 1, case, source)
    tokens: dict[str, Tensor] = {}
    params: dict[str, Any] = {}
    out = intermediates = None
    if case.phase is not Phase.COMMIT:
        dense = kit.tokens(case.sizes, case.leading, source)
        if case.strides is Strides.DENSE:
            tokens = _packed(kit, dense, case, inputs)
        else:
            tokens, out = _apart(kit, dense, case, inputs)
        for name, value in kit.params(case.sizes, source).items():
            params[name] = _param(name, value, case, inputs) if isinstance(value, Tensor) else value
        if case.own_out and out is None:
            gap = PACK_GAP if case.packed else 0
            shape = (*case.leading, *kit.out_shape(case.sizes))
            out = slab(shape, case.sizes.token_dtype, device, lead=len(case.leading), gap=gap)
    if case.phase in (Phase.VERIFY, Phase.COMMIT):
        shape = (case.capacity, case.nodes, *case.sizes.slot_shape)
        commit = case.phase is Phase.COMMIT
        intermediates = _states(shape, 2, case, source) if commit else _nodes(shape, case, device)
    parts = Parts(
        pool=pool.view,
        tokens=tokens,
        params=params,
        out=None if out is None else out.view,
        intermediates=None if intermediates is None else intermediates.view,
        every=case.every,
        seq_lens_host=case.lengths if case.phase is Phase.EXTEND and case.host_lengths else None,
        **_indices(case, device, inputs),
    )
    return Made(parts, pool, inputs, out, intermediates)


def _indices(case: Case[Any], device: torch.device, inputs: dict[str, Tensor]) -> dict[str, Any]:
    dtype = torch.int64 if case.long else torch.int32

    def index(name: str, values: Sequence[Any] | None, kind: torch.dtype = dtype) -> Tensor | None:
        if values is None:
            return None
        return _input(name, torch.tensor(values, dtype=kind, device=device), case.shift, inputs)

    slots = torch.tensor(case.slots, dtype=dtype, device=device)
    made: dict[str, Any] = {
        "slots": _input("slots", slots, case.shift, inputs),
        "write_slots": index("write_slots", case.write_slots),
        "rows": index("rows", case.rows),
    }
    if case.phase is Phase.EXTEND:
        made["cu_seqlens"] = index("cu_seqlens", case.offsets)
        made["fresh"] = index("fresh", case.fresh, torch.bool)
    if case.parents is not None:
        parents = torch.tensor(case.parents, dtype=torch.int32, device=device).reshape(len(case.slots), case.draft)
        if case.strides is Strides.ALL:
            # What is nobody's names the last node, which is not there yet when a node asks for its parent.
            base = parents.new_full((len(case.slots), case.draft + PACK_GAP), case.draft - 1)
            base[:, : case.draft] = parents
            made["parents"], inputs["parents"] = base[:, : case.draft], base
        else:
            made["parents"] = inputs["parents"] = parents
    if case.phase is Phase.COMMIT:
        made["last"] = index("last", case.last)
    return made


def _nodes(shape: tuple[int, ...], case: Case[Any], device: torch.device) -> Slab:
    """Intermediates of verify: NaN; rows and nodes with strides of their own where the case says so."""
    if case.strides is not Strides.ALL:
        return slab(shape, case.sizes.state_dtype, device, lead=1)
    (made,) = slabs_apart({"": shape}, {"": case.sizes.state_dtype}, device, lead=2, heads=False, rows=True).values()
    return made


def _states(shape: tuple[int, ...], lead: int, case: Case[Any], source: torch.Generator) -> Slab:
    made = slab(shape, case.sizes.state_dtype, source.device, lead=lead, gap=PAGE_GAP if case.paged else 0)
    made.view.copy_(normal(shape, source))
    return made


def _input(name: str, values: Tensor, shift: int, inputs: dict[str, Tensor]) -> Tensor:
    """A dense copy that starts ``shift`` elements into its buffer."""
    base = torch.zeros(shift + values.numel(), dtype=values.dtype, device=values.device)
    base[shift:] = values.flatten()
    inputs[name] = base
    return base[shift:].view(values.shape)


def _param(name: str, values: Tensor, case: Case[Any], inputs: dict[str, Tensor]) -> Tensor:
    """What holds for all tokens: dense, but for the rows of a matrix where the case gives each tensor its strides."""
    if case.strides is Strides.DENSE or values.dim() < 2:
        return _input(name, values, case.shift, inputs)
    (made,) = slabs_apart({"": values.shape}, {"": values.dtype}, values.device, lead=1).values()
    made.view.copy_(values)
    inputs[name] = made.base
    return made.view


def _apart(
    kit: Kit, dense: dict[str, Tensor], case: Case[Any], inputs: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Slab | None]:
    """Token tensors and the output, each with strides of its own; which are the longer ones follows from the seed."""
    shapes = {name: tuple(t.shape) for name, t in dense.items()}
    dtypes = {name: t.dtype for name, t in dense.items()}
    if case.own_out:
        shapes["out"] = (*case.leading, *kit.out_shape(case.sizes))
        dtypes["out"] = case.sizes.token_dtype
    names = sorted(shapes)
    case.choices().shuffle(names)
    every, device = case.strides is Strides.ALL, next(iter(dense.values())).device
    made = slabs_apart(
        {name: shapes[name] for name in names}, dtypes, device, lead=len(case.leading), heads=every, rows=every
    )
    for name, values in dense.items():
        made[name].view.copy_(values)
        inputs[name] = made[name].base
    return {name: made[name].view for name in dense}, made.get("out")


def _packed(kit: Kit, dense: dict[str, Tensor], case: Case[Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Token tensors on their own, or as column ranges of one projection a group."""
    views: dict[str, Tensor] = {}
    for group in kit.groups:
        names = [name for name in group if name in dense]
        if not names:
            continue
        if not case.packed:
            views |= {name: _input(name, dense[name], case.shift, inputs) for name in names}
            continue
        lead = len(case.leading)
        widths = [prod(dense[name].shape[lead:]) for name in names]
        rows, columns = prod(case.leading), sum(widths) + PACK_GAP
        first = dense[names[0]]
        base = torch.full((case.shift + rows * columns,), float("nan"), dtype=first.dtype, device=first.device)
        grid = base[case.shift :].view(*case.leading, columns)
        start = 0
        for name, width in zip(names, widths, strict=True):
            view = grid[..., start : start + width].view(dense[name].shape)
            view.copy_(dense[name])
            views[name] = view
            start += width
        inputs[",".join(names)] = base
    return views
