"""What no target checks, as it is read while SGLang builds its engine: moved, it is one line, and SGLang runs alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusion_machine import FusedMachine, gate
from seam_machine import PLACE, Machine, installed_seam, start
from test_faults import ALONE, lines, scheduler_starts

from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seams import installed_release
from qwen35.settings import load_settings

SLOTS = ("decode_kernel", "extend_kernel", "verify_kernel", "tree_verify_kernel")
Break = Callable[[pytest.MonkeyPatch], str]


class Gone:
    """Stands in a class for an attribute that a release no longer has: SGLang's own code sets it, nobody finds it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}")

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self.name] = value


def backend_lacks(name: str) -> Break:
    def breaks(monkeypatch: pytest.MonkeyPatch) -> str:
        from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

        monkeypatch.setattr(GDNAttnBackend, name, Gone(name), raising=False)
        return f"AttributeError: 'GDNAttnBackend' object has no attribute '{name}'"

    return breaks


def dispatcher_lacks_the_tree_kernel(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNKernelDispatcher

    monkeypatch.setattr(GDNKernelDispatcher, "tree_verify_kernel", Gone("tree_verify_kernel"), raising=False)
    return "AttributeError: 'GDNKernelDispatcher' object has no attribute 'tree_verify_kernel'"


def cache_lacks_replayed_values(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt.mem_cache.memory_pool import MambaPool

    monkeypatch.setattr(MambaPool.State, "replayssm_d", Gone("replayssm_d"))
    return "AttributeError: 'SpeculativeState' object has no attribute 'replayssm_d'"


def launch_lacks_determinism(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt import runtime_context

    real = runtime_context.get_exec
    says = "AttributeError: 'Exec' object has no attribute 'deterministic'"

    class Exec:
        def __getattr__(self, name: str) -> Any:
            if name == "deterministic":
                raise AttributeError(says.partition(": ")[2])
            return getattr(real(), name)

    monkeypatch.setattr(runtime_context, "get_exec", Exec)
    return says


BREAKS = [
    dispatcher_lacks_the_tree_kernel, backend_lacks("verify_intermediate_state_indices"),
    backend_lacks("mis_metadata"), cache_lacks_replayed_values, launch_lacks_determinism,
]  # fmt: skip
NAMES = ["kernel slot", "verify rows", "multi-item scoring", "ReplaySSM", "determinism"]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for phase in ("DECODE", "EXTEND", "VERIFY"):
        monkeypatch.setenv(f"QWEN35_GDN_{phase}", "reference")


def assert_sglangs_own(dispatcher: Any) -> None:
    modules = [type(vars(dispatcher)[name]).__module__ for name in SLOTS]
    assert all(module.startswith("sglang.") for module in modules), modules


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("breaks", BREAKS, ids=NAMES)
def test_sglang_builds_its_engine_alone_where_what_it_is_read_by_moved(
    breaks: Break, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machines: list[Machine] = []
    says: list[str] = []

    def engine() -> None:
        machines.append(Machine(draft=2))  # before it: had its kernels exchanged, and gets them back
        assert sglang_plugin.running() is not None
        assert type(machines[0].dispatcher.decode_kernel).__module__.startswith("qwen35.")
        says.append(breaks(monkeypatch))
        machines.append(Machine(draft=2))

    scheduler_starts(monkeypatch, engine)
    assert len(machines) == 2, "SGLang's constructor went on"
    (line,) = lines(caplog)
    assert line == (
        f"qwen35: the seam for SGLang {installed_release()}: in the hook on "
        f"{installed_seam().targets['gdn_backend'].path}: {says[0]}. {ALONE}"
    )
    assert seam.installed() == ()
    assert sglang_plugin.running() is None
    for machine in machines:
        assert_sglangs_own(machine.dispatcher)


@pytest.mark.usefixtures("chosen")
def test_strict_ends_the_launch_in_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_SGLANG_STRICT", "true")
    says = dispatcher_lacks_the_tree_kernel(monkeypatch)

    def engine() -> None:
        Machine()

    with pytest.raises(SystemExit) as caught:
        scheduler_starts(monkeypatch, engine)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert seam.installed() == ()


def test_kernels_that_were_exchanged_by_then_are_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """The switch that is read last."""
    settings = load_settings(None, device="cpu", gdn_extend="reference")
    release = dataclasses.replace(installed_seam(), gather_switch="gathers_no_more")
    sglang_plugin.start(settings, release, PLACE, sglang_plugin.make_container(settings, PLACE))
    machine = Machine()
    (line,) = lines(caplog)
    assert "'GDNAttnBackend' object has no attribute 'gathers_no_more'" in line
    assert_sglangs_own(machine.dispatcher)
    assert sglang_plugin.running() is None


def test_what_sglangs_own_constructor_raises_is_its_callers(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    one = start(gdn_decode="reference")
    with pytest.raises(AttributeError):
        GDNAttnBackend(SimpleNamespace())
    assert sglang_plugin.running() is one
    assert lines(caplog) == []


# The relay


@pytest.mark.skipif("relay" not in installed_seam().targets, reason="this release is mended")
@pytest.mark.parametrize("name", ["need_topk", "draft_probs_buf", "output_tokens_buf"])
def test_a_future_map_that_moved_is_sglangs_own(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before a step is served by it, when it is too late to give up."""
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    one = start(gdn_decode="reference")
    machine = Machine()
    monkeypatch.setattr(FutureMap, name, Gone(name), raising=False)
    pool = SimpleNamespace(req_to_token=torch.zeros(2, 4, dtype=torch.int32))
    made = FutureMap("cpu", SpeculativeAlgorithm.from_string("EAGLE"), pool)
    assert name in vars(made), "SGLang's constructor went on"
    (line,) = lines(caplog)
    assert line == (
        f"qwen35: the seam for SGLang {installed_release()}: in the hook on {one.release.targets['relay'].path}: "
        f"AttributeError: 'FutureMap' object has no attribute {name!r}. {ALONE}"
    )
    assert seam.installed() == ()
    assert sglang_plugin.running() is None
    assert_sglangs_own(machine.dispatcher)


# The fused norm


def runner_lacks_its_kind(machine: FusedMachine, _: pytest.MonkeyPatch) -> str:
    del machine.runner.is_draft_worker
    return "'types.SimpleNamespace' object has no attribute 'is_draft_worker'"


def model_lacks_its_eps(machine: FusedMachine, _: pytest.MonkeyPatch) -> str:
    del machine.runner.model_config.hf_text_config.rms_norm_eps
    return "'types.SimpleNamespace' object has no attribute 'rms_norm_eps'"


def flags_lack_the_draft_scope(_: FusedMachine, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which every step asks for."""
    from sglang.srt import runtime_context

    real = runtime_context.get_flags
    says = "'MoeFlags' object has no attribute 'in_speculative_scope'"

    class Flags:
        def __getattr__(self, name: str) -> Any:
            return Moe() if name == "moe" else getattr(real(), name)

    class Moe:
        def __getattr__(self, name: str) -> Any:
            if name == "in_speculative_scope":
                raise AttributeError(says)
            return getattr(real().moe, name)

    monkeypatch.setattr(runtime_context, "get_flags", Flags)
    return says


def step_lacks_the_scattered_input(_: FusedMachine, monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt.runtime_context import get_forward

    monkeypatch.delitem(get_forward()._plain, "attn_input_scattered")
    return "ForwardFlags has no flag 'attn_input_scattered'"


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    "breaks",
    [runner_lacks_its_kind, model_lacks_its_eps, flags_lack_the_draft_scope, step_lacks_the_scattered_input],
)
@pytest.mark.parametrize("strict", [False, True], ids=["alone", "strict"])
def test_a_warm_up_that_moved_leaves_fusion_to_sglang(
    breaks: Callable[[FusedMachine, pytest.MonkeyPatch], str], strict: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from sglang.srt.layers import flashinfer_comm_fusion
    from sglang.srt.runtime_context import get_exec

    warmed: list[int] = []
    monkeypatch.setattr(
        flashinfer_comm_fusion, "pre_initialize_workspaces", lambda **wanted: warmed.append(wanted["hidden_dim"])
    )
    machine = FusedMachine(strict=strict)
    says = breaks(machine, monkeypatch)
    with get_exec().comm.override(flashinfer_allreduce_fusion_backend="trtllm"):
        if strict:
            with pytest.raises(SystemExit, match=says):
                machine.warm_up()
        else:
            machine.warm_up()
            assert len(warmed) == 1, "SGLang's own warm-up ran"
    (line,) = lines(caplog)
    assert says in line
    assert installed_seam().targets["fusion_prepare"].path in line
    assert line.endswith(ALONE) is not strict
    assert seam.installed() == ()
    assert sglang_plugin.running() is None
    assert machine.fusion.attempts == 0
    assert not gate(4)
