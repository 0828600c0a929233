"""The names of FlashInfer's communication package: all that a backend needs, or a refusal that says what is missing."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from qwen35.adapters.flashinfer.finalize_names import FusionNames, ipc_names, multicast_names
from qwen35.domain.errors import UnavailableError

PATTERNS = ("kMoEFinalizeARResidualRMSNorm", "kARResidualRMSNorm")
MODULES: dict[str, dict[str, Any]] = {
    "flashinfer.comm": {
        "allreduce_fusion": "launch",
        "AllReduceFusionPattern": SimpleNamespace(**{name: f"the pattern {name}" for name in PATTERNS}),
    },
    "flashinfer.comm.mnnvl_cutedsl": {"DEFAULT_CONFIG": "config"},
    "flashinfer.comm.mnnvl_cutedsl_ar": {"MNNVLCuteDSLAllReduceFusionWorkspace": "makes multicast"},
    "flashinfer.comm.allreduce": {"TRTLLMAllReduceFusionWorkspace": "makes ipc"},
}
NAMES = [
    (multicast_names, "makes multicast", "config", ["", ".mnnvl_cutedsl", ".mnnvl_cutedsl_ar"]),
    (ipc_names, "makes ipc", None, ["", ".allreduce"]),
]


def importing(modules: dict[str, dict[str, Any]]) -> Any:
    """Modules that have these names and no others."""

    def by_name(module: str) -> Any:
        if module not in modules:
            raise ImportError(f"No module named {module!r}")
        return SimpleNamespace(**modules[module])

    return by_name


@pytest.mark.row("A02")
@pytest.mark.parametrize(("names_of", "makes", "config", "modules"), NAMES)
def test_the_names_of_each_backend_are_its_own(names_of: Any, makes: str, config: Any, modules: list[str]) -> None:
    wanted = {name: MODULES[name] for name in (f"flashinfer.comm{module}" for module in modules)}
    names = names_of(importing(wanted))
    finalize, all_reduce = (f"the pattern {name}" for name in PATTERNS)
    assert names == FusionNames(makes, "launch", finalize, all_reduce, config)  # type: ignore[arg-type]


@pytest.mark.row("A02")
@pytest.mark.parametrize(("names_of", "makes", "config", "modules"), NAMES)
def test_a_name_that_flashinfer_lacks_is_named_and_nothing_else_is_taken(
    names_of: Any, makes: str, config: Any, modules: list[str]
) -> None:
    """One name away, one module away, one pattern away, and everything away: half an interface is none."""
    whole = {name: MODULES[name] for name in (f"flashinfer.comm{module}" for module in modules)}
    for module, names in whole.items():
        for name in names:
            without = whole | {module: {n: value for n, value in names.items() if n != name}}
            with pytest.raises(UnavailableError) as refused:
                names_of(importing(without))
            (reason,) = refused.value.reasons
            assert reason.startswith(f"unavailable: missing {module}.{name} ("), reason
        without = {other: rest for other, rest in whole.items() if other != module}
        with pytest.raises(UnavailableError) as refused:
            names_of(importing(without))
        reasons = [f"unavailable: missing {module}.{name} (No module named {module!r})" for name in names]
        assert list(refused.value.reasons) == reasons
    for pattern in PATTERNS:
        others = SimpleNamespace(**{name: name for name in PATTERNS if name != pattern})
        without = whole | {"flashinfer.comm": MODULES["flashinfer.comm"] | {"AllReduceFusionPattern": others}}
        with pytest.raises(UnavailableError) as refused:
            names_of(importing(without))
        assert refused.value.reasons == (f"unavailable: missing AllReduceFusionPattern.{pattern}",)
    with pytest.raises(UnavailableError) as refused:
        names_of(importing({}))
    assert len(refused.value.reasons) == sum(map(len, whole.values()))


@pytest.mark.row("A02")
@pytest.mark.parametrize(("names_of", "makes", "config", "modules"), NAMES)
def test_flashinfers_own_packages_have_every_name(names_of: Any, makes: str, config: Any, modules: list[str]) -> None:
    for module in modules:
        pytest.importorskip(f"flashinfer.comm{module}")
    names, patterns = names_of(), vars(importlib.import_module("flashinfer.comm").AllReduceFusionPattern)
    assert [names.finalize, names.all_reduce] == [patterns[name] for name in PATTERNS]
