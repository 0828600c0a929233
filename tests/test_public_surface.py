"""What users may import is a decision, so it is a test."""

from __future__ import annotations

import dataclasses
import inspect

import qwen35
from qwen35.ports import gated_delta_rule, short_convolution


def fields(call: type) -> list[str]:
    return [f.name for f in dataclasses.fields(call)]


def test_the_package_exports_these_names() -> None:
    assert sorted(qwen35.__all__) == ["Container", "Settings", "__version__", "adapter", "build", "close"]
    assert all(getattr(qwen35, name) is not None for name in qwen35.__all__)


def test_the_port_of_the_gated_delta_rule_exports_these_names() -> None:
    assert sorted(gated_delta_rule.__all__) == [
        "CheckpointPlan", "CommitCall", "DecodeCall", "ExtendCall", "ExtendResult", "GatedDeltaRule", "Gates",
        "GdnCall", "GdnPlan", "LogGates", "RawGates", "ReplayPlan", "VerifyCall",
    ]  # fmt: skip


def test_the_port_of_the_short_convolution_exports_these_names() -> None:
    assert sorted(short_convolution.__all__) == [
        "Activation", "ConvCall", "ConvCommitCall", "ConvDecodeCall", "ConvExtendCall", "ConvPlan", "ConvVerifyCall",
        "ShortConvolution",
    ]  # fmt: skip


def test_call_objects_have_the_contracts_fields_and_are_frozen_and_keyword_only() -> None:
    g = gated_delta_rule
    assert fields(g.RawGates) == ["a", "b", "A_log", "dt_bias"]
    assert fields(g.LogGates) == ["g", "beta"]
    tokens = ["q", "k", "v", "gates", "states", "slots"]
    assert fields(g.DecodeCall) == [*tokens, "write_slots", "scale", "out"]
    assert fields(g.ExtendCall) == [
        *tokens, "cu_seqlens", "seq_lens_host", "fresh", "write_slots", "checkpoints", "scale", "out",
    ]  # fmt: skip
    assert fields(g.VerifyCall) == [*tokens, "intermediates", "rows", "parents", "scale", "out"]
    assert sorted(fields(g.CommitCall)) == ["intermediates", "last", "rows", "slots", "states"]
    for call in (g.RawGates, g.DecodeCall, g.ExtendCall, g.VerifyCall, g.CommitCall, g.GdnPlan, g.CheckpointPlan):
        assert call.__dataclass_params__.frozen
        assert all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(call).parameters.values())


def test_both_ports_have_the_same_verbs() -> None:
    phases = {"decode", "extend", "verify", "commit"}
    verbs = phases | {"capabilities", "prepare", "supports", "refresh_parameters", "close"}
    for port in (gated_delta_rule.GatedDeltaRule, short_convolution.ShortConvolution):
        assert {name for name in vars(port) if not name.startswith("_")} == verbs
