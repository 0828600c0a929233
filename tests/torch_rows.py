"""``RowOperations`` in plain torch, for adapters that are tested without a GPU and as the oracle of the Triton ones."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.adapters._kernels.rows import IndexLaunch, ZeroLaunch
from qwen35.ports.gdn_calls import CommitCall, Gates, LogGates


class TorchRows:
    """Every operation counts as one launch in ``launches``, in the order they were asked for.

    ``streams``: those that kept launches were told.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.streams: list[int] = []

    def index(
        self, slots: Tensor, write_slots: Tensor | None, read: Tensor, write: Tensor, *, read_padding: int,
        write_padding: int, a: Tensor | None = None, dt_bias: Tensor | None = None, clamped: Tensor | None = None,
        limit: float = 0.0,
    ) -> None:  # fmt: skip
        self.launches.append("index")
        target = slots if write_slots is None else write_slots
        read.copy_(torch.where(slots < 0, read_padding, slots))
        write.copy_(torch.where((slots < 0) | (target < 0), write_padding, target))
        if a is not None and dt_bias is not None and clamped is not None:
            clamped.copy_(torch.minimum(a.float(), limit - dt_bias.float()))

    def kept_index(self, *, read_padding: int, write_padding: int, limit: float) -> IndexLaunch:
        def launch(
            slots: Tensor, write_slots: Tensor | None, read: Tensor, write: Tensor, a: Tensor | None,
            dt_bias: Tensor | None, clamped: Tensor | None, stream: int,
        ) -> None:  # fmt: skip
            self.streams.append(stream)
            if a is not None and clamped is not None and a.dim() == 2:
                a, clamped = a.unsqueeze(1), clamped.view(a.shape[0], 1, a.shape[1])
            self.index(
                slots, write_slots, read, write, read_padding=read_padding, write_padding=write_padding, a=a,
                dt_bias=dt_bias, clamped=clamped, limit=limit,
            )  # fmt: skip

        return launch

    def kept_zero_rows(self) -> ZeroLaunch:
        def launch(out: Tensor, slots: Tensor, stream: int) -> None:
            self.streams.append(stream)
            self.zero_rows(out, slots)

        return launch

    def zero_rows(self, out: Tensor, slots: Tensor) -> None:
        self.launches.append("zero_rows")
        out[slots < 0] = 0

    def zero_ranges(self, rows: Tensor, offsets: Tensor, slots: Tensor) -> None:
        self.launches.append("zero_ranges")
        for i in (slots < 0).nonzero().flatten().tolist():
            rows[int(offsets[i]) : int(offsets[i + 1])] = 0

    def gather_states(self, states: Tensor, slots: Tensor, fresh: Tensor | None, out: Tensor) -> None:
        self.launches.append("gather_states")
        for i, slot in enumerate(slots.tolist()):
            zero = slot < 0 or (fresh is not None and bool(fresh[i]))
            out[i] = 0 if zero else states[slot]

    def scatter_states(
        self, source: Tensor, states: Tensor, slots: Tensor, write_slots: Tensor | None, cu_seqlens: Tensor
    ) -> None:
        self.launches.append("scatter_states")
        targets = (slots if write_slots is None else write_slots).tolist()
        for i, (slot, target) in enumerate(zip(slots.tolist(), targets, strict=True)):
            if slot >= 0 and target >= 0 and cu_seqlens[i] < cu_seqlens[i + 1]:
                states[target] = source[i]

    def scatter_nodes(self, source: Tensor, intermediates: Tensor, slots: Tensor, rows: Tensor | None) -> None:
        self.launches.append("scatter_nodes")
        targets = list(range(len(slots))) if rows is None else rows.tolist()
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                intermediates[targets[i], : source.shape[1]] = source[i]

    def commit(self, call: CommitCall) -> None:
        self.launches.append("commit")
        rows = list(range(len(call.slots))) if call.rows is None else call.rows.tolist()
        for slot, row, node in zip(call.slots.tolist(), rows, call.last.tolist(), strict=True):
            if slot >= 0 and node >= 0:
                call.states[slot] = call.intermediates[row, node]

    @torch.no_grad()  # as a kernel: it knows no autograd
    def prefill_inputs(
        self, q: Tensor, k: Tensor, gates: Gates, cu_seqlens: Tensor, *, q_out: Tensor, k_out: Tensor, decay: Tensor,
        beta: Tensor, cu_out: Tensor, v: Tensor | None = None, v_out: Tensor | None = None, linear: bool = True,
        slots: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.launches.append("prefill_inputs")
        live = torch.ones(q.shape[0], dtype=torch.bool, device=q.device)
        if slots is not None:
            live = (slots >= 0).repeat_interleave(cu_seqlens.diff().to(torch.int64))
        for source, out in ((q, q_out), (k, k_out)):
            x = torch.where(live[:, None, None], source.float(), 0.0)
            out.copy_(x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6))
        if v is not None and v_out is not None:
            v_out.copy_(torch.where(live[:, None, None], v, torch.zeros_like(v)))
        g, b = log_gates(gates)
        made = torch.where(live[:, None], g, torch.zeros_like(g))
        decay.copy_(made.double().exp() if linear else made)  # rounded once, wherever in the tensor it stands
        beta.copy_(torch.where(live[:, None], b, torch.zeros_like(b)))
        cu_out.copy_(cu_seqlens)


def log_gates(gates: Gates) -> tuple[Tensor, Tensor]:
    """Log decay and beta in float32."""
    if isinstance(gates, LogGates):
        return gates.g.float(), gates.beta.float()
    x = gates.a.double() + gates.dt_bias.double()
    softplus = torch.where(x > 20, x, torch.log1p(x.clamp(max=20.0).exp()))
    return (-gates.A_log.double().exp() * softplus).float(), torch.sigmoid(gates.b.double()).float()
