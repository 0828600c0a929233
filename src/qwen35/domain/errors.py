"""Every exception that qwen35 raises.

::

    Qwen35Error
    ├── ConfigurationError      settings, adapter names, experiment options
    │   └── UnknownNameError    a name that is not known; lists the known ones and the nearest
    ├── ContractError           a call whose tensors do not meet the contract (also ValueError)
    │   ├── ShapeError
    │   ├── DtypeError
    │   ├── DeviceError
    │   ├── LayoutError         strides, aliasing or alignment
    │   └── ValueRangeError     slots, cu_seqlens, rows, parents, last: values out of range
    ├── UnsupportedError        a legal call that this adapter cannot honour; ``reasons`` says why
    ├── UnavailableError        an adapter that cannot be used on this machine; ``reasons`` says why
    ├── CaptureError            something that is not legal inside CUDA graph capture
    ├── ClosedError             use of an adapter, service or workspace after ``close()`` or ``destroy()``
    ├── HandoffError            a finalize handoff that is missing, unexpected or on an ineligible path
    ├── WorkspaceError          a fusion workspace that cannot be had as asked
    │   ├── NotPreparedError    use before ``prepare`` (also ValueError)
    │   ├── SignatureError      the one live workspace does not cover what is asked
    │   ├── CreationError       making one failed, on whichever rank; ``reasons`` by rank
    │   └── AgreementError      the ranks do not ask for, or bring, the same; ``reasons`` by rank
    ├── RankTimeoutError        ranks that did not arrive in time (checked mode); ``ranks`` names them
    └── CheckpointError         a model directory that cannot be loaded
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Qwen35Error(Exception):
    """Base of every exception that qwen35 raises."""


class ConfigurationError(Qwen35Error, ValueError):
    """A setting or option that cannot be honoured."""


class UnknownNameError(ConfigurationError):
    """A name that is not known: ``kind`` of thing, the ``name`` given, the ``known`` ones, and the ``origin`` of the
    name where it was not given in the call. The nearest is found without regard to case."""

    def __init__(self, kind: str, name: str, known: Iterable[str], origin: str = "") -> None:
        self.kind, self.name, self.known, self.origin = kind, name, tuple(sorted(known)), origin
        folded = {one.casefold(): one for one in self.known}
        nearest = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.4)
        hint = f" Did you mean {folded[nearest[0]]!r}?" if nearest else ""
        where = f" ({origin})" if origin else ""
        super().__init__(f"unknown {kind} {name!r}{where}; known: {', '.join(self.known) or 'none'}.{hint}")


class ContractError(Qwen35Error, ValueError):
    """A call that does not meet the contract. Nothing was written."""


class ShapeError(ContractError):
    """A tensor of the wrong shape."""


class DtypeError(ContractError):
    """A tensor of the wrong dtype."""


class DeviceError(ContractError):
    """A tensor on the wrong device."""


class LayoutError(ContractError):
    """A tensor whose strides or alignment the contract does not allow."""


class ValueRangeError(ContractError):
    """A slot, offset, row, parent or node number out of its range."""


class _ReasonsError(Qwen35Error):
    def __init__(self, what: str, reasons: Iterable[str]) -> None:
        self.what, self.reasons = what, tuple(reasons)
        super().__init__(f"{what}: {'; '.join(self.reasons)}")


class UnsupportedError(_ReasonsError):
    """A legal call that this adapter cannot honour. Nothing was written."""


class UnavailableError(_ReasonsError):
    """An adapter that cannot be used on this machine."""


class CaptureError(Qwen35Error, RuntimeError):
    """Something that is not legal inside CUDA graph capture."""


class ClosedError(Qwen35Error, RuntimeError):
    """Use after ``close()``."""


class CheckpointError(Qwen35Error, ValueError):
    """A model directory that cannot be loaded."""


class HandoffError(Qwen35Error, RuntimeError):
    """A finalize handoff that is missing, that nobody announced, or that came on an ineligible path."""


class WorkspaceError(Qwen35Error, RuntimeError):
    """A fusion workspace that cannot be had as asked."""


class NotPreparedError(WorkspaceError, ValueError):
    """Use of the fusion service before ``prepare``."""


class SignatureError(WorkspaceError):
    """The one live workspace of this process does not cover what is asked; ``differences`` says where."""

    def __init__(self, what: str, differences: Iterable[str]) -> None:
        self.differences = tuple(differences)
        super().__init__(f"{what}: {'; '.join(self.differences)}")


class CreationError(WorkspaceError):
    """Making a workspace failed on some rank, so no rank has one; ``reasons`` says where and why."""

    def __init__(self, what: str, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{what}: {'; '.join(self.reasons)}")


class AgreementError(WorkspaceError, ValueError):
    """The ranks do not ask for, or bring, the same; raised on all of them."""

    def __init__(self, what: str, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{what}: {'; '.join(self.reasons)}")


class RankTimeoutError(Qwen35Error, TimeoutError):
    """Ranks that did not arrive in time; the workspace is of no further use."""

    def __init__(self, what: str, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)
        super().__init__(f"{what}: no word from rank {', '.join(map(str, self.ranks))}")
