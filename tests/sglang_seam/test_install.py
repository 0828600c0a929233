"""All hooks or none, said in one line, and off again."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from release_targets import WEIGHT_UPDATES, update_path
from seam_machine import Machine, installed_seam, start
from torch.utils._python_dispatch import TorchDispatchMode

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seam import Target
from qwen35.adapters.sglang.seams import TESTED, installed_release, release_seam
from qwen35.container import build
from qwen35.domain.errors import UnavailableError

RELEASE = installed_release() or ""
NAMES = {"gdn_decode": "fake", "gdn_extend": "fake", "gdn_verify": "fake"}


def backend_class() -> Any:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    return GDNAttnBackend


def rename_a_target(monkeypatch: pytest.MonkeyPatch) -> str:
    """As in a release that renamed a method which the seam hooks; what the error must say."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    monkeypatch.setattr(Updater, "update_from_ipc", Updater.update_weights_from_ipc, raising=False)
    monkeypatch.delattr(Updater, "update_weights_from_ipc")
    return "SchedulerWeightUpdaterManager.update_weights_from_ipc is not there"


def test_the_installed_release_is_one_that_the_seam_knows() -> None:
    assert installed_release() in TESTED
    assert installed_seam().version == installed_release()


def test_every_target_is_there_with_its_signature() -> None:
    assert seam.differences(installed_seam().targets) == ()


def test_a_release_outside_the_tested_ones_is_refused_by_name_unless_told_to_try() -> None:
    with pytest.raises(UnavailableError, match=r"0\.5\.99.*0\.5\.20 and 0\.5\.23.*QWEN35_SGLANG_UNTESTED"):
        release_seam("0.5.99")
    assert release_seam("0.5.99", untested=True).version == "0.5.23"


def test_a_renamed_target_is_one_clear_error_and_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    says = rename_a_target(monkeypatch)
    with pytest.raises(UnavailableError) as caught:
        start(**dict.fromkeys(NAMES, "reference"))
    assert installed_release() in str(caught.value)
    assert len(caught.value.reasons) == 1
    assert says in str(caught.value)
    assert seam.installed() == ()
    machine = Machine()
    assert type(machine.dispatcher.decode_kernel).__name__ == "TritonGDNKernel"


def test_a_changed_signature_says_what_was_expected_and_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_extend(self: Any, layer: Any, batch: Any, qkv: Any, **kwargs: Any) -> None: ...

    monkeypatch.setattr(backend_class(), "forward_extend", forward_extend)
    expected = r"must take \(self, layer, forward_batch, mixed_qkv, a, b, \*\*kwargs\), takes \(self, layer, batch, qkv"
    with pytest.raises(UnavailableError, match=expected):
        start()
    assert seam.installed() == ()


def test_a_patch_that_does_not_take_turns_all_of_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        def first(self) -> str:
            return "first"

        class second:  # noqa: N801
            """A class where a function stood: SGLang's registry logs that it cannot be hooked, and goes on."""

            def __init__(self, whole: object = None) -> None: ...

    from sglang.srt.plugins.hook_registry import HookRegistry

    module = types.ModuleType("a_module_that_moved")
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    module.Thing = Thing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_module_that_moved", module)
    targets = {name: Target(f"a_module_that_moved:Thing.{name}") for name in ("first", "second")}
    with pytest.raises(UnavailableError, match=r"1\.2\.3.*Thing.second was not patched"):
        seam.install("1.2.3", targets, dict.fromkeys(targets, lambda *_, **__: "hooked"))
    assert Thing().first() == "first"


def test_hooks_switch_off_and_on_again() -> None:
    for _ in range(2):
        start(gdn_decode="reference")
        machine = Machine()
        dispatcher = machine.dispatcher
        assert type(dispatcher.decode_kernel).__name__ == "GdnKernel"
        sglang_plugin.uninstall()
        assert type(dispatcher.decode_kernel).__name__ == "TritonGDNKernel", "a live dispatcher gets its own back"
        assert type(Machine().dispatcher.decode_kernel).__name__ == "TritonGDNKernel"
        assert seam.installed() == ()
        assert sglang_plugin.running() is None


def test_exchanged_kernels_are_what_sglang_takes_for_kernels() -> None:
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

    start(gdn_extend="reference")
    dispatcher = Machine().dispatcher
    assert isinstance(dispatcher.extend_kernel, LinearAttnKernelBase)
    assert dispatcher.extend_kernel.uses_state_checkpoints
    assert not dispatcher.extend_kernel.supports_track_state_snapshot
    assert dispatcher.decode_kernel.supports_packed_decode, "what the seam does not know comes from SGLang's kernel"


@pytest.mark.parametrize("method", WEIGHT_UPDATES[RELEASE])
def test_parameters_are_refreshed_after_a_weight_update_even_one_that_fails(method: str) -> None:
    import pkgutil

    class Refreshed(FakeGatedDeltaRule):
        count = 0

        def refresh_parameters(self) -> int:
            self.count += 1
            return 1

    fake = Refreshed(0.0)
    start(build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **NAMES), **NAMES)
    update = pkgutil.resolve_name(update_path(method))
    with pytest.raises(AttributeError):
        update(types.SimpleNamespace(offload_tags=set()), types.SimpleNamespace())  # neither weights nor workers
    assert fake.count == 1


def successful_updater(write: Callable[..., Any]) -> Any:
    """The self of SGLang's updates, whose workers (0.5.20) and runners (0.5.23) all succeed by ``write``."""
    import msgspec

    session = msgspec.defstruct("Session", [("selector", str, "all"), ("loaded_weights", bool, False)])
    updater = MagicMock(offload_tags={"weights"}, _session=session(), draft_worker=None, scheduler=None)
    runner = updater.tp_worker.model_runner
    updater._select_runners.return_value = [("target", runner)]
    updater.flush_cache_after_weight_update.return_value = (True, "flushed")
    updater.memory_saver_adapter.resume.side_effect = write
    for name in ("disk", "distributed", "tensor", "ipc"):
        for owner in (updater.tp_worker, runner.weight_updater):
            getattr(owner, f"update_weights_from_{name}").side_effect = write
    runner.weight_updater.load_weights_from_distributed.side_effect = write
    runner.weight_updater.end_weight_update.side_effect = write
    return updater


@pytest.mark.parametrize("method", WEIGHT_UPDATES[RELEASE])
def test_parameters_are_refreshed_after_the_weights_are_new(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pkgutil

    weight = torch.zeros(1)

    class Refreshed(FakeGatedDeltaRule):
        def __init__(self) -> None:
            super().__init__(0.0)
            self.seen: list[float] = []

        def refresh_parameters(self) -> int:
            self.seen.append(float(weight))
            return 1

    def write(*_: Any, **__: Any) -> tuple[bool, str]:
        weight.fill_(1.0)
        return True, "done"

    fake = Refreshed()
    one = start(build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **NAMES), **NAMES)
    monkeypatch.setattr(torch.distributed, "barrier", lambda *_, **__: None)
    updater = successful_updater(write)
    if method != "resume_memory_occupation":
        updater.offload_tags.clear()
    output = pkgutil.resolve_name(update_path(method))(updater, MagicMock(tags=["weights"]))
    assert method == "resume_memory_occupation" or output.success
    assert fake.seen == [1.0], "once, and after the new weights were written"
    assert one.container.counters().total("parameter_refreshes") == 1


def run_scheduler(monkeypatch: pytest.MonkeyPatch, *, strict: bool = False) -> list[str]:
    """Load our plugin as SGLang does and make a Scheduler whose own work is to note that it was reached."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_parallel

    reached: list[str] = []
    monkeypatch.setenv("QWEN35_DEVICE", "cpu")
    if strict:
        monkeypatch.setenv("QWEN35_SGLANG_STRICT", "true")
    sglang_plugin.register()
    HookRegistry.apply_hooks()

    def init_startup(self: Any, *_: Any, **__: Any) -> None:
        reached.append(type(self).__name__)
        raise InterruptedError("far enough")

    for name in ("init_startup_timing_begin", "init_soft_watchdog", "_init_startup"):
        if name in vars(Scheduler):
            monkeypatch.setattr(Scheduler, name, init_startup)
    arguments = (None,) * (len(installed_seam().targets["scheduler"].signature.split(",")) - 1)  # type: ignore[union-attr]
    with ExitStack() as ranks:
        if len(arguments) == 2:  # ranks are published, not passed
            ranks.enter_context(get_parallel().override(tp_rank=0, pp_rank=0, dp_rank=None))
        with pytest.raises((InterruptedError, AttributeError, SystemExit)) as caught:
            Scheduler(*arguments)
    if caught.type is SystemExit:
        raise caught.value
    return [*reached, caught.type.__name__]


def test_the_second_stage_runs_inside_the_schedulers_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_GDN_DECODE", "reference")
    run_scheduler(monkeypatch)
    one = sglang_plugin.running()
    assert one is not None
    assert one.gdn.router.routes == {"decode": "reference"}
    assert installed_seam().targets["gdn_backend"].path in seam.installed()


def test_sglang_runs_alone_where_the_seam_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    says = rename_a_target(monkeypatch)
    with caplog.at_level(logging.ERROR):
        run_scheduler(monkeypatch)
    errors = [record.getMessage() for record in caplog.records if record.name == "qwen35"]
    assert len(errors) == 1
    assert says in errors[0]
    assert "as if the plugin were not there" in errors[0]
    assert sglang_plugin.running() is None


def test_strict_stops_sglang_where_the_seam_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    says = rename_a_target(monkeypatch)
    with pytest.raises(SystemExit, match=says):
        run_scheduler(monkeypatch, strict=True)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("QWEN35_GDN_DECODE", "tritn", "unknown gated_delta_rule adapter 'tritn'.*Did you mean 'triton'"),
        ("QWEN35_GDN_PREFILL", "triton", "unknown environment variable 'QWEN35_GDN_PREFILL'"),
        ("QWEN35_GDN_EXTEND", "flashinfer", "gated_delta_rule adapter 'flashinfer'"),
        ("QWEN35_GDN_FALLBACK", "nobody", "unknown gated_delta_rule adapter 'nobody'"),
    ],
)
def test_the_impossible_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv("QWEN35_DEVICE", "cpu")
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=says) as caught:
        sglang_plugin.register()
    assert "\n" not in str(caught.value)
    assert seam.installed() == ()


def pretend_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Metadata that says another version of SGLang is installed, found before the real one's."""
    info = tmp_path / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_untested_release_runs_alone_or_stops_or_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_release(tmp_path, monkeypatch, "0.5.99")
    sglang_plugin.register()
    assert "0.5.99" in caplog.text
    assert seam.installed() == ()
    monkeypatch.setenv("QWEN35_SGLANG_STRICT", "1")
    with pytest.raises(SystemExit, match=r"tested with 0\.5\.20 and 0\.5\.23 only"):
        sglang_plugin.register()
    monkeypatch.setenv("QWEN35_SGLANG_UNTESTED", "1")
    sglang_plugin.register()
    assert len(seam.installed()) == 1


def test_a_process_without_a_scheduler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, sglang_plugin.SCHEDULER_MODULE)
    monkeypatch.setenv("QWEN35_GDN_DECODE", "nobody")
    sglang_plugin.register()
    assert sglang_plugin.SCHEDULER_MODULE not in sys.modules
    assert seam.installed() == ()


def test_the_entry_point_is_the_one_that_sglang_loads() -> None:
    import tomllib

    import sglang.srt.plugins as plugins

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][plugins.GENERAL_PLUGINS_GROUP] == {"qwen35": "qwen35.sglang_plugin:register"}


class Operators(TorchDispatchMode):
    """Names every operator of torch that is dispatched, on whatever device; a kernel needs one for its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_kernel_runs_and_nothing_is_allocated_while_the_plugin_is_made_ready() -> None:
    fake = FakeGatedDeltaRule(0.0)
    container = build(device="cpu", conv="reference", finalize="off", adapters=[fake_entry("fake", fake)], **NAMES)
    with Operators() as operators:
        torch.zeros(1)
        start(container, **NAMES)
        start(gdn_decode="reference", gdn_fallback="reference64", gdn_shadow="reference:1", finalize="reference")
    assert operators.seen == ["aten.zeros.default"], "the one above, which shows that they are seen"
    assert (fake.calls, fake.plans) == ([], [])
