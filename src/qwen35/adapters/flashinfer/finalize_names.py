"""The names of FlashInfer's communication package that the two finalize adapters use, imported when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from qwen35.adapters._kernels.sources import found_spec
from qwen35.adapters.flashinfer.release import REMEDY
from qwen35.domain.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class FusionNames:
    """``make`` builds the native workspace, ``launch`` runs a pattern on it, ``finalize`` and ``all_reduce`` are the
    patterns; ``config`` is the default configuration where the backend has one."""

    make: Callable[..., Any]
    launch: Callable[..., Any]
    finalize: Any
    all_reduce: Any
    config: Any = None


Loader = Callable[[], FusionNames]

#: A module by its name.
Importer = Callable[[str], Any]

_COMM = "flashinfer.comm"
_MULTICAST = (
    (_COMM, "allreduce_fusion"), (_COMM, "AllReduceFusionPattern"), (f"{_COMM}.mnnvl_cutedsl", "DEFAULT_CONFIG"),
    (f"{_COMM}.mnnvl_cutedsl_ar", "MNNVLCuteDSLAllReduceFusionWorkspace"),
)  # fmt: skip
_IPC = (
    (_COMM, "allreduce_fusion"), (_COMM, "AllReduceFusionPattern"),
    (f"{_COMM}.allreduce", "TRTLLMAllReduceFusionWorkspace"),
)  # fmt: skip


def multicast_names(importing: Importer = import_module) -> FusionNames:
    """The CuTe DSL backend; raises ``UnavailableError`` naming everything that is missing."""
    launch, patterns, config, make = _imported(_MULTICAST, importing)
    return _with_patterns(make, launch, patterns, config)


def ipc_names(importing: Importer = import_module) -> FusionNames:
    """The IPC backend, by its own class: the factory's automatic choice could take multicast."""
    launch, patterns, make = _imported(_IPC, importing)
    return _with_patterns(make, launch, patterns, None)


def installed() -> tuple[str, ...]:
    """Reasons why nothing could be imported, without importing anything."""
    return () if found_spec("flashinfer") is not None else (f"unavailable: missing flashinfer: {REMEDY}",)


def _with_patterns(make: Any, launch: Any, patterns: Any, config: Any) -> FusionNames:
    known = vars(patterns)
    wanted = ("kMoEFinalizeARResidualRMSNorm", "kARResidualRMSNorm")
    missing = [f"unavailable: missing AllReduceFusionPattern.{name}" for name in wanted if name not in known]
    if missing:
        raise UnavailableError("flashinfer", missing)
    return FusionNames(make, launch, known[wanted[0]], known[wanted[1]], config)


def _imported(wanted: tuple[tuple[str, str], ...], importing: Importer) -> list[Any]:
    """Every (module, name), all of them or an error: half an interface is none."""
    found, missing = [], []
    for module, name in wanted:
        try:
            found.append(getattr(importing(module), name))
        except (ImportError, AttributeError, RuntimeError) as exc:
            missing.append(f"unavailable: missing {module}.{name} ({exc})")
    if missing:
        raise UnavailableError("flashinfer", missing)
    return found
