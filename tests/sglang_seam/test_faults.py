"""What fails in SGLang or in the plugin: who goes on, who ends, and who is told."""

from __future__ import annotations

import dataclasses
import functools
import logging
import multiprocessing
import os
import pkgutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from seam_machine import PLACE, Machine, installed_seam, start

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seam import Target
from qwen35.container import build
from qwen35.domain.errors import UnsupportedError
from qwen35.settings import load_settings

NAMES = {"gdn_decode": "fake", "gdn_extend": "fake", "gdn_verify": "fake"}
ALONE = "SGLang runs as if the plugin were not there"


def scheduler_starts(
    monkeypatch: pytest.MonkeyPatch, engine: Callable[[], None] = lambda: None, *, left_out: int = 0,
    tp_rank: int = 0, pp_rank: int = 0, dp_rank: int | None = None, attn_dp_rank: int = 0,
) -> None:  # fmt: skip
    """Register the plugin and start a scheduler through its hook; ``engine`` is all that SGLang does for it.

    ``left_out``: how many arguments another plugin's hook, which calls ours, does not pass on. The ranks are those
    of the process, as SGLang's launcher or its data-parallel controller would give them.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_parallel

    @functools.wraps(Scheduler.__init__)
    def original(*_: Any) -> None:
        engine()

    if "QWEN35_DEVICE" not in os.environ:
        monkeypatch.setenv("QWEN35_DEVICE", "cpu")
    sglang_plugin.register()
    target = installed_seam().targets["scheduler"]
    (_, around, _) = HookRegistry._hooks[target.path][-1]
    ranks = {"tp_rank": tp_rank, "pp_rank": pp_rank, "dp_rank": dp_rank}
    assert target.signature is not None
    names = target.signature.strip("()").split(", ")
    published = ranks if "dp_rank" not in names else {"tp_rank": tp_rank, "pp_rank": pp_rank}  # else an argument
    groups = attn_dp_rank + 1
    widths = {
        "tp_size": 2 * groups, "attn_tp_size": 2, "moe_tp_size": 2 * groups, "moe_ep_size": 1, "moe_dp_size": 1,
        "pp_size": 2, "attn_cp_size": 1, "attn_dp_size": groups,
    }  # fmt: skip
    attention = {"attn_dp_rank": attn_dp_rank, "attn_tp_rank": tp_rank - 2 * attn_dp_rank}
    with get_parallel().override(**published, **widths, **attention):
        around(original, *(({"gpu_id": 0} | ranks).get(name) for name in names[left_out:]))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "qwen35"]


# What SGLang's modules raise


@pytest.fixture
def a_module_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a_module_that_fails.py").write_text("raise RuntimeError('no driver\\nfor this machine')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_module_that_fails"
    sys.modules.pop("a_module_that_fails", None)


def test_a_module_that_fails_to_import_is_a_difference_with_its_reason(a_module_that_fails: str) -> None:
    (found,) = seam.differences({"one": Target(f"{a_module_that_fails}:function", "()")})
    assert found == "a_module_that_fails:function cannot be imported (RuntimeError: no driver for this machine)"


def test_a_function_that_does_not_say_what_it_takes_is_a_difference() -> None:
    (found,) = seam.differences({"one": Target("builtins:min", "(a, b)"), "two": Target("builtins:max")})
    assert found.startswith("builtins:min must take (a, b), does not say what it takes (")


def break_an_import(monkeypatch: pytest.MonkeyPatch) -> str:
    """One of SGLang's own modules raises what no import should."""
    name = "sglang.srt.layers.flashinfer_comm_fusion"

    class Finder:
        @staticmethod
        def find_spec(fullname: str, *_: Any) -> None:
            if fullname == name:
                raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    return "OSError: libcuda.so.1"


def break_the_registry(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt.plugins.hook_registry import HookRegistry

    def apply_hooks() -> None:
        raise KeyError("a hook")

    monkeypatch.setattr(HookRegistry, "apply_hooks", apply_hooks)
    return "HookRegistry failed (KeyError: 'a hook')"


BREAKS = [break_an_import, break_the_registry]


@pytest.mark.parametrize("breaks", BREAKS)
def test_whatever_sglang_raises_while_the_plugin_starts_it_runs_alone(
    breaks: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    says = breaks(monkeypatch)
    scheduler_starts(monkeypatch, lambda: ran.append("engine"))
    assert ran == ["engine"]
    (line,) = lines(caplog)
    assert says in line
    assert line.endswith(ALONE)
    assert seam.installed() == ()
    assert sglang_plugin.running() is None


@pytest.mark.parametrize("breaks", BREAKS)
def test_strict_ends_the_launch_in_one_line_instead(
    breaks: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = breaks(monkeypatch)
    monkeypatch.setenv("QWEN35_SGLANG_STRICT", "true")
    with pytest.raises(SystemExit) as caught:
        scheduler_starts(monkeypatch)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scheduler_that_does_not_say_its_place_runs_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    scheduler_starts(monkeypatch, lambda: ran.append("engine"), left_out=1)
    assert ran == ["engine"]
    (line,) = lines(caplog)
    assert "TypeError: missing a required argument" in line
    assert line.endswith(ALONE)


class NoLongLines(logging.Handler):
    """A log that takes one line a record."""

    def emit(self, record: logging.LogRecord) -> None:
        if "\n" in record.getMessage():
            raise OSError("Message too long")


def test_an_engine_that_stands_goes_on_where_the_plugin_cannot_announce_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, handler = logging.getLogger("qwen35"), NoLongLines()
    monkeypatch.setenv("QWEN35_GDN_DECODE", "reference")
    log.addHandler(handler)
    try:
        scheduler_starts(monkeypatch, lambda: None)
    finally:
        log.removeHandler(handler)
    assert "could not say so or start its metrics (OSError: Message too long)" in lines(caplog)[-1]
    one = sglang_plugin.running()
    assert one is not None
    assert one.gdn.router.routes == {"decode": "reference"}


# Who is told that a scheduler ends


def strict_and_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_registry(monkeypatch)
    monkeypatch.setenv("QWEN35_SGLANG_STRICT", "true")
    scheduler_starts(monkeypatch)


def container_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the launcher does not look at where no adapter is named."""
    monkeypatch.setenv("QWEN35_DEVICE", "cuda:99")
    scheduler_starts(monkeypatch)


def model_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine() -> None:
        raise UnsupportedError("the model", ["a reason"])

    scheduler_starts(monkeypatch, engine)


def ended(target: Callable[..., None], *args: Any) -> tuple[int | None, list[int]]:
    """The exit code of a scheduler's process, and the signals that its parent, this process, got from it."""
    told: list[int] = []
    before = signal.signal(signal.SIGQUIT, lambda number, _: told.append(number))
    try:
        # Forked, so that SGLang is not imported once more.
        child = multiprocessing.get_context("fork").Process(target=target, args=args)
        child.start()
        child.join(120)
        alive = child.is_alive()
        child.kill()
        child.join()
        assert not alive, "the scheduler's process does not end"
    finally:
        signal.signal(signal.SIGQUIT, before)
    return child.exitcode, told


@pytest.mark.parametrize("refused", [strict_and_moved, container_refused, model_refused])
def test_a_refusal_in_a_scheduler_tells_its_parent_as_sglang_does(
    refused: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(refused, monkeypatch) == (1, [signal.SIGQUIT])


def test_a_scheduler_that_goes_on_tells_its_parent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(scheduler_starts, monkeypatch) == (0, [])


# Weights


class Refreshed(FakeGatedDeltaRule):
    """Counts its refreshes, and fails at them where told so."""

    count, fails = 0, False

    def refresh_parameters(self) -> int:
        self.count += 1
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")
        return 1


@pytest.fixture
def refreshed() -> Refreshed:
    fake = Refreshed(0.0)
    start(build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **NAMES), **NAMES)
    return fake


def resume(released: set[str], tags: list[str], memory: Any = None) -> None:
    resumed: list[str] = []
    updater = types.SimpleNamespace(
        offload_tags=released, memory_saver_adapter=memory or types.SimpleNamespace(resume=resumed.append),
        scheduler=None,
    )  # fmt: skip
    pkgutil.resolve_name(installed_seam().targets["weights_resume"].path)(updater, types.SimpleNamespace(tags=tags))


def test_weights_that_stay_released_are_not_read_when_the_cache_comes_back(refreshed: Refreshed) -> None:
    resume({"weights", "kv_cache"}, ["kv_cache"])
    assert refreshed.count == 0
    resume({"kv_cache"}, ["kv_cache"])
    assert refreshed.count == 1


def test_weights_are_not_read_where_bringing_them_back_failed(refreshed: Refreshed) -> None:
    with pytest.raises(AttributeError):
        resume({"weights"}, ["weights"], types.SimpleNamespace())
    assert refreshed.count == 0


def test_a_failed_refresh_leaves_sglangs_own_error_to_its_caller(
    refreshed: Refreshed, caplog: pytest.LogCaptureFixture
) -> None:
    refreshed.fails = True
    with pytest.raises(AttributeError, match="resume"):
        resume({"kv_cache"}, ["kv_cache"], types.SimpleNamespace())
    assert refreshed.count == 1
    assert "refresh failed: RuntimeError: an illegal memory access" in lines(caplog)[-1]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        resume({"kv_cache"}, ["kv_cache"])


# Off again


def test_a_backend_that_gathered_its_pool_gathers_again_once_the_plugin_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    switch = "requires_contiguous_prefill_state"
    monkeypatch.setattr(GDNAttnBackend, switch, True, raising=False)  # 0.5.20 has none, and always gathers
    settings = load_settings(None, device="cpu", gdn_extend="reference")
    release = dataclasses.replace(installed_seam(), gather_switch=switch)
    sglang_plugin.start(settings, release, PLACE, sglang_plugin.make_container(settings, PLACE))
    backend = Machine(strided=True).backend
    assert backend.requires_contiguous_prefill_state is False
    sglang_plugin.uninstall()
    assert backend.requires_contiguous_prefill_state is True
