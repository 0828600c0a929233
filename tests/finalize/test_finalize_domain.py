"""Handoff, signature, token bounds, early load and policy, against facts worked out by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35.domain.errors import ConfigurationError, DtypeError, HandoffError, LayoutError, ShapeError, ValueRangeError
from qwen35.domain.finalize import FinalizeHandoff, PendingAllReduce, finish_mlp_output
from qwen35.domain.finalize_early_load import FLAG, with_early_shared_load
from qwen35.domain.finalize_policy import (
    Decision,
    ForwardMode,
    Situation,
    decide_all_reduce,
    decide_finalize,
    plan_layer,
)
from qwen35.domain.finalize_signature import TokenBounds, WorkspaceSignature, scattered_tokens
from qwen35.ports.finalize_checks import handoff_tensors
from qwen35.ports.finalize_handoff import bfloat16_weights, handoff_from_flashinfer

# --- handoff ---------------------------------------------------------------------------------------------------


def deferred(rows: int = 34, buffered: int = 5, top_k: int = 10, hidden: int = 16) -> dict[str, Any]:
    """FlashInfer's deferred output for 3 tokens, in buffers for more."""
    return {
        "gemm2_out": torch.randn(rows, hidden).bfloat16(), "expert_weights": torch.rand(buffered, top_k).bfloat16(),
        "permuted_indices": torch.randint(-1, rows, (buffered, top_k), dtype=torch.int32),
        "gated_shared": torch.randn(3, hidden).bfloat16(),
    }  # fmt: skip


@pytest.mark.row("B04")
@pytest.mark.row("B05")
@pytest.mark.row("B06")
def test_a_handoff_copies_nothing_and_cuts_only_weights_and_indices() -> None:
    parts = deferred()
    handoff = handoff_from_flashinfer(**parts, m=3, hidden=16, top_k=10)
    routed, weights, indices, shared = handoff_tensors(handoff)
    assert (list(routed.shape), list(weights.shape), list(indices.shape)) == ([34, 16], [3, 10], [3, 10])
    assert shared is parts["gated_shared"]
    assert [t.data_ptr() for t in (routed, weights, indices)] == [
        parts[name].data_ptr() for name in ("gemm2_out", "expert_weights", "permuted_indices")
    ]
    assert type(handoff.m) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        handoff.m = 4  # type: ignore[misc]


@pytest.mark.row("B04")
def test_flat_buffers_are_viewed_as_rows() -> None:
    parts = deferred()
    flat = {name: parts[name].flatten() for name in ("gemm2_out", "expert_weights", "permuted_indices")}
    handoff = handoff_from_flashinfer(**(parts | flat), m=3, hidden=16, top_k=10)
    assert torch.equal(handoff_tensors(handoff)[0], parts["gemm2_out"])


@pytest.mark.row("B06")
@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"permuted_indices": torch.zeros(31, dtype=torch.int32)}, ShapeError, "permuted_indices.*top_k = 10, got 31"),
        ({"gemm2_out": torch.zeros(33).bfloat16()}, ShapeError, "gemm2_out.*hidden = 16, got 33"),
        ({"expert_weights": torch.zeros(2, 10).bfloat16()}, ShapeError, "expert_weights.*m = 3.*got 2"),
        ({"gemm2_out": torch.zeros(16, 34).bfloat16().T}, LayoutError, "gemm2_out"),
        ({"gemm2_out": torch.zeros(34, 16)}, DtypeError, "gemm2_out must be bfloat16, got float32"),
        ({"permuted_indices": torch.zeros(5, 10, dtype=torch.int64)}, DtypeError, "permuted_indices.*int32, got int64"),
        ({"expert_weights": torch.zeros(5, 10).half()}, DtypeError, "expert_weights.*got float16"),
        ({"m": 0}, ValueRangeError, "m must be at least 1, got 0"),
    ],
)
def test_a_buffer_that_does_not_fit_is_named(change: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        handoff_from_flashinfer(**({**deferred(), "m": 3, "hidden": 16, "top_k": 10} | change))


@pytest.mark.row("B07")
@pytest.mark.case("C44")
@given(seed=st.integers(0, 2**31 - 1))
def test_a_float32_label_over_bfloat16_is_read_for_what_it_is(seed: int) -> None:
    truth = torch.rand(4, 2, generator=torch.Generator().manual_seed(seed)).bfloat16()
    buffer = torch.full((4, 2), float("nan"))
    buffer.view(-1).view(torch.bfloat16)[:8] = truth.flatten()
    got = bfloat16_weights(buffer, 2)
    assert torch.equal(got, truth), seed
    assert got.data_ptr() == buffer.data_ptr()
    handoff = handoff_from_flashinfer(
        gemm2_out=torch.zeros(8, 4).bfloat16(), expert_weights=buffer,
        permuted_indices=torch.zeros(4, 2, dtype=torch.int32), gated_shared=None, m=3, hidden=4, top_k=2,
    )  # fmt: skip
    assert torch.equal(handoff_tensors(handoff)[1], truth[:3]), seed


@pytest.mark.row("C04")
@pytest.mark.row("C05")
def test_an_mlp_returns_what_its_layer_announced() -> None:
    handoff, tensor = handoff_from_flashinfer(**deferred(), m=3, hidden=16, top_k=10), torch.zeros(3, 16)
    assert finish_mlp_output(handoff, deferred=True, pending=True) is handoff
    assert finish_mlp_output(tensor, deferred=False, pending=False) is tensor
    pending = finish_mlp_output(tensor, deferred=False, pending=True)
    assert isinstance(pending, PendingAllReduce)
    assert pending.local is tensor
    for wrong in (tensor, None, PendingAllReduce(tensor)):
        with pytest.raises(HandoffError, match="expected a FinalizeHandoff"):
            finish_mlp_output(wrong, deferred=True, pending=True)
    for pending_too in (True, False):
        with pytest.raises(HandoffError, match="unexpected FinalizeHandoff"):
            finish_mlp_output(handoff, deferred=False, pending=pending_too)


# --- signature and bounds --------------------------------------------------------------------------------------


def signature(**changes: Any) -> WorkspaceSignature:
    values: dict[str, Any] = {"group": GROUP, "tp_size": 2, "rank": 0, "hidden": 64, "top_k": 4, "max_m": 32}
    return WorkspaceSignature(**(values | changes))


GROUP = object()


@pytest.mark.row("A05")
@pytest.mark.parametrize("name", ["hidden", "top_k", "max_m", "tp_size"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_signature_refuses_sizes_below_one(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be at least 1, got {value}"):
        signature(**{name: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 2}, "rank must be in 0..1, got 2"), ({"dtype": "float16"}, "dtype.*'float16'"),
        ({"eps": 0.0}, "eps"), ({"device": "cuda"}, "device.*'cuda'"), ({"device": "tpu:0"}, "device"),
    ],
)  # fmt: skip
def test_a_signature_refuses_what_it_cannot_mean(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        signature(**change)


@pytest.mark.row("A17")
@pytest.mark.row("A18")
@pytest.mark.row("A22")
def test_a_signature_covers_smaller_calls_of_the_same_kind_only() -> None:
    have = signature()
    assert have.covers(signature(max_m=1))
    assert have.covers(signature(weight_bias=0.0))
    others: dict[str, Any] = {
        "max_m": 33, "hidden": 128, "top_k": 5, "dtype": "float32", "eps": 1e-5, "weight_bias": 1.0,
        "shared_expert": False, "device": "cuda:0", "group": object(), "rank": 1,
    }  # fmt: skip
    assert have.covers(signature(speculative=False)), "what is safe under speculation is safe without"
    assert signature(speculative=False).differences(have) == ("speculative: has False, asked True",)
    for name, value in others.items():
        differences = have.differences(signature(**{name: value}))
        assert len(differences) == 1, (name, differences)
        assert differences[0].startswith(f"{name}: "), differences
    assert {"tp_size", "speculative", *others} == {f.name for f in dataclasses.fields(WorkspaceSignature)}
    assert len(have.differences(signature(tp_size=4, max_m=64))) == 2


@pytest.mark.row("B02")
@pytest.mark.row("B03")
@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (TokenBounds(moe_tokens=8192, running_requests=2048, decode_max_bs=512, decode_bs=[1, 64, 256],
                     prefill_max_bs=4096, prefill_bs=[128]), 8192),
        (TokenBounds(decode_max_bs=8, decode_bs=[1, 700]), 700),
        (TokenBounds(moe_tokens=None, running_requests=0, decode_bs=[None, -4, 3], prefill_bs=None), 3),
        (TokenBounds(decode_max_bs=512, draft_tokens=4, running_requests=600), 2048),
        (TokenBounds(prefill_max_bs=512, draft_tokens=4), 512),
    ],
)  # fmt: skip
def test_the_token_bound_is_the_largest_positive_one(bounds: TokenBounds, expected: int) -> None:
    assert bounds.resolve_max_m() == expected


@pytest.mark.row("B02")
def test_no_positive_bound_is_an_error() -> None:
    for nothing in (TokenBounds(), TokenBounds(moe_tokens=0, decode_bs=[0, None, -1])):
        with pytest.raises(ConfigurationError, match="max_m cannot be resolved"):
            nothing.resolve_max_m()


@pytest.mark.row("E01")
@pytest.mark.case("C48")
@pytest.mark.parametrize(
    ("counts", "ranks", "expected"), [([2048] * 4, 4, 512), ([1, 0, 0, 0], 4, 1), ([7, 3, 2, 1], 4, 2), ([0, 0], 2, 0)]
)
def test_the_group_with_most_tokens_decides_for_every_rank(counts: list[int], ranks: int, expected: int) -> None:
    assert scattered_tokens(counts, ranks) == expected


@pytest.mark.row("E01")
@pytest.mark.case("C48")
@given(counts=st.lists(st.integers(0, 9000), min_size=1, max_size=8), ranks=st.integers(1, 16))
def test_no_rank_brings_more_than_all_are_told_and_one_brings_as_many(counts: list[int], ranks: int) -> None:
    """Each group's tokens are dealt out over its attention ranks; what all are told does not hang on who asks."""
    told = scattered_tokens(counts, ranks)
    dealt = [len(range(rank, count, ranks)) for count in counts for rank in range(ranks)]
    assert max(dealt) == told
    assert scattered_tokens(counts[::-1], ranks) == told


@pytest.mark.case("C48")
def test_the_policy_says_the_same_on_every_rank_the_empty_ones_included() -> None:
    counts, ranks = [1, 0, 0, 0], 4
    decisions = {decide_finalize(replace(GOOD, m=scattered_tokens(counts, ranks))) for _ in counts}
    assert decisions == {Decision(True)}
    by_their_own = {decide_finalize(replace(GOOD, m=count)).eligible for count in counts}
    assert by_their_own == {True, False}, "by its own count an empty rank would stay out of the collective"


@pytest.mark.row("E01")
@pytest.mark.parametrize(
    ("counts", "ranks", "named"), [([1], 0, "attention_tp_size"), ([], 4, "counts"), ([3, -1], 4, "-1")]
)
def test_token_counts_that_cannot_be_are_refused(counts: list[int], ranks: int, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        scattered_tokens(counts, ranks)


# --- early load ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flagged:
    tile: int
    load_shared_expert_before_pdl: bool = False


@dataclass(frozen=True)
class Plain:
    tile: int


@dataclass(frozen=True)
class Target:
    preset: Any


@dataclass(frozen=True)
class Routes:
    targets: tuple[Target, ...]


@dataclass(frozen=True)
class Profile:
    finalize_routes: Routes
    all_reduce_routes: Routes


@dataclass(frozen=True)
class Config:
    profiles: tuple[Profile, ...]


def a_config(*presets: Any) -> Config:
    return Config((Profile(Routes(tuple(map(Target, presets))), Routes((Target(Flagged(9)),))),) * 2)


@pytest.mark.row("A03")
def test_the_early_load_is_set_where_it_exists_and_nowhere_else() -> None:
    config = a_config(Flagged(1), Plain(2), Flagged(3, True))
    kept = replace(config)
    changed = with_early_shared_load(config, speculative=False)
    assert config == kept
    assert changed is not config
    for before, after in zip(config.profiles, changed.profiles, strict=True):
        assert [getattr(t.preset, FLAG, None) for t in after.finalize_routes.targets] == [True, None, True]
        assert after.finalize_routes.targets[1] is before.finalize_routes.targets[1]
        assert after.all_reduce_routes is before.all_reduce_routes
    assert with_early_shared_load(changed, speculative=False) == changed


@pytest.mark.row("A03")
def test_a_config_without_the_flag_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=FLAG):
        with_early_shared_load(a_config(Plain(1)), speculative=False)


@pytest.mark.row("A04")
def test_speculation_keeps_the_safe_order() -> None:
    config = a_config(Flagged(1))
    assert with_early_shared_load(config, speculative=True) is config


# --- policy ----------------------------------------------------------------------------------------------------

GOOD = Situation(forward_mode=ForwardMode.DECODE, m=4, max_m=8, tp_size=2)

COMMON: dict[str, Any] = {
    "enabled": False, "prepared": False, "model_type": "qwen3_5_text", "draft_model": True,
    "forward_mode": ForwardMode.MIXED, "m": 9, "max_m": 3, "tp_size": 1, "pipeline_size": 2,
    "data_parallel_attention": True, "attention_context_parallel": 2, "input_scattered": True, "all_to_all": "deepep",
    "multiplexed_streams": True, "deepstack": True, "gemma_norm": False, "has_residual": False,
}  # fmt: skip
FINALIZE: dict[str, Any] = {
    "mlp_scattered": True,
    "expert_parallel": 2,
    "sparse_moe": False,
    "supports_deferral": False,
    "shared_expert_separate": False,
}
ALL_REDUCE: dict[str, Any] = {
    "gathers_hidden_states": False,
    "residual_full": False,
    "attention_data_parallel": 2,
    "attention_tp_size": 1,
    "quantised_communication": True,
}


@pytest.mark.row("B13")
def test_the_conditions_are_all_that_a_situation_has() -> None:
    assert {f.name for f in dataclasses.fields(Situation)} == {*COMMON, *FINALIZE, *ALL_REDUCE}
    assert decide_finalize(GOOD) == decide_all_reduce(GOOD) == Decision(True)


@pytest.mark.row("B13")
@pytest.mark.row("B16")
@pytest.mark.row("B17")
@pytest.mark.row("C01")
@pytest.mark.row("C07")
@pytest.mark.row("C09")
@pytest.mark.case("C43")
@pytest.mark.parametrize("name", [*COMMON, *FINALIZE, *ALL_REDUCE])
def test_each_condition_alone_decides(name: str) -> None:
    value = (COMMON | FINALIZE | ALL_REDUCE)[name]
    flipped = replace(GOOD, **{name: value})
    for decide, concerned in ((decide_finalize, {*COMMON, *FINALIZE}), (decide_all_reduce, {*COMMON, *ALL_REDUCE})):
        decision = decide(flipped)
        assert decision.eligible is (name not in concerned), (name, decision)
        assert len(decision.reasons) == (name in concerned), (name, decision)


@pytest.mark.row("B13")
def test_every_reason_that_applies_is_given() -> None:
    decision = decide_finalize(replace(GOOD, m=0, tp_size=1, expert_parallel=4, input_scattered=True))
    assert len(decision.reasons) == 4
    assert not decision


@pytest.mark.row("B01")
def test_only_three_modes_fuse_and_a_new_one_would_not() -> None:
    fusing = {mode for mode in ForwardMode if mode.fuses}
    assert fusing == {ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}
    for mode in ForwardMode:
        assert decide_finalize(replace(GOOD, forward_mode=mode)).eligible is (mode in fusing)


@pytest.mark.row("B15")
@pytest.mark.row("C06")
def test_the_last_layer_defers_and_one_that_cannot_defer_runs_its_collective() -> None:
    yes, no = Decision(True), Decision(False, ("why",))
    for last in (True, False):
        assert plan_layer(yes, generic_fuse=False, last=last).defer
    assert plan_layer(no, generic_fuse=True, last=False).fuse
    for plan in (plan_layer(no, generic_fuse=True, last=True), plan_layer(no, generic_fuse=False, last=False)):
        assert not plan.fuse
        assert not plan.defer


@pytest.mark.row("A11")
def test_a_handoff_says_which_tensor_does_not_fit() -> None:
    handoff = handoff_from_flashinfer(**deferred(), m=3, hidden=16, top_k=10)
    handoff.check(hidden=16, top_k=10, shared_expert=True)
    bad: dict[str, tuple[FinalizeHandoff, dict[str, Any]]] = {
        "routed_output": (handoff, {"hidden": 24}),
        "expert_weights": (replace(handoff, expert_weights=torch.zeros(3, 9)), {}),
        "permuted_indices": (replace(handoff, permuted_indices=torch.zeros(2, 10)), {}),
        "gated_shared_output": (replace(handoff, gated_shared_output=None), {}),
    }
    for name, (broken, geometry) in bad.items():
        with pytest.raises(ShapeError, match=name):
            broken.check(**({"hidden": 16, "top_k": 10, "shared_expert": True} | geometry))
