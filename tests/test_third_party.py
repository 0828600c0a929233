"""Broken adapters of other packages: each is refused with who declares it, and nothing else stops working."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import qwen35
from qwen35.cli.main import app
from qwen35.domain.errors import ConfigurationError, UnavailableError

PORT = "gated_delta_rule"
#: Every entry has a rank above our own adapters', so that the automatic choice asks each of them.
MODULE = """
from dataclasses import replace
from types import SimpleNamespace

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35.domain.capabilities import Capabilities, Support
from qwen35.domain.errors import CaptureError, UnavailableError


def entry(name, made, **fields):
    sound = replace(fake_entry(name, None, rank=99), create=lambda platform, options: made)
    return replace(sound, **fields)


def stating(capabilities):
    adapter = FakeGatedDeltaRule(1.0)
    adapter.capabilities = capabilities
    return adapter


def raising(error):
    def call(*_):
        raise error
    return call


class Hidden(FakeGatedDeltaRule):
    def __init__(self):
        self.closed = 0

    @property
    def capabilities(self):
        raise OSError("no such device")


class NotCallable(FakeGatedDeltaRule):
    verify = "later"


SOUND = FakeGatedDeltaRule(1.0)
no_capabilities = entry("no_capabilities", stating({"phases": ["decode"]}))
wrong_port = entry("wrong_port", stating(None))
odd_phases = entry("odd_phases", stating(Capabilities(phases=["decode"])))
odd_deviations = entry("odd_deviations", stating(Capabilities(deviations=None)))
hidden = entry("hidden", Hidden())
a_class = entry("a_class", FakeGatedDeltaRule)
lacking = entry("lacking", SimpleNamespace(capabilities=Capabilities(), prepare=print, supports=print, decode=print))
not_callable = entry("not_callable", NotCallable(1.0))
nothing = entry("nothing", None)
high = entry("high", SOUND, rank="high")
unranked = entry("unranked", SOUND, rank=None)
no_create = entry("no_create", SOUND, create=None)
failing = entry("failing", SOUND, create=raising(SystemExit(3)))
ours = entry("ours", SOUND, create=raising(CaptureError("inside capture")))
silent = entry("silent", SOUND, create=raising(UnavailableError("silent", [])))
says_nothing = entry("says_nothing", SOUND, probe=lambda _: Support(False))
number = 5
dotless = entry("dotless", SOUND)
elsewhere = entry("elsewhere", SOUND)
"""
RAISING, EXITING = "raise RuntimeError('no driver')", "import sys\nsys.exit(1)"
SITE = {
    "no_capabilities": "its capabilities must be Capabilities, got dict",
    "wrong_port": "its capabilities must be Capabilities, got NoneType",
    "odd_phases": "phases of its capabilities must be Set, got ['decode']",
    "odd_deviations": "deviations of its capabilities must be Mapping, got None",
    "hidden": "its capabilities failed with OSError: no such device",
    "a_class": "requires a GatedDeltaRule, got the class FakeGatedDeltaRule itself: create must return an object",
    "lacking": "got SimpleNamespace without extend, verify, commit, refresh_parameters, close",
    "not_callable": "its verify must be a method, got 'later'",
    "nothing": "requires a GatedDeltaRule, got NoneType without capabilities",
    "high": "rank must be an int, got 'high'",
    "unranked": "rank must be an int, got None",
    "no_create": "create must be callable, got None",
    "failing": "its factory failed with SystemExit: 3",
    "number": "must be an AdapterEntry, got int",
    "absent": "cannot be loaded, AttributeError",
    "raises": "cannot be loaded, RuntimeError: no driver",
    "exits": "cannot be loaded, SystemExit: 1",
    "says_nothing": "its probe must give reasons where and only where it says no",
    "dotless": "an entry point must be named <port>.<adapter> with port finalize_fusion or gated_delta_rule or "
    "short_convolution, got 'dotless'",
    "elsewhere": "got 'gated_delta.elsewhere'",
}  # fmt: skip
#: Errors of ours that a factory raised of its own accord: they say what they say.
OWN = {"ours": "inside capture", "silent": "silent"}
NAMES = {"dotless": "dotless", "elsewhere": "gated_delta.elsewhere"}
MODULES = {"raises": "raising_package", "exits": "exiting_package"}


def declared(name: str) -> tuple[str, str]:
    """Name and value of the entry point of ``name``."""
    return NAMES.get(name, f"{PORT}.{name}"), f"{MODULES.get(name, 'broken_package')}:{name}"


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution, as far as the interpreter can tell, of adapters of which not one can be used."""
    site = tmp_path / "site"
    info = site / "broken_kernels-0.7.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-kernels\nVersion: 0.7\n")
    lines = [" = ".join(declared(name)) for name in (*SITE, *OWN)]
    (info / "entry_points.txt").write_text("\n".join(["[qwen35.adapters]", *lines, ""]))
    for name, text in (("broken_package", MODULE), ("raising_package", RAISING), ("exiting_package", EXITING)):
        (site / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("name", SITE)
def test_a_broken_adapter_is_one_error_that_names_what_declares_it(name: str) -> None:
    point, value = declared(name)
    for use in (
        lambda: qwen35.build(device="cpu", gdn_decode=name),
        lambda: qwen35.build(device="cpu", gdn_fallback=name),
        lambda: qwen35.build(device="cpu", gdn_shadow=f"{name}:1"),
        lambda: qwen35.adapter(PORT, name, device="cpu"),
    ):
        with pytest.raises((UnavailableError, ConfigurationError)) as refused:
            use()
        for part in (SITE[name], f"entry point {point} = {value} of broken-kernels 0.7"):
            assert part in str(refused.value)


@pytest.mark.usefixtures("broken")
def test_broken_adapters_that_nobody_names_disturb_nothing() -> None:
    container = qwen35.build(device="cpu")
    assert {name for name, _ in container.gated_delta_rule().adapters.values()} <= {"reference", "triton"}
    rejected = container.registry().choose(PORT, "auto").rejected
    for name in ("a_class", "hidden", "lacking", "failing", *OWN):
        assert ({**SITE, **OWN}[name]) in "; ".join(rejected[name])
    qwen35.close(container)


@pytest.mark.usefixtures("broken")
def test_doctor_lists_broken_adapters_with_their_reason_and_all_others() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["build"] == {"ok": True, "reason": ""}
    facts = {one["name"]: one for one in report["ports"][PORT]}
    lost = {one["name"]: one for one in report["ports"]["no port"]}
    assert facts["reference"]["usable"]
    assert lost.keys() == set(NAMES.values())
    for name, reason in SITE.items():
        point, value = declared(name)
        shown = lost[point] if name in NAMES else facts[name]
        assert not shown["usable"]
        for part in (reason, f"entry point {point} = {value} of broken-kernels 0.7"):
            assert part in "; ".join(shown["reasons"])
    assert all(not facts[name]["usable"] and facts[name]["reasons"] for name in OWN)
    assert CliRunner(env={"COLUMNS": "300"}).invoke(app, ["doctor", "--device", "cpu"]).exit_code == 0


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("name", ["a_class", "high", "dotless", "raises"])
def test_conform_and_swap_say_why_without_a_traceback(name: str) -> None:
    conform = CliRunner().invoke(app, ["conform", name, "--device", "cpu"])
    assert conform.exit_code in (1, 2), conform.output
    swap = CliRunner().invoke(app, ["swap", "--geometry", "35B-A3B", "--gdn", name, "--device", "cpu", "--prefill", "",
                                    "--verify", "", "--decode-batches", "1", "--out", "out"])  # fmt: skip
    for result in (conform, swap):
        assert "broken-kernels" in " ".join(result.output.split()), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
