"""What each installed adapter says of machines that are not here, and what would be chosen there.

Row D29, the engine's switch for deterministic inference against FlashInfer's prefill, is about the engine alone: our
settings have no such switch, and no adapter promises batch invariance (docs/contract.md, clause "order").
"""

from __future__ import annotations

import pytest

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import UnavailableError, UnknownNameError
from qwen35.domain.platform import Platform
from qwen35.services.registry import AdapterRegistry

RULE = "gated_delta_rule"
HOPPER = Platform(device="cuda:0", device_name="Hopper", compute_capability=(9, 0), multiprocessors=132)
MACHINES = {
    "cpu": Platform(device="cpu", device_name="CPU"), "cuda": HOPPER,
    "xpu": Platform(device="xpu:0", device_name="XPU"), "npu": Platform(device="npu:0", device_name="NPU"),
    "hip": Platform(device="hip:0", device_name="Instinct"),
}  # fmt: skip


@pytest.mark.row("I04")
@pytest.mark.parametrize("kind", sorted(MACHINES))
def test_every_adapter_says_of_every_machine_whether_and_why_not(kind: str) -> None:
    registry = AdapterRegistry(MACHINES[kind])
    for port in registry.ports():
        answers = {name: registry.usable(port, name) for name in registry.names(port)}
        assert all(answer.ok != bool(answer.reasons) for answer in answers.values()), answers
        assert answers["reference"], "plain torch is the same everywhere; its capabilities say for which devices"
        if kind != "cuda":
            refused = {name: answer for name, answer in answers.items() if not name.startswith("reference")}
            assert all(any(kind in reason for reason in answer.reasons) for answer in refused.values()), refused


@pytest.mark.row("D28")
def test_on_hopper_the_best_rank_is_the_default_of_every_phase_and_flashinfer_is_named() -> None:
    """The engine's default narrows FlashInfer's prefill to what it was validated on (widths, dtypes, chunk sizes). Here
    an adapter's capabilities say so of each plan, and the default is the adapter of the highest rank that keeps all."""
    registry = AdapterRegistry(HOPPER)
    names = registry.names(RULE)
    assert names.index("triton") < names.index("flashinfer"), names
    if not registry.usable(RULE, "triton"):
        pytest.skip("Triton is not installed")
    choice = registry.choose(RULE, "auto")
    assert choice.name == "triton"
    assert registry.adapter(RULE, "triton").capabilities.phases == frozenset(Phase)


@pytest.mark.row("D28")
def test_a_machine_that_no_kernel_is_for_is_told_every_reason() -> None:
    old = Platform(device="cuda:0", device_name="Turing", compute_capability=(7, 5))
    with pytest.raises(UnavailableError) as refused:
        AdapterRegistry(old).choose(RULE, "auto")
    said = str(refused.value)
    for name in ("triton: ", "flashinfer: ", "reference: deviates from capture"):
        assert name in said
    assert said.count("compute capability requires") == 3


@pytest.mark.row("D30")
@pytest.mark.parametrize("name", ["flashinfer", "sglang"])
def test_a_named_adapter_without_its_gpu_is_an_error_with_the_reason(name: str) -> None:
    with pytest.raises(UnavailableError, match="device requires cuda, got cpu"):
        AdapterRegistry(MACHINES["cpu"]).choose(RULE, name)


@pytest.mark.row("D30")
@pytest.mark.parametrize("name", ["helion", "cutedsl", ""])
def test_a_backend_of_another_name_is_unknown_and_the_known_ones_are_listed(name: str) -> None:
    with pytest.raises(UnknownNameError, match="known: flashinfer, reference"):
        AdapterRegistry(MACHINES["cpu"]).choose(RULE, name)
