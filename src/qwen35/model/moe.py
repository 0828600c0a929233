"""The mixture of experts, in steps that can be replaced one by one: route, experts, shared expert, finalize."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from qwen35.domain.errors import HandoffError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.model.config import MoeConfig
from qwen35.model.mlp import GatedMlp, projection


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOutput:
    """What the experts of M tokens computed, before it is summed.

    ``routed_output`` [M * top_k, hidden] unweighted, in expert order; ``expert_weights`` [M, top_k] float32;
    ``permuted_indices`` [M, top_k]: the row of ``routed_output`` for each choice; ``gated_shared_output``
    [M, hidden].
    """

    routed_output: Tensor
    expert_weights: Tensor
    permuted_indices: Tensor
    gated_shared_output: Tensor

    def handoff(self) -> FinalizeHandoff:
        """The same for the fused finalize: indices in int32, weights in the dtype of the hidden states.

        Not every adapter takes float32 weights beside bfloat16 rows. Raises ``HandoffError`` for no tokens.
        """
        m = self.expert_weights.shape[0]
        if not m:
            raise HandoffError("a finalize handoff requires at least one token, got none")
        return FinalizeHandoff(
            routed_output=self.routed_output, expert_weights=self.expert_weights.to(self.routed_output.dtype),
            permuted_indices=self.permuted_indices.to(torch.int32), gated_shared_output=self.gated_shared_output, m=m,
        )  # fmt: skip


def finalize(output: ExpertOutput) -> Tensor:
    """``sum_j weights[:, j] * routed[indices[:, j]] + shared`` [M, hidden], in float32, rounded once."""
    chosen = output.routed_output[output.permuted_indices].float()
    routed = (chosen * output.expert_weights[..., None]).sum(1)
    return (routed + output.gated_shared_output.float()).to(output.routed_output.dtype)


class Router(nn.Module):
    """Softmax over all experts in float32, then the ``top_k`` largest, made to sum to 1."""

    def __init__(self, hidden: int, moe: MoeConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden), requires_grad=False)
        self.top_k = moe.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [M, top_k] float32 and expert numbers [M, top_k] int64 for x [M, hidden]."""
        probabilities = linear(x, self.weight).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts


class Experts(nn.Module):
    """The routed experts, packed: gate_up_proj [E, 2 * width, hidden] (gate first), down_proj [E, hidden, width]."""

    def __init__(self, hidden: int, moe: MoeConfig) -> None:
        super().__init__()
        e, width = moe.experts, moe.expert_width
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * width, hidden), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(e, hidden, width), requires_grad=False)

    def forward(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [M * top_k, hidden] in expert order, and the row of each choice [M, top_k].

        Reads the number of tokens of each expert on the host.
        """
        m, top_k = experts.shape
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.down_proj.shape[0]).tolist()
        outputs, start = x.new_empty(m * top_k, x.shape[-1]), 0
        tokens = order // top_k
        for expert, count in enumerate(counts):
            if not count:
                continue
            rows = slice(start, start + count)
            gate, up = linear(x[tokens[rows]], self.gate_up_proj[expert]).chunk(2, dim=-1)
            outputs[rows] = linear(silu(gate) * up, self.down_proj[expert])
            start += count
        indices = torch.empty_like(order)
        indices[order] = torch.arange(m * top_k, device=x.device)
        return outputs, indices.view(m, top_k)


class MoeBlock(nn.Module):
    """Routed experts plus a shared expert behind a sigmoid gate, for x [M, hidden]."""

    def __init__(self, hidden: int, moe: MoeConfig) -> None:
        super().__init__()
        self.gate = Router(hidden, moe)
        self.experts = Experts(hidden, moe)
        self.shared_expert = GatedMlp(hidden, moe.shared_width)
        self.shared_expert_gate = projection(hidden, 1)

    def run_experts(self, x: Tensor) -> ExpertOutput:
        """Everything up to the sum that ``finalize`` makes."""
        weights, chosen = self.gate.forward(x)
        routed, indices = self.experts.forward(x, chosen)
        return ExpertOutput(
            routed_output=routed, expert_weights=weights, permuted_indices=indices,
            gated_shared_output=self.gated_shared(x),
        )  # fmt: skip

    def gated_shared(self, x: Tensor) -> Tensor:
        """``sigmoid(gate(x)) * shared_expert(x)`` [M, hidden]."""
        return self.shared_expert_gate.forward(x).sigmoid() * self.shared_expert.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return finalize(self.run_experts(x))

    def deferred(self, x: Tensor) -> FinalizeHandoff:
        """What ``forward`` returns, before its sum: the next norm makes it. Raises ``HandoffError`` for no tokens."""
        return self.run_experts(x).handoff()
