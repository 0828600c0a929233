"""Where a block's output meets the next norm: what may come, what may not, and when nothing is fused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from finalize_fakes import FakeFusion, FakeWorkspace
from torch import Tensor

from qwen35.domain.capabilities import Phase, Support
from qwen35.domain.errors import ConfigurationError, HandoffError
from qwen35.domain.finalize import FinalizeHandoff, PendingAllReduce
from qwen35.domain.finalize_policy import ForwardMode, LayerPlan, Situation, decide_finalize
from qwen35.domain.finalize_signature import TokenBounds, WorkspaceSignature
from qwen35.domain.platform import Platform
from qwen35.model.batch import make_batch
from qwen35.model.boundary import MAX_FUSED_TOKENS, Boundaries, Step
from qwen35.model.config import MoeConfig, parse_config
from qwen35.model.moe import MoeBlock, finalize
from qwen35.model.norm import RMSNorm, add_and_norm
from qwen35.model.parallel import TensorParallel
from qwen35.services.counters import Counters
from qwen35.services.finalize_agreement import Agreements
from qwen35.services.finalize_fusion import FinalizeService
from qwen35.services.finalize_registry import WorkspaceRegistry
from qwen35.services.registry import AdapterRegistry

HIDDEN, TOP_K = 16, 2
#: What the engine says of its steps, and how many tokens are fused by that.
BOUNDS, MOST = TokenBounds(moe_tokens=40, running_requests=8), 40
MOE = MoeConfig(experts=4, top_k=TOP_K, expert_width=6, shared_width=4, layers=frozenset({0}))
CONFIG = parse_config(
    {
        "model_type": "qwen3_5_moe_text", "vocab_size": 10, "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "linear_key_head_dim": 4,
        "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "num_experts": 4,
        "num_experts_per_tok": TOP_K, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 4,
        "layer_types": ["full_attention"], "rope_theta": 1e4, "partial_rotary_factor": 0.5, "hidden_act": "silu",
    },
    "here",
)  # fmt: skip


class TwoRanks:
    """As much of a process group as is asked of one that nothing is sent over."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


RANKS = TensorParallel(group=TwoRanks(), size=2, rank=0)  # type: ignore[arg-type]


class Echo:
    """The other rank always says what this one says."""

    def exchange(self, value: object) -> list[object]:
        return [value, value]


def service_of(
    requested: str = "fake", fake: FakeFusion | None = None, workspaces: WorkspaceRegistry | None = None
) -> FinalizeService:  # fmt: skip
    adapters = AdapterRegistry(Platform(device="cpu", device_name="CPU"), extra=((fake or FakeFusion()).entry(),))
    return FinalizeService(
        adapters, requested, workspaces or WorkspaceRegistry(), Counters(), agreements=Agreements(lambda _: Echo())
    )


def norm_of() -> RMSNorm:
    norm = RMSNorm(HIDDEN, 1e-6)
    norm.weight.copy_(torch.randn(HIDDEN))
    return norm


@pytest.fixture
def norm() -> RMSNorm:
    return norm_of()


@pytest.fixture
def service() -> Iterator[FinalizeService]:
    made = service_of()
    yield made
    made.close()


@pytest.fixture
def prepared(service: FinalizeService, norm: RMSNorm) -> Boundaries:
    boundaries = Boundaries(CONFIG, RANKS, service)
    boundaries.prepare([norm], torch.float32, torch.device("cpu"), BOUNDS)
    return boundaries


def step_of(boundaries: Boundaries, tokens: int = 3, phase: Phase = Phase.EXTEND) -> Step:
    return boundaries.step(make_batch(phase, [0], [0], [tokens], torch.device("cpu")))


def block_of(seed: int) -> MoeBlock:
    block, generator = MoeBlock(HIDDEN, MOE), torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return block


def handoff_of(seed: int, m: int = 3) -> FinalizeHandoff:
    return block_of(seed).deferred(torch.randn(m, HIDDEN))


@pytest.mark.row("C05")
def test_an_announced_handoff_passes_untouched_and_a_missing_one_is_an_error(prepared: Boundaries, seed: int) -> None:
    plan, handoff = LayerPlan(defer=True, fuse=True), handoff_of(seed)
    assert prepared.after_mlp(handoff, plan) is handoff
    with pytest.raises(HandoffError, match="expected a FinalizeHandoff"):
        prepared.after_mlp(torch.zeros(3, HIDDEN), plan)


@pytest.mark.row("C04")
def test_a_pending_share_is_the_same_tensor_and_an_unexpected_handoff_is_an_error(
    prepared: Boundaries, seed: int
) -> None:
    share = torch.zeros(3, HIDDEN)
    pending = prepared.after_mlp(share, LayerPlan(defer=False, fuse=True))
    assert isinstance(pending, PendingAllReduce)
    assert pending.local is share
    for fuse in (True, False):
        with pytest.raises(HandoffError, match="unexpected FinalizeHandoff"):
            prepared.after_mlp(handoff_of(seed), LayerPlan(defer=False, fuse=fuse))


@pytest.mark.row("B13")
@pytest.mark.row("B15")
@pytest.mark.row("C06")
def test_layers_defer_only_where_the_step_is_eligible(prepared: Boundaries) -> None:
    step = step_of(prepared)
    for last in (False, True):
        assert step.plan(sparse=True, last=last) == LayerPlan(defer=True, fuse=True)
        assert step.plan(sparse=False, last=last) == LayerPlan(defer=False, fuse=not last)
    assert prepared.latest is step
    large = step_of(prepared, MOST + 1)
    assert large.finalize.reasons == (f"m requires 1..{MOST}, got {MOST + 1}",)
    assert large.plan(sparse=True, last=False) == LayerPlan(defer=False, fuse=False)


def prepared_for(bounds: TokenBounds, service: FinalizeService) -> Boundaries:
    boundaries = Boundaries(CONFIG, RANKS, service)
    boundaries.prepare([norm_of()], torch.float32, torch.device("cpu"), bounds)
    return boundaries


@pytest.mark.parametrize(
    ("bounds", "asked"),
    [
        (TokenBounds(moe_tokens=300, running_requests=8), 300),
        (TokenBounds(moe_tokens=4, running_requests=9), 9),
        (TokenBounds(moe_tokens=MAX_FUSED_TOKENS + 1), MAX_FUSED_TOKENS),
    ],
)
def test_the_workspace_is_made_for_as_many_tokens_as_the_bounds_say(bounds: TokenBounds, asked: int) -> None:
    """And for an engine that never speculates, so that the shared expert's output may be loaded early."""
    fake = FakeFusion()
    boundaries = prepared_for(bounds, service_of(fake=fake))
    (made,) = fake.made
    assert (made.signature.max_m, made.signature.speculative) == (asked, False)
    assert step_of(boundaries, asked).finalize
    assert step_of(boundaries, asked + 1).finalize.reasons == (f"m requires 1..{asked}, got {asked + 1}",)


def test_bounds_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_m cannot be resolved"):
        prepared_for(TokenBounds(), service_of())


def test_the_workspace_never_grows_and_a_later_model_takes_it_as_it_is() -> None:
    fake, workspaces = FakeFusion(), WorkspaceRegistry()
    first = prepared_for(BOUNDS, service_of(fake=fake, workspaces=workspaces))
    larger = TokenBounds(moe_tokens=MOST + 1)
    first.prepare([norm_of()], torch.float32, torch.device("cpu"), larger)
    second = prepared_for(larger, service_of(fake=fake, workspaces=workspaces))
    assert len(fake.made) == 1
    for boundaries in (first, second):
        assert step_of(boundaries, MOST).finalize
        assert step_of(boundaries, MOST + 1).finalize.reasons == (f"m requires 1..{MOST}, got {MOST + 1}",)


def test_steps_beyond_what_the_adapter_serves_are_not_fused_and_say_why() -> None:
    """As FlashInfer's IPC adapter, whose fused finalize is limited."""
    fake = FakeFusion(most_tokens=6)
    service = service_of(fake=fake)
    boundaries = prepared_for(BOUNDS, service)
    boundaries.prepare([norm_of()], torch.float32, torch.device("cpu"), BOUNDS)
    assert [made.signature.max_m for made in fake.made] == [6]
    assert service.max_m == 6
    assert step_of(boundaries, 6).finalize
    large = step_of(boundaries, 7)
    assert large.finalize.reasons == large.all_reduce.reasons == ("m requires 1..6, got 7",)
    assert large.plan(sparse=True, last=False) == LayerPlan(defer=False, fuse=False)


class Crowded(FakeWorkspace):
    """Its buffers have room for fewer tokens than it was made for, as FlashInfer's may."""

    def supports(self, m: int) -> Support:
        return super().supports(m) if m < 4 else Support.of(f"buffers require fewer tokens, got {m}")


class CrowdedFusion(FakeFusion):
    def prepare(self, asked: WorkspaceSignature) -> FakeWorkspace:
        return Crowded(asked, self.name)


def test_what_the_workspace_itself_refuses_below_its_bound_is_not_fused() -> None:
    boundaries = prepared_for(BOUNDS, service_of(fake=CrowdedFusion()))
    assert step_of(boundaries, 3).finalize
    step = step_of(boundaries, 4)
    assert step.finalize.reasons == step.all_reduce.reasons == ("buffers require fewer tokens, got 4",)
    for sparse in (True, False):
        assert step.plan(sparse=sparse, last=False) == LayerPlan(defer=False, fuse=False)


@pytest.mark.row("B14")
def test_a_handoff_where_it_cannot_be_finalized_is_an_error(prepared: Boundaries, norm: RMSNorm, seed: int) -> None:
    handoff, residual = handoff_of(seed), torch.randn(3, HIDDEN)
    normed, _ = prepared.add_and_norm(handoff, residual, norm, step_of(prepared))
    assert torch.equal(normed, torch.ones(3, HIDDEN)), "the fake workspace fills with ones"
    with pytest.raises(HandoffError, match="ineligible path: m requires"):
        prepared.add_and_norm(handoff, residual, norm, step_of(prepared, MOST + 1))
    with pytest.raises(HandoffError, match="Gemma-style"):
        prepared.add_and_norm(handoff, residual, norm_of(), step_of(prepared))
    with pytest.raises(HandoffError, match="not prepared for it"):
        prepared.add_and_norm(PendingAllReduce(residual), residual, norm_of(), step_of(prepared))
    with pytest.raises(HandoffError, match="without a finalize service"):
        Boundaries(CONFIG, RANKS, None).add_and_norm(handoff, residual, norm, step_of(prepared))


def test_nothing_is_fused_by_one_rank_without_a_service_when_off_or_before_prepare(norm: RMSNorm) -> None:
    for ranks, service, prepares, reason in (
        (TensorParallel(), service_of(), True, "tensor parallelism requires at least 2 ranks, got 1"),
        (RANKS, None, True, "fusion requires the finalize setting, which is off"),
        (RANKS, service_of("off"), True, "fusion requires the finalize setting, which is off"),
        (RANKS, service_of(), False, "fusion requires a prepared workspace"),
    ):
        boundaries = Boundaries(CONFIG, ranks, service)
        if prepares:
            boundaries.prepare([norm], torch.float32, torch.device("cpu"), BOUNDS)
        step = step_of(boundaries)
        assert reason in step.finalize.reasons
        assert reason in step.all_reduce.reasons
        assert step.plan(sparse=True, last=False) == LayerPlan(defer=False, fuse=False)
        assert service is None or not service.is_prepared
        update, residual = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
        got, want = boundaries.add_and_norm(update, residual, norm, step), add_and_norm(update, residual, norm)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.row("C16")
def test_the_gated_shared_output_is_new_and_leaves_its_input_alone(seed: int) -> None:
    block, x = block_of(seed), torch.randn(3, HIDDEN)
    kept = x.clone()
    shared: Tensor = block.shared_expert(x)
    gated = block.gated_shared(x)
    torch.testing.assert_close(gated, torch.sigmoid(x @ block.shared_expert_gate.weight[0])[:, None] * shared)
    assert torch.equal(x, kept), f"seed {seed}"


@pytest.mark.row("C03")
def test_the_shared_expert_has_no_slot_among_the_routed_ones_fused_or_not(prepared: Boundaries, seed: int) -> None:
    """An engine that can put it there has a switch for that; this model never does, and the policy asks for it
    (``Situation.shared_expert_separate``), of each layer boundary anew."""
    block, m = block_of(seed), 3
    x = torch.randn(m, HIDDEN)
    output = block.run_experts(x)
    assert output.permuted_indices.shape == (m, TOP_K)
    assert output.routed_output.shape == (m * TOP_K, HIDDEN)
    assert torch.equal(output.gated_shared_output, block.gated_shared(x))
    without = replace(block_of(seed).run_experts(x), gated_shared_output=torch.zeros(m, HIDDEN))
    torch.testing.assert_close(finalize(output), finalize(without) + block.gated_shared(x))
    situation = Situation(forward_mode=ForwardMode.DECODE, m=m, max_m=m, tp_size=2)
    assert decide_finalize(situation)
    refused = decide_finalize(replace(situation, shared_expert_separate=False))
    assert refused.reasons == ("finalize requires a separate shared expert",)


@pytest.mark.row("C02")
@pytest.mark.parametrize(("asked", "imported"), [("off", []), ("reference", ["reference"])])
def test_switched_off_no_adapter_is_imported_and_the_generic_boundary_serves(asked: str, imported: list[str]) -> None:
    """There is one boundary class; what stands for the engine's second one is the service behind it."""
    code = f"""
import sys, torch
import qwen35
from test_boundary import Agreements, BOUNDS, Boundaries, CONFIG, Echo, FinalizeService, RANKS, norm_of, step_of
container = qwen35.build(device="cpu", finalize={asked!r})
service = FinalizeService(container.registry(), {asked!r}, container.workspaces(), container.counters(),
                          agreements=Agreements(lambda _: Echo()))
boundaries = Boundaries(CONFIG, RANKS, service)
boundaries.prepare([norm_of()], torch.float32, torch.device("cpu"), BOUNDS)
print(service.is_prepared, step_of(boundaries).finalize.eligible)
factories = ("finalize_fusion", "finalize_multicast", "finalize_ipc")
print(sorted(n.split(".")[2] for n in sys.modules if n.startswith("qwen35.adapters.") and n.endswith(factories)))
"""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    on = bool(imported)
    assert result.stdout.splitlines() == [f"{on} {on}", str(imported)], result.stdout


@pytest.mark.row("C17")
def test_no_tokens_cannot_be_deferred_but_run(seed: int) -> None:
    block, none = block_of(seed), torch.zeros(0, HIDDEN)
    with pytest.raises(HandoffError, match="at least one token"):
        block.deferred(none)
    assert block(none).shape == (0, HIDDEN)


def test_a_place_among_ranks_that_cannot_be_is_refused() -> None:
    for wrong, match in (
        ({"size": 2, "rank": 2}, "rank 2 and size 2"),
        ({"size": 2, "rank": 0}, "need a process group"),
        ({"size": 3, "rank": 0, "group": TwoRanks()}, "must be the group's 2 and 0"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            TensorParallel(**wrong)  # type: ignore[arg-type]
