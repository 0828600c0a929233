"""Fakes of the fused finalize: workspaces that record, ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qwen35.domain.capabilities import Support
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.adapter import AdapterEntry
from qwen35.ports.finalize_checks import check_all_reduce, check_finalize, token_support
from qwen35.ports.finalize_fusion import NormAndResidual


class Group:
    """Stands for a process group: nothing but itself, and no longer there than somebody holds it."""


GROUP = Group()


def signature(**changes: Any) -> WorkspaceSignature:
    values: dict[str, Any] = {
        "group": GROUP,
        "tp_size": 1,
        "rank": 0,
        "hidden": 16,
        "top_k": 2,
        "max_m": 32,
        "dtype": "float32",
    }
    return WorkspaceSignature(**(values | changes))


class FakeWorkspace:
    """Checks its calls, records them, and fills results with ones."""

    def __init__(self, asked: WorkspaceSignature, adapter: str = "fake") -> None:
        self.signature, self.adapter, self.addresses = asked, adapter, (4096,)
        self.calls: list[tuple[str, Tensor]] = []
        self.destroyed = 0

    def supports(self, m: int) -> Support:
        return token_support(self.signature, m, bool(self.destroyed))

    def finalize(
        self, handoff: FinalizeHandoff, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        check_finalize(self.signature, handoff, residual, gamma, out)
        self.calls.append(("finalize", residual))
        return out or NormAndResidual(norm=torch.ones_like(residual), residual=residual)

    def all_reduce(
        self, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        check_all_reduce(self.signature, local, residual, gamma, out)
        self.calls.append(("all-reduce", residual))
        return out or NormAndResidual(norm=torch.ones_like(residual), residual=residual)

    def destroy(self) -> None:
        self.destroyed += 1


class FakeFusion:
    """``reasons`` against every signature; ``fail`` is raised while a workspace is made."""

    def __init__(
        self, name: str = "fake", reasons: tuple[str, ...] = (), fail: Exception | None = None, one_host: bool = False,
        most_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.reasons, self.fail = name, reasons, fail
        self.capabilities = FusionCapabilities(one_host=one_host, most_tokens=most_tokens)
        self.made: list[FakeWorkspace] = []
        self.attempts = 0

    def supports(self, asked: WorkspaceSignature) -> Support:
        return Support.of(*self.reasons)

    def prepare(self, asked: WorkspaceSignature) -> FakeWorkspace:
        self.attempts += 1
        if self.fail is not None:
            raise self.fail
        self.made.append(FakeWorkspace(asked, self.name))
        return self.made[-1]

    def close(self) -> None:
        """Holds nothing."""

    def entry(self, rank: int = 100) -> AdapterEntry:
        return AdapterEntry(
            port="finalize_fusion", name=self.name, summary="a fake", rank=rank, probe=lambda _: Support.of(),
            create=lambda _, __: self,
        )  # fmt: skip


class Meeting:
    """``size`` ranks that are threads of this process; gives each its side of an agreement."""

    def __init__(self, size: int) -> None:
        self.size, self.exchanges = size, 0
        self._barrier = threading.Barrier(size, timeout=20)
        self._values: list[Any] = [None] * size

    def side(self, rank: int) -> Side:
        return Side(self, rank)

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        if self._barrier.wait() == 0:
            self.exchanges += 1
        return values

    def run(self, task: Callable[[int], Any]) -> list[Any]:
        """``task(rank)`` on every rank at once; each rank's result, or the exception that it raised."""
        results: list[Any] = [None] * self.size

        def on(rank: int) -> None:
            try:
                results[rank] = task(rank)
            except Exception as exc:  # noqa: BLE001 - the test looks at it
                results[rank] = exc

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "a rank was left waiting"
        return results


class Side:
    """One rank's side of a ``Meeting``."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def exchange(self, value: Any) -> list[Any]:
        return self._meeting.meet(self._rank, value)


class Twin:
    """One of two ranks, where the other always says what this one says."""

    def exchange(self, value: Any) -> list[Any]:
        return [value, value]


class TraceOfReads(TorchDispatchMode):
    """Notes every operator that brings a tensor's value to the host, which on a GPU waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class FullDevice(TorchDispatchMode):
    """Has no memory for a tensor of ``shape``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self._shape = shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format and tuple(args[0]) == self._shape:
            raise torch.OutOfMemoryError(f"no room for {self._shape}")
        return func(*args, **(kwargs or {}))
