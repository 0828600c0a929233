"""The pieces of a layer against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from qwen35.model.config import MoeConfig
from qwen35.model.moe import MoeBlock, finalize
from qwen35.model.norm import GatedRMSNorm, RMSNorm, add_and_norm
from qwen35.model.rotary import Rotary, rotate


@pytest.mark.case("C45")
def test_a_norm_weight_of_zero_normalises_and_of_minus_one_gives_zero() -> None:
    norm, x = RMSNorm(16, 1e-6), torch.randn(3, 16)
    with torch.no_grad():
        norm.weight.fill_(0.0)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    with torch.no_grad():
        norm.weight.fill_(-1.0)
    assert not norm(x).any()


def test_the_gated_norm_has_a_plain_weight_and_gates_after_it() -> None:
    norm, x, gate = GatedRMSNorm(8, 1e-6), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight * silu(gate)
    torch.testing.assert_close(norm(x, gate), want)


def test_add_and_norm_leaves_its_inputs_alone() -> None:
    norm = RMSNorm(8, 1e-6)
    with torch.no_grad():
        norm.weight.zero_()
    update, residual = torch.randn(2, 8), torch.randn(2, 8)
    kept = (update.clone(), residual.clone())
    normed, total = add_and_norm(update, residual, norm)
    torch.testing.assert_close(total, kept[0] + kept[1])
    torch.testing.assert_close(normed, norm(total))
    assert torch.equal(update, kept[0])
    assert torch.equal(residual, kept[1])


def test_rotation_turns_pairs_by_their_angle_and_passes_the_rest() -> None:
    x = torch.randn(3, 2, 10)
    positions = torch.tensor([0, 1, 1000])
    got = rotate(x, *Rotary(4, 100.0)(positions))
    assert torch.equal(got[..., 4:], x[..., 4:])
    torch.testing.assert_close(got[0], x[0])
    for pair, frequency in ((0, 1.0), (1, 0.1)):
        angle = positions.double()[:, None] * frequency
        point = torch.complex(x[..., pair].double(), x[..., pair + 2].double())
        turned = torch.polar(torch.ones_like(angle), angle) * point
        torch.testing.assert_close(got[..., pair].double(), turned.real, atol=1e-4, rtol=0)
        torch.testing.assert_close(got[..., pair + 2].double(), turned.imag, atol=1e-4, rtol=0)


def make_block(seed: int) -> tuple[MoeBlock, Tensor]:
    config = MoeConfig(experts=6, top_k=2, expert_width=5, shared_width=7, layers=frozenset({0}))
    block, generator = MoeBlock(8, config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return block, torch.randn(11, 8, generator=generator)


def test_a_mixture_is_the_weighted_sum_of_its_experts_and_the_gated_shared_one(seed: int) -> None:
    block, x = make_block(seed)
    e = block.experts
    probabilities = (x @ block.gate.weight.T).softmax(-1)
    want = torch.empty_like(x)
    for t, token in enumerate(x):
        weights, chosen = probabilities[t].topk(2)
        shared = torch.sigmoid(token @ block.shared_expert_gate.weight[0]) * block.shared_expert(token[None])[0]
        want[t] = shared
        for weight, n in zip(weights, chosen.tolist(), strict=True):
            inner = silu(e.gate_up_proj[n, :5] @ token) * (e.gate_up_proj[n, 5:] @ token)
            want[t] += weight / weights.sum() * (e.down_proj[n] @ inner)
    torch.testing.assert_close(block(x), want, atol=1e-4, rtol=1e-4, msg=lambda m: f"{m}, seed {seed}")


def test_routed_rows_are_indexed_not_ordered_by_token(seed: int) -> None:
    block, x = make_block(seed)
    output = block.run_experts(x)
    assert output.routed_output.shape == (22, 8)
    assert sorted(output.permuted_indices.flatten().tolist()) == list(range(22))
    assert output.permuted_indices.flatten().tolist() != list(range(22)), f"seed {seed}"
    torch.testing.assert_close(finalize(output), block(x))
