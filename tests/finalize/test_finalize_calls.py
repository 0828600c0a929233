"""The service's calls, and the norm that meets a handoff."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion, signature
from finalize_services import FACTS, adapters, case, service
from torch import Tensor

from qwen35.adapters.reference.finalize_fusion import ReferenceFinalizeFusion
from qwen35.domain.errors import (
    ContractError,
    DtypeError,
    HandoffError,
    LayoutError,
    ShapeError,
)
from qwen35.domain.finalize_policy import Decision
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.services.counters import Counters
from qwen35.services.finalize_fusion import FinalizeService, gemma_gamma
from qwen35.services.finalize_registry import WorkspaceRegistry


@pytest.mark.row("B14")
@pytest.mark.row("C10")
def test_a_handoff_has_one_way_on() -> None:
    fake = FakeFusion()
    ready, c = service(fake), case()
    ready.prepare(signature())
    handoff, residual, gamma = c.handoff(0), c.residual(), c.gamma()
    with pytest.raises(HandoffError, match="ineligible path: mode; width"):
        ready.consume(handoff, residual, gamma, Decision(False, ("mode", "width")))
    with pytest.raises(HandoffError, match="residual"):
        ready.consume(handoff, None, gamma, Decision(True))
    with pytest.raises(HandoffError, match="Gemma"):
        ready.consume(handoff, residual, None, Decision(True))
    assert fake.made[0].calls == []
    ready.consume(handoff, residual, gamma, Decision(True))
    added = torch.randn_like(residual)
    ready.consume(handoff, residual, gamma, Decision(True), post_residual_addition=added)
    (_, plain), (_, with_addition) = fake.made[0].calls
    assert torch.equal(plain, residual)
    assert torch.equal(with_addition, residual + added)
    for addition, error in ((added[:1], ShapeError), (added.double(), DtypeError), (1.0, ContractError)):
        with pytest.raises(error, match="post_residual_addition"):
            ready.finalize(handoff, residual, gamma, post_residual_addition=addition)
    with pytest.raises(DtypeError, match="residual must be float32"):
        ready.finalize(handoff, residual.double(), gamma, post_residual_addition=added)
    assert len(fake.made[0].calls) == 2


@pytest.mark.row("B10")
@pytest.mark.case("C45")
@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_the_one_of_a_gemma_norm_is_added_once(weight: float) -> None:
    """Checkpoint weight 0 gives the normalised value, -1 gives zero, with the one in gamma or in the bias."""
    c = case(dropped=0.0, zeroed=0.0)
    stored = torch.full((16,), weight)
    results = []
    for bias, gamma in ((0.0, gemma_gamma(stored, torch.float32)), (1.0, stored)):
        workspace = ReferenceFinalizeFusion(torch.float32).prepare(signature(weight_bias=bias))
        results.append(workspace.finalize(c.handoff(0), c.residual(), gamma))
    total = results[0].residual.double()
    expected = total * (total.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5 * (weight + 1.0)
    for got in results:
        torch.testing.assert_close(got.norm.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.row("B11")
def test_the_first_of_several_faults_is_the_one_that_is_named() -> None:
    """m, routed, weights, indices, their dtypes, shared, residual, gamma: breaking all, then mending one by one."""
    c = case()
    good, residual, gamma = c.handoff(0), c.residual(), c.gamma()
    workspace = FakeFusion().prepare(signature())
    broken = replace(
        good, m=33, routed_output=torch.zeros(4, 15), expert_weights=torch.zeros(3, 1).half(),
        permuted_indices=torch.zeros(3, 3), gated_shared_output=torch.zeros(2, 16),
    )  # fmt: skip
    mends: list[tuple[str, dict[str, Any]]] = [
        ("m must be in", {"m": 3}), ("routed_output", {"routed_output": good.routed_output}),
        ("expert_weights must be \\[m", {"expert_weights": torch.zeros(3, 2).half()}),
        ("permuted_indices must be \\[m", {"permuted_indices": torch.zeros(3, 2)}),
        ("expert_weights must be bfloat16", {"expert_weights": good.expert_weights}),
        ("permuted_indices must be int32", {"permuted_indices": good.permuted_indices}),
        ("gated_shared_output must be \\[m", {"gated_shared_output": torch.zeros(3, 16).bfloat16()}),
        ("gated_shared_output must be float32", {"gated_shared_output": good.gated_shared_output}),
    ]  # fmt: skip
    for named, mend in mends:
        with pytest.raises(ValueError, match=named):
            workspace.finalize(broken, residual[:1], gamma[:1])
        broken = replace(broken, **mend)
    with pytest.raises(ShapeError, match="residual"):
        workspace.finalize(broken, residual[:1], gamma[:1])
    with pytest.raises(ShapeError, match="gamma"):
        workspace.finalize(broken, residual, gamma[:1])
    workspace.finalize(broken, residual, gamma)


@pytest.mark.row("A24")
@pytest.mark.parametrize("name", ["residual", "gamma", "out.norm", "out.residual"])
def test_what_the_norm_reads_and_writes_starts_on_whole_accesses(name: str) -> None:
    c = case()
    named = {"residual": c.residual(), "gamma": c.gamma(), "out.norm": c.residual(), "out.residual": c.residual()}
    named[name] = named[name].new_zeros(named[name].numel() + 1)[1:].view(named[name].shape)
    out = NormAndResidual(norm=named["out.norm"], residual=named["out.residual"])
    workspace = FakeFusion().prepare(signature())
    for call in (
        lambda: workspace.finalize(c.handoff(0), named["residual"], named["gamma"], out),
        lambda: workspace.all_reduce(c.local(0), named["residual"], named["gamma"], out),
    ):
        with pytest.raises(LayoutError, match=f"^{name} must start at a multiple of 16 bytes, got 4 past one"):
            call()
    assert workspace.calls == []


def test_results_go_to_two_buffers_that_share_nothing_with_each_other_or_an_input() -> None:
    c, workspace = case(), FakeFusion().prepare(signature())
    handoff, residual, gamma, local = c.handoff(0), c.residual(), c.gamma(), c.local(0)
    shared = handoff.gated_shared_output
    assert isinstance(shared, Tensor)
    both = torch.zeros(5, 16)
    overlapping = (
        (NormAndResidual(norm=both[:3], residual=both[2:]), "out.norm must not overlap out.residual"),
        (NormAndResidual(norm=residual, residual=both[2:]), "out.norm must not overlap residual"),
        (NormAndResidual(norm=both[:3], residual=shared), "out.residual must not overlap gated_shared_output"),
    )
    for out, said in overlapping:
        with pytest.raises(LayoutError, match=said):
            workspace.finalize(handoff, residual, gamma, out)
    with pytest.raises(LayoutError, match=r"out\.norm must not overlap local"):
        workspace.all_reduce(local, residual, gamma, NormAndResidual(norm=local, residual=both[2:]))
    assert workspace.calls == []


@pytest.mark.row("B12")
def test_the_all_reduce_needs_a_residual_of_as_many_tokens() -> None:
    c = case()
    with pytest.raises(ShapeError, match="residual must be"):
        FakeFusion().prepare(signature()).all_reduce(c.local(0), c.residual()[:2], c.gamma())


def test_calls_are_counted_by_pattern_and_adapter() -> None:
    counters, c = Counters(), case()
    ready = FinalizeService(adapters(FakeFusion()), "auto", WorkspaceRegistry(), counters, facts=lambda _: FACTS)
    ready.prepare(signature())
    ready.finalize(c.handoff(0), c.residual(), c.gamma())
    ready.all_reduce(c.local(0), c.residual(), c.gamma())
    assert counters.total("calls", port="finalize_fusion", adapter="fake") == 2
    assert counters.total("calls", phase="finalize", mode="eager") == 1
