"""The workspace that SGLang's CuTe DSL fusion asks for, handed out by us, and what its own layers then do with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion
from fusion_machine import EPS, HIDDEN, TOP_K, FusedMachine, Group, gemma, launch
from seam_machine import close, installed_seam, start

from qwen35 import sglang_plugin
from qwen35.adapters.sglang.seam_explain import cutedsl_line
from qwen35.domain.errors import ConfigurationError, UnavailableError, ValueRangeError
from qwen35.domain.precision import UNIT_ROUNDOFF

OLDER = installed_seam().version == "0.5.20"
older_only = pytest.mark.skipif(not OLDER, reason="in 0.5.23 an ineligible handoff completes itself")
BF16 = torch.bfloat16


pytestmark = pytest.mark.usefixtures("groups")


def sglangs_service() -> Any:
    """What the layers of a fused model share, unprepared."""
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "top_k": TOP_K, "rms_epsilon": EPS}
    if OLDER:
        from sglang.srt.layers.moe.qwen35_flashinfer_fusion import Qwen35FlashInferFusionService

        return Qwen35FlashInferFusionService(**sizes)
    from sglang.srt.layers.layer_boundary.fusions.cutedsl import CuteDSLWorkspace

    return CuteDSLWorkspace(**sizes)


def ask(**changes: Any) -> Any:
    """SGLang's function, as its services call it."""
    from sglang.srt.layers.flashinfer_mnnvl_cutedsl import get_flashinfer_mnnvl_cutedsl_ar_fusion

    sizes = {"hidden_size": HIDDEN, "top_k": TOP_K, "max_m": 8, "rms_epsilon": EPS, "weight_bias": 0.0}
    return get_flashinfer_mnnvl_cutedsl_ar_fusion(**sizes | changes)


def handoff(m: int, rows: int = 9) -> Any:
    """SGLang's own, with one dropped choice."""
    indices = torch.randint(0, rows, (m, TOP_K), dtype=torch.int32)
    indices[0, 0] = -1
    values: dict[str, Any] = {
        "routed_output": torch.randn(rows, HIDDEN).to(BF16), "expert_weights": torch.rand(m, TOP_K).to(BF16),
        "permuted_indices": indices, "gated_shared_output": torch.randn(m, HIDDEN).to(BF16), "m": m,
    }  # fmt: skip
    if OLDER:
        from sglang.srt.layers.moe.qwen35_flashinfer_fusion import Qwen35MoeFinalizeHandoff

        return Qwen35MoeFinalizeHandoff(**values)
    from sglang.srt.layers.layer_boundary.fusions.moe_finalize import MoeDeferredFinalize

    return MoeDeferredFinalize(**values, finish=lambda: torch.zeros(m, HIDDEN))


def test_sglangs_service_is_handed_our_workspace(groups: dict[str, Group]) -> None:
    machine, service = FusedMachine(), sglangs_service()
    service.prepare(max_m=5)
    signature = machine.fusion.made[0].signature
    assert signature.group is groups["tp_group"].device_group
    assert (signature.hidden, signature.top_k, signature.max_m, signature.eps) == (HIDDEN, TOP_K, 5, EPS)
    assert (signature.dtype, signature.weight_bias, signature.shared_expert) == ("bfloat16", 0.0, True)
    assert service.max_m == 5
    assert [service.supports(m) for m in (0, 1, 5, 6)] == [False, True, True, False]
    gamma, residual = torch.ones(HIDDEN, dtype=BF16), torch.randn(3, HIDDEN).to(BF16)
    service.finalize(handoff(3), residual, gamma)
    service.all_reduce_residual_rms_norm(torch.randn(3, HIDDEN).to(BF16), residual, gamma)
    assert [name for name, _ in machine.fused] == ["finalize", "all-reduce"]
    assert machine.counters.total("calls", port="finalize_fusion", adapter="fake") == 2


def test_numbers_are_those_of_the_contract() -> None:
    with launch(tp_size=1, attn_tp_size=1, moe_tp_size=1):
        one = start(finalize="reference")
        try:
            service, given = sglangs_service(), handoff(4)
            service.prepare(max_m=4)
            gamma, residual = torch.randn(HIDDEN).to(BF16), torch.randn(4, HIDDEN).to(BF16)
            norm, total = service.finalize(given, residual, gamma)
        finally:
            one.container.finalize().close()
    expected = residual.double() + given.gated_shared_output.double()
    for token in range(4):
        for weight, row in zip(given.expert_weights[token], given.permuted_indices[token].tolist(), strict=True):
            if row >= 0:
                expected[token] += weight.double() * given.routed_output[row].double()
    bound = UNIT_ROUNDOFF["bfloat16"] + 64 * UNIT_ROUNDOFF["float32"]
    close(total, expected, bound)
    scale = torch.rsqrt(expected.square().mean(-1, keepdim=True) + EPS)
    close(norm, expected * scale * gamma.double(), bound)


def test_outputs_that_are_given_are_filled() -> None:
    FusedMachine()
    handed, residual = ask(), torch.randn(3, HIDDEN).to(BF16)
    out, gamma = torch.full_like(residual, torch.nan), torch.ones(HIDDEN, dtype=BF16)
    norm, total = handed.all_reduce_residual_rms_norm(
        local_contribution=residual.clone(), residual=residual, gamma=gamma, norm_output=out
    )
    assert norm is out
    assert total is not residual


def test_one_workspace_a_process() -> None:
    machine = FusedMachine()
    handed = ask()
    assert ask(max_m=3).max_m == 8, "what the live one covers is the live one"
    with pytest.raises(UnavailableError, match="max_m: has 8, asked 9"):
        ask(max_m=9)
    with pytest.raises(UnavailableError, match="hidden: has 16, asked 32"):
        ask(hidden_size=32)
    assert machine.fusion.attempts == 1
    handed.destroy()
    assert not handed.supports(1)


@older_only
def test_a_lookup_without_sizes_finds_what_was_handed_out() -> None:
    from sglang.srt.layers.flashinfer_mnnvl_cutedsl import get_flashinfer_mnnvl_cutedsl_ar_fusion as look_up

    FusedMachine()
    with pytest.raises(RuntimeError, match="was not initialized before use"):
        look_up()
    handed = ask()
    assert look_up() is handed


@pytest.mark.row("B17")
def test_multiplexed_streams_are_refused() -> None:
    from sglang.srt.runtime_context import get_disagg

    machine = FusedMachine()
    with get_disagg().override(enable_pdmux=True):
        with pytest.raises(ConfigurationError, match="multiplexed"):
            ask()
        prepare_without_a_fused_model()
    assert machine.fusion.attempts == 0


def prepare_without_a_fused_model() -> None:
    """Nothing to prepare: silent on 0.5.20; on 0.5.23, where a launch argument asks for the fusion, SGLang refuses."""
    if OLDER:
        from sglang.srt.layers.moe.qwen35_flashinfer_fusion import prepare_qwen35_flashinfer_fusion

        prepare_qwen35_flashinfer_fusion(torch.nn.Module(), None)
        return
    from sglang.srt.layers.layer_boundary.fusions.cutedsl import prepare_cutedsl_fusion

    with pytest.raises(ValueError, match="installed no CuTe DSL fusion service"):
        prepare_cutedsl_fusion(torch.nn.Module(), max_running_requests=8)


def test_unset_or_switched_off_sglang_makes_its_own_and_says_what_it_needs() -> None:
    machine = FusedMachine(finalize="auto")
    with pytest.raises(RuntimeError, match="requires CUDA"):
        ask()
    FusedMachine(fusion=FakeFusion())
    sglang_plugin.uninstall()
    with pytest.raises(RuntimeError, match="requires CUDA"):
        ask()
    assert machine.fusion.attempts == 0


def test_errors_of_a_call_reach_sglang_before_anything_is_launched() -> None:
    machine = FusedMachine()
    handed, residual = ask(), torch.randn(9, HIDDEN).to(BF16)
    with pytest.raises(ValueRangeError, match=r"m must be in 1\.\.8"):
        handed.all_reduce_residual_rms_norm(
            local_contribution=residual, residual=residual, gamma=torch.ones(HIDDEN, dtype=BF16)
        )
    assert not machine.fused


def test_sglangs_switch_on_a_gpu_that_cannot_serve_it_is_explained() -> None:
    assert cutedsl_line((10, 0)) is None
    for capability in ((9, 0), None):
        line = cutedsl_line(capability)
        assert line is not None
        assert "SGLang itself refuses the model; switch it off and set QWEN35_FINALIZE" in line


def communicator(service: Any, norm: Any) -> Any:
    from sglang.srt.layers.communicator import ScatterMode
    from sglang.srt.layers.moe.qwen35_flashinfer_fusion import Qwen35FlashInferLayerCommunicator

    made = Qwen35FlashInferLayerCommunicator.__new__(Qwen35FlashInferLayerCommunicator)
    made.fusion_service, made.input_layernorm, made.is_last_layer = service, norm, True
    made.layer_scatter_modes = SimpleNamespace(mlp_mode=ScatterMode.FULL)
    made._context, made._speculative_algo = SimpleNamespace(tp_size=2), None
    return made


def batch(m: int | None, mode: str = "DECODE") -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    ids = {} if m is None else {"input_ids": torch.zeros(m, dtype=torch.int64)}
    return SimpleNamespace(forward_mode=ForwardMode[mode], **ids)


@older_only
@pytest.mark.row("B14")
def test_a_handoff_meets_the_next_norm_or_is_an_error() -> None:
    machine, service = FusedMachine(), sglangs_service()
    service.prepare(max_m=8)
    norm = gemma(HIDDEN, BF16)
    layer, residual, extra = communicator(service, norm), *(torch.randn(3, HIDDEN).to(BF16) for _ in range(2))
    layer.prepare_attn(handoff(3), residual, batch(3), post_residual_addition=extra)
    ((name, seen),) = machine.fused
    assert name == "finalize"
    assert torch.equal(seen, residual + extra), "added before the finalize, so both outputs have it"
    with pytest.raises(RuntimeError, match="ineligible path"):
        layer.prepare_attn(handoff(3), residual, batch(3, "MIXED"))
    with pytest.raises(RuntimeError, match="requires residual"):
        layer.prepare_attn(handoff(3), None, batch(3))
    layer.input_layernorm = torch.nn.Module()
    with pytest.raises(RuntimeError, match="requires GemmaRMSNorm"):
        layer.prepare_attn(handoff(3), residual, batch(3))
    assert len(machine.fused) == 1


@older_only
@pytest.mark.row("B13", "B15", "B16")
def test_the_last_layer_defers_where_the_finalize_is_eligible() -> None:
    from sglang.srt.layers.communicator import ScatterMode
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_flags, get_forward

    FusedMachine()
    service = sglangs_service()
    layer = communicator(service, None)
    defers = layer.should_fuse_mlp_allreduce_with_next_layer
    assert not defers(batch(3)), "not prepared"
    service.prepare(max_m=8)
    assert defers(batch(3))
    assert defers(batch(8, "TARGET_VERIFY"))
    assert not any(defers(one) for one in (batch(0), batch(9), batch(None), batch(3, "MIXED")))
    for flag in (
        get_flags().dp.override(enabled=True), get_flags().moe.override(a2a_backend=MoeA2ABackend.DEEPEP),
        get_forward().scoped(attn_input_scattered=True), launch(moe_ep_size=2, moe_tp_size=1),
        launch(attn_cp_size=2, attn_tp_size=1),
    ):  # fmt: skip
        with flag:
            assert not defers(batch(3))
    layer.layer_scatter_modes.mlp_mode = ScatterMode.SCATTERED
    assert not defers(batch(3))


@older_only
@pytest.mark.row("C04", "C05")
def test_an_mlps_output_is_what_its_layer_announces_by_our_workspace() -> None:
    from sglang.srt.models.qwen3_5 import _finish_mlp_output

    machine, service = FusedMachine(), sglangs_service()
    service.prepare(max_m=3)
    layer = communicator(service, gemma(HIDDEN, BF16))
    defers = layer.should_fuse_mlp_allreduce_with_next_layer
    given = _finish_mlp_output(handoff(3), expect_deferred=defers(batch(3)))
    layer.prepare_attn(given, torch.randn(3, HIDDEN).to(BF16), batch(3))
    assert [name for name, _ in machine.fused] == ["finalize"], "what is announced, ours takes"
    with pytest.raises(RuntimeError, match="expected a FlashInfer deferred-finalize handoff"):
        _finish_mlp_output(torch.zeros(3, HIDDEN), expect_deferred=defers(batch(3)))
    with pytest.raises(RuntimeError, match="unexpected"):  # one more than our workspace has room for
        _finish_mlp_output(handoff(4), expect_deferred=defers(batch(4)))
    share = torch.zeros(4, HIDDEN)
    assert _finish_mlp_output(share, expect_deferred=defers(batch(4))) is share
    assert share._sglang_needs_allreduce_fusion  # type: ignore[attr-defined]


def test_sglang_asks_for_a_workspace_for_the_mixtures_target_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the seam relies on; SGLang's own."""
    from sglang.srt.models.qwen3_5 import _use_mnnvl_cutedsl_fusion
    from sglang.srt.runtime_context import get_exec

    def asks(kind: str, draft: bool = False) -> bool:
        return bool(_use_mnnvl_cutedsl_fusion(SimpleNamespace(model_type=kind), draft))

    assert not asks("qwen3_5_moe_text")
    monkeypatch.setenv("SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION", "1")
    with get_exec().comm.override(flashinfer_allreduce_fusion_backend="cutedsl"):
        assert asks("qwen3_5_moe_text")
        assert not asks("qwen3_5_text")
        assert not asks("qwen3_5_moe_text", draft=True)
