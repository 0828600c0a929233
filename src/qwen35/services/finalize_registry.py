"""The one live fusion workspace of a process: made once, by all ranks or by none."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from qwen35.domain.errors import (
    AgreementError,
    CaptureError,
    CreationError,
    Qwen35Error,
    SignatureError,
    WorkspaceError,
)
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_fusion import FusionWorkspace
from qwen35.services.devices import capturing
from qwen35.services.finalize_agreement import Agreement, together
from qwen35.services.finalize_order import CallOrder

WHAT = "fusion workspace"

NOT_CREATED = f"{WHAT} could not be created"


@dataclass(frozen=True, slots=True)
class _Failure:
    """What failed, for which group; it does not keep the group alive."""

    signature: WorkspaceSignature
    group: Callable[[], object | None]
    adapter: str
    reasons: tuple[str, ...]

    @staticmethod
    def of(signature: WorkspaceSignature, adapter: str, reasons: tuple[str, ...]) -> _Failure:
        group = signature.group
        return _Failure(
            replace(signature, group=None), (lambda: None) if group is None else weakref.ref(group), adapter, reasons
        )

    def covers(self, signature: WorkspaceSignature, adapter: str) -> bool:
        same = self.adapter == adapter and self.group() is signature.group
        return same and self.signature.covers(replace(signature, group=None))


def synchronise(device: str) -> None:
    """Wait for everything on ``device``."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def usable(workspace: FusionWorkspace) -> bool:
    """Whether ``workspace`` takes calls at all: not after ``destroy``."""
    return workspace.supports(1).ok


class WorkspaceRegistry:
    """At most one live workspace, behind a lock.

    A workspace becomes visible only after its device was synchronised and every rank has arrived. It is never
    replaced or evicted, only destroyed by ``release`` or when its last holder leaves; one that was destroyed behind
    the registry's back, or that a lost rank has spoilt, is live no more. A failure is remembered on every rank: the
    factory is not called again for what failed. ``order`` is that of the calls on the live workspace.
    """

    def __init__(
        self, is_capturing: Callable[[], bool] = capturing, synchronise: Callable[[str], None] = synchronise,
        order: CallOrder | None = None,
    ) -> None:  # fmt: skip
        self._lock = threading.RLock()
        self._capturing, self._synchronise = is_capturing, synchronise
        self.order = order or CallOrder()
        self._live: FusionWorkspace | None = None
        self._asked: WorkspaceSignature | None = None
        self._holders: set[int] = set()
        self._failures: list[_Failure] = []

    @property
    def live(self) -> FusionWorkspace | None:
        """The live workspace, or None."""
        with self._lock:
            if self._live is not None and not usable(self._live):
                self._forget()
            return self._live

    def obtain(
        self, signature: WorkspaceSignature, agreement: Agreement,
        create: Callable[[WorkspaceSignature], FusionWorkspace], adapter: str = "auto",
        against: Qwen35Error | None = None, checked: bool = False, holder: object | None = None,
    ) -> FusionWorkspace:  # fmt: skip
        """The live workspace where it, or what it was made upon, covers ``signature``, else one made by ``create``;
        alike on all ranks.

        Every rank of the group calls this together, one that wants none calls ``decline``. ``adapter`` names one, or
        "auto"; ``against`` is why this rank cannot have any, which it raises once the others know; ``checked`` whether
        its calls are exchanged before they are launched, which all ranks do or none. The workspace is found or made and
        held for ``holder`` (None: for nobody) in one step: until it leaves no other holder's leaving ends it. Raises
        ``SignatureError`` (another workspace is live), ``CaptureError`` (nothing is created during capture),
        ``AgreementError`` (the ranks ask for different things), ``CreationError`` (now, or remembered).
        """
        with self._lock:
            live = self.live
            refusal = against or self._refusal(signature, adapter)
            ready = refusal is None and live is not None
            _agree(agreement.exchange(_record(signature, adapter, refusal, ready, checked)), refusal)
            found = self._create(signature, agreement, create, adapter) if live is None else live
            if holder is not None:
                self._holders.add(id(holder))
            return found

    def decline(self, signature: WorkspaceSignature, agreement: Agreement, adapter: str) -> None:
        """Tell the ranks that this one wants no workspace; ``adapter`` is the word for that, in place of a name.

        Raises ``AgreementError``, as ``obtain`` does on the others, where one of them wants a workspace.
        """
        with self._lock:
            records = agreement.exchange(_record(signature, adapter, None, ready=False))
            if any(record["asked"]["adapter"] != adapter for record in records):
                _agree(records, None)

    def leave(self, holder: object) -> None:
        """``holder`` is done with the live workspace; with its last holder it is released."""
        with self._lock:
            if id(holder) in self._holders:
                self._holders.remove(id(holder))
                if not self._holders:
                    self.release()

    def release(self) -> None:
        """Destroy the live workspace, if any, whoever holds it, and forget failures."""
        with self._lock:
            self._forget()
            self._failures.clear()

    def _forget(self) -> None:
        if self._live is not None:
            self._live.destroy()
        self._live = self._asked = None
        self._holders.clear()
        self.order.forget()

    def _refusal(self, signature: WorkspaceSignature, adapter: str) -> Qwen35Error | None:
        """Why this rank cannot serve ``signature``, without asking the others."""
        if self._live is not None:
            # A workspace may serve fewer tokens than were asked for, but no more are to be had by asking again.
            again = self._asked is not None and self._asked.covers(signature)
            differences = [] if again else list(self._live.signature.differences(signature))
            if adapter not in ("auto", self._live.adapter):
                differences.append(f"adapter: has {self._live.adapter}, asked {adapter}")
            return SignatureError(f"another {WHAT} is live", differences) if differences else None
        for failure in self._failures:
            if failure.covers(signature, adapter):
                return CreationError(NOT_CREATED, failure.reasons)
        if self._capturing():
            return CaptureError(f"a {WHAT} cannot be created during CUDA graph capture; call prepare before it")
        return None

    def _create(
        self, signature: WorkspaceSignature, agreement: Agreement,
        create: Callable[[WorkspaceSignature], FusionWorkspace], adapter: str,
    ) -> FusionWorkspace:  # fmt: skip
        made: list[FusionWorkspace] = []

        def make() -> FusionWorkspace:
            made.append(create(signature))
            self._synchronise(signature.device)
            return made[0]

        try:
            # The exchange is the barrier: every rank has synchronised before any of them publishes.
            self._live, self._asked = together(agreement, NOT_CREATED, make), signature
        except WorkspaceError as failure:
            for workspace in made:
                workspace.destroy()
            if isinstance(failure, CreationError):
                self._failures.append(_Failure.of(signature, adapter, failure.reasons))
            raise
        return self._live


def _record(
    signature: WorkspaceSignature, adapter: str, refusal: Qwen35Error | None, ready: bool, checked: bool = False
) -> dict[str, Any]:
    """What a rank says before anything is made: what it asks for, why it cannot have it, whether it has it."""
    refused = None if refusal is None else str(refusal)
    asked = signature.shared() | {"adapter": adapter, "checked": checked}
    return {"refused": refused, "ready": ready, "asked": asked}


def _agree(records: list[dict[str, Any]], own: Qwen35Error | None) -> None:
    """Raise on every rank where one refuses, or where two ask for different things or stand differently."""
    refused = [f"rank {rank}: {r['refused']}" for rank, r in enumerate(records) if r["refused"] is not None]
    reasons = []
    first = records[0]
    for rank, record in enumerate(records[1:], start=1):
        reasons += [
            f"{name}: rank 0 asks {value}, rank {rank} asks {record['asked'][name]}"
            for name, value in first["asked"].items() if record["asked"][name] != value
        ]  # fmt: skip
    if reasons:
        raise AgreementError(f"the ranks ask for different {WHAT}s", reasons)
    if own is not None:
        raise own
    if refused:
        raise AgreementError(f"another rank refuses the {WHAT}", refused)
    if len({record["ready"] for record in records}) > 1:
        without = [f"rank {rank} has none" for rank, record in enumerate(records) if not record["ready"]]
        raise AgreementError(f"the {WHAT} is live on some ranks only", without)


#: The registry of this process: containers come and go, device memory and its addresses are one.
PROCESS_WORKSPACES = WorkspaceRegistry()
