"""The registry chooses among adapters, makes them, and refuses what another package got wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import qwen35
from fakes import FakeGatedDeltaRule, fake_entry
from qwen35.domain.capabilities import Phase, Support
from qwen35.domain.errors import (
    ConfigurationError,
    UnavailableError,
)
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry
from qwen35.services.discovery import installed_entries
from qwen35.services.registry import AdapterRegistry

PORT = "gated_delta_rule"
CPU = Platform(device="cpu", device_name="CPU")


def test_rank_0_is_taken_only_by_name() -> None:
    one = fake_entry("modest", FakeGatedDeltaRule(1.0), rank=0)
    registry = AdapterRegistry(CPU, extra=[one])
    everyone = registry.names(PORT)
    assert registry.choose(PORT, "auto").name not in ("modest", "reference64")
    assert registry.choose(PORT, "modest").name == "modest"
    unusable = [fake_entry(name, FakeGatedDeltaRule(1.0), rank=9, unusable=("no",)) for name in everyone[:-2]]
    with pytest.raises(UnavailableError, match="modest: rank 0: used only when named"):
        AdapterRegistry(CPU, extra=[*unusable, one]).choose(PORT, "auto")


def test_auto_takes_for_a_phase_one_that_offers_it() -> None:
    partial = FakeGatedDeltaRule(1.0)
    partial.capabilities = replace(partial.capabilities, phases=frozenset({Phase.DECODE, Phase.EXTEND}))
    entry = fake_entry("partial", partial, rank=99)
    verify = AdapterRegistry(CPU, extra=[entry]).choose(PORT, "auto", Phase.VERIFY)
    assert verify.name != "partial"
    assert verify.rejected["partial"] == ("verify is not offered",)
    container = qwen35.build(adapters=[entry], device="cpu")
    chosen = {phase: name for phase, (name, _) in container.gated_delta_rule().adapters.items()}
    assert (chosen[Phase.DECODE], chosen[Phase.EXTEND]) == ("partial", "partial")
    assert chosen[Phase.VERIFY] == chosen[Phase.COMMIT] == verify.name


def raising(error: Exception) -> Any:
    def call(*_: object) -> Any:
        raise error

    return call


def test_a_probe_that_fails_makes_unusable_with_its_reason() -> None:
    good = fake_entry("mine", FakeGatedDeltaRule(1.0), rank=99)
    for probe, reason in (
        (raising(OSError("libcuda.so")), "its probe failed with OSError: libcuda.so"),
        (lambda _: True, "its probe must return Support, got bool"),
    ):
        registry = AdapterRegistry(CPU, extra=[replace(good, probe=probe)])
        assert registry.usable(PORT, "mine") == Support.of(reason)
        assert registry.choose(PORT, "auto").rejected["mine"] == (reason,)
        with pytest.raises(UnavailableError, match=reason):
            registry.adapter(PORT, "mine")


class Half:
    """Some methods of the port."""

    capabilities = FakeGatedDeltaRule(1.0).capabilities

    def prepare(self, plan: object) -> None: ...

    def supports(self, call: object) -> Support:
        return Support.of()

    def decode(self, call: object) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("port", "create", "reason"),
    [
        (PORT, lambda *_: Half(), "requires a GatedDeltaRule, got Half without extend, verify, commit, refresh_param"),
        (PORT, lambda *_: None, "requires a GatedDeltaRule, got NoneType without capabilities, prepare, supports"),
        ("short_convolution", lambda *_: Half(), "requires a ShortConvolution, got Half without extend"),
        ("finalize_fusion", lambda *_: object(), "requires a FinalizeFusion, got object without capabilities"),
        (PORT, raising(RuntimeError("no symbol")), "its factory failed with RuntimeError: no symbol"),
        (PORT, raising(ConfigurationError("prefill_split")), "prefill_split"),
    ],
)
def test_what_a_factory_gives_must_be_the_port(port: str, create: Any, reason: str) -> None:
    entry = AdapterEntry(port=port, name="mine", summary="", probe=lambda _: Support.of(), create=create, rank=99)
    kind = ConfigurationError if reason == "prefill_split" else UnavailableError
    with pytest.raises(kind, match=reason):
        AdapterRegistry(CPU, extra=[entry]).adapter(port, "mine")
    if kind is UnavailableError and port == PORT:
        choice = AdapterRegistry(CPU, extra=[entry]).choose(PORT, "auto")
        assert choice.name != "mine"
        assert reason in choice.rejected["mine"][0]


@pytest.mark.parametrize(("least", "usable"), [(None, True), ((8, 0), True), ((9, 0), True), ((9, 1), False)])
def test_an_adapter_is_refused_on_a_gpu_older_than_it_asks_for(least: tuple[int, int] | None, usable: bool) -> None:
    mine = FakeGatedDeltaRule(1.0)
    mine.capabilities = replace(mine.capabilities, min_compute_capability=least)
    hopper = Platform(device="cuda:0", device_name="H200", compute_capability=(9, 0))
    registry = AdapterRegistry(hopper, extra=[fake_entry("mine", mine, rank=99)])
    if usable:
        assert registry.adapter(PORT, "mine") is mine
        return
    reason = "compute capability requires at least 9.1, got 9.0"
    with pytest.raises(UnavailableError, match=reason):
        registry.adapter(PORT, "mine")
    assert mine.closed == 1, "what it held would never be freed"
    assert registry.usable(PORT, "reference")
    assert registry.choose(PORT, "auto").rejected["mine"] == (reason,)
    assert AdapterRegistry(CPU, extra=[fake_entry("mine", mine)]).adapter(PORT, "mine"), "a CPU has no such number"


ENTRY = """
from qwen35.domain.capabilities import Support
from qwen35.ports.adapter import AdapterEntry
ENTRY = AdapterEntry(port="gated_delta_rule", name="good", summary="", probe=lambda _: Support.of(), create=print)
"""


def install(site: Path, distribution: str, modules: dict[str, str], points: dict[str, str]) -> None:
    """A distribution in ``site``, as far as the interpreter can tell."""
    info = site / f"{distribution}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[qwen35.adapters]", *lines, ""]))
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


def test_modules_that_fail_while_loading_are_broken_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "entry_os": "raise OSError('libcudart.so.12')", "entry_runtime": "raise RuntimeError('driver')",
        "entry_syntax": "def (", "entry_import": "import not_there_at_all", "entry_good": ENTRY,
        "entry_other": "ENTRY = 5",
    }  # fmt: skip
    points = {f"gated_delta_rule.{name.removeprefix('entry_')}": f"{name}:ENTRY" for name in modules}
    points["gated_delta_rule.renamed"] = "entry_good:ENTRY"
    install(tmp_path / "site", "one", modules, points)
    monkeypatch.syspath_prepend(tmp_path / "site")
    entries = installed_entries()
    assert entries[PORT, "good"].entry.probe(CPU)
    for name, said in (
        ("os", "OSError: libcudart.so.12"), ("runtime", "RuntimeError: driver"), ("syntax", "SyntaxError"),
        ("import", "ModuleNotFoundError"), ("other", "must be an AdapterEntry, got int"),
        ("renamed", "must be the entry of gated_delta_rule.renamed, got gated_delta_rule.good"),
    ):  # fmt: skip
        (reason,) = entries[PORT, name].entry.probe(CPU).reasons
        assert said in reason
    assert qwen35.build(device="cpu").gated_delta_rule()


def test_two_packages_that_declare_one_name_are_both_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for distribution in ("first", "second"):
        points = {"gated_delta_rule.good": f"entry_of_{distribution}:ENTRY"}
        install(tmp_path / "site", distribution, {f"entry_of_{distribution}": ENTRY}, points)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(UnavailableError) as refused:
        qwen35.build(device="cpu", gdn_decode="good")
    for part in ("more than once", "entry_of_first:ENTRY of first", "entry_of_second:ENTRY of second"):
        assert part in str(refused.value)
