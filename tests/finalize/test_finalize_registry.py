"""The one live workspace: made once, published late, agreed on by all ranks, refused loudly otherwise."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from finalize_fakes import FakeWorkspace, Group, Meeting, signature

from qwen35.domain.errors import AgreementError, CaptureError, CreationError, SignatureError
from qwen35.services.finalize_agreement import Alone
from qwen35.services.finalize_registry import WorkspaceRegistry


class Factory:
    def __init__(self, fail: Exception | None = None) -> None:
        self.fail, self.calls, self.made = fail, 0, []

    def __call__(self, asked: Any) -> FakeWorkspace:
        self.calls += 1
        if self.fail is not None:
            raise self.fail
        self.made.append(FakeWorkspace(asked))
        return self.made[-1]


@pytest.mark.row("A21")
@pytest.mark.row("B09")
def test_sixty_four_threads_make_one_workspace() -> None:
    registry, factory = WorkspaceRegistry(), Factory()
    start, found = threading.Barrier(64), []

    def ask() -> None:
        start.wait()
        found.append(registry.obtain(signature(), Alone(), factory))

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert factory.calls == 1
    assert len(found) == 64
    assert all(workspace is factory.made[0] for workspace in found)


def at_once(count: int, task: Any) -> list[Any]:
    """What ``count`` threads that start together return or raise."""
    meeting = Meeting(count)

    def on(rank: int) -> Any:
        meeting.meet(rank, None)
        return task(rank)

    return meeting.run(on)


@pytest.mark.row("A21")
@pytest.mark.case("C41")
def test_a_factory_that_fails_is_called_once_by_sixty_four_threads() -> None:
    registry, factory = WorkspaceRegistry(), Factory(RuntimeError("out of handles"))
    out = at_once(64, lambda _: registry.obtain(signature(), Alone(), factory))
    assert all(isinstance(e, CreationError) and "out of handles" in str(e) for e in out), out
    assert (factory.calls, registry.live) == (1, None)


@pytest.mark.row("A20")
@pytest.mark.row("A21")
def test_of_threads_that_ask_for_different_workspaces_one_is_served_and_no_second_is_made() -> None:
    registry, factory = WorkspaceRegistry(), Factory()
    out = at_once(64, lambda i: registry.obtain(signature(hidden=16 * (1 + i % 4)), Alone(), factory))
    (made,) = factory.made
    served = [i for i, got in enumerate(out) if got is made]
    assert served == [i for i in range(64) if 16 * (1 + i % 4) == made.signature.hidden]
    assert all(isinstance(got, SignatureError) for got in out if got is not made), out


@pytest.mark.row("A19")
@pytest.mark.row("A21")
def test_sixty_four_threads_under_capture_make_nothing_and_find_what_is_there() -> None:
    inside = True
    registry, factory = WorkspaceRegistry(is_capturing=lambda: inside), Factory()
    out = at_once(64, lambda _: registry.obtain(signature(), Alone(), factory))
    assert all(isinstance(e, CaptureError) for e in out), out
    inside = False
    made = registry.obtain(signature(), Alone(), factory)
    inside = True
    assert at_once(64, lambda _: registry.obtain(signature(), Alone(), factory)) == [made] * 64
    assert factory.calls == 1


@pytest.mark.row("A15")
def test_one_that_was_destroyed_elsewhere_is_live_no_more() -> None:
    registry, factory = WorkspaceRegistry(), Factory()
    first = registry.obtain(signature(), Alone(), factory)
    first.destroy()
    assert registry.live is None
    second = registry.obtain(signature(hidden=32), Alone(), factory)
    assert second is not first
    assert second.supports(1)
    second.destroy()
    registry.release()
    assert registry.live is None


def test_one_that_was_destroyed_on_one_rank_only_is_an_error_on_all() -> None:
    factories = [Factory(), Factory()]
    asked = [signature(tp_size=2, rank=r) for r in range(2)]
    out, registries = on_ranks(2, asked, factories)
    out[0].destroy()
    out, _ = on_ranks(2, asked, factories, registries)
    assert all(isinstance(e, AgreementError) and "rank 0 has none" in str(e) for e in out), out
    assert [f.calls for f in factories] == [1, 1]


@pytest.mark.row("A18")
@pytest.mark.row("A20")
def test_a_covered_signature_finds_it_and_any_other_is_refused_by_name() -> None:
    registry, factory = WorkspaceRegistry(), Factory()
    made = registry.obtain(signature(max_m=64), Alone(), factory)
    assert registry.obtain(signature(max_m=32), Alone(), factory) is made
    assert made.signature.max_m == 64
    others: dict[str, Any] = {"max_m": 65, "hidden": 32, "eps": 1e-5, "weight_bias": 1.0, "group": object()}
    for name, value in others.items():
        with pytest.raises(SignatureError, match=f"another fusion workspace is live: {name}: "):
            registry.obtain(signature(**({"max_m": 64} | {name: value})), Alone(), factory)
    with pytest.raises(SignatureError, match="adapter: has fake, asked triton"):
        registry.obtain(signature(), Alone(), factory, "triton")
    assert factory.calls == 1
    assert registry.live is made


@pytest.mark.row("A18")
def test_one_that_serves_fewer_tokens_than_asked_is_found_by_asking_the_same_again_and_no_more() -> None:
    registry, made = WorkspaceRegistry(), []

    def create(asked: Any) -> FakeWorkspace:
        made.append(FakeWorkspace(signature(max_m=64)))
        return made[-1]

    first = registry.obtain(signature(max_m=300), Alone(), create)
    for max_m in (300, 299, 65, 64, 1):
        assert registry.obtain(signature(max_m=max_m), Alone(), create) is first
    with pytest.raises(SignatureError, match="max_m: has 64, asked 301"):
        registry.obtain(signature(max_m=301), Alone(), create)
    with pytest.raises(SignatureError, match="live: hidden: has 16, asked 32; max_m: has 64, asked 300"):
        registry.obtain(signature(max_m=300, hidden=32), Alone(), create)
    registry.release()
    registry.obtain(signature(max_m=8), Alone(), FakeWorkspace)
    with pytest.raises(SignatureError, match="max_m: has 8, asked 300"):
        registry.obtain(signature(max_m=300), Alone(), create)
    assert len(made) == 1


@pytest.mark.row("A08")
def test_it_is_published_after_synchronising_and_after_every_rank_has() -> None:
    events: list[str] = []

    def synchronise(device: str) -> None:
        events.append(f"synchronised {device}, live {registry.live}")

    registry = WorkspaceRegistry(synchronise=synchronise)

    class Watched(Alone):
        def exchange(self, value: Any) -> list[Any]:
            events.append(f"exchanged, live {registry.live}")
            return [value]

    registry.obtain(signature(), Watched(), Factory())
    assert events == ["exchanged, live None", "synchronised cpu, live None", "exchanged, live None"]
    assert registry.live is not None


@pytest.mark.row("A08")
@pytest.mark.case("C41")
def test_a_failure_leaves_nothing_and_the_factory_is_not_called_again() -> None:
    registry, factory = WorkspaceRegistry(), Factory(RuntimeError("out of handles"))
    for asked in (signature(), signature(), signature(max_m=1)):
        with pytest.raises(CreationError, match="rank 0: RuntimeError: out of handles"):
            registry.obtain(asked, Alone(), factory)
        assert registry.live is None
    assert factory.calls == 1


@pytest.mark.row("A19")
@pytest.mark.case("C41")
def test_nothing_is_made_during_capture_but_what_is_there_is_found() -> None:
    capturing = True
    registry, factory = WorkspaceRegistry(is_capturing=lambda: capturing), Factory()
    with pytest.raises(CaptureError, match="prepare before"):
        registry.obtain(signature(), Alone(), factory)
    assert factory.calls == 0
    capturing = False
    made = registry.obtain(signature(), Alone(), factory)
    capturing = True
    assert registry.obtain(signature(), Alone(), factory) is made
    with pytest.raises(SignatureError):
        registry.obtain(signature(max_m=33), Alone(), factory)


@pytest.mark.row("A15")
def test_after_release_another_may_be_made() -> None:
    registry, factory = WorkspaceRegistry(), Factory()
    first = registry.obtain(signature(), Alone(), factory)
    registry.release()
    registry.release()
    assert registry.live is None
    assert not first.supports(1)
    second = registry.obtain(signature(hidden=32), Alone(), factory)
    assert second is not first


def test_after_release_what_failed_may_be_tried_again() -> None:
    registry, factory = WorkspaceRegistry(), Factory(RuntimeError("out of handles"))
    for _ in range(2):
        with pytest.raises(CreationError):
            registry.obtain(signature(), Alone(), factory)
    registry.release()
    factory.fail = None
    assert registry.obtain(signature(), Alone(), factory) is factory.made[0]
    assert factory.calls == 2


def on_ranks(
    size: int, asked: list[Any], factories: list[Factory], registries: list[WorkspaceRegistry] | None = None
) -> tuple[list[Any], list[WorkspaceRegistry]]:
    meeting = Meeting(size)
    registries = registries or [WorkspaceRegistry() for _ in range(size)]
    out = meeting.run(lambda r: registries[r].obtain(asked[r], meeting.side(r), factories[r]))
    return out, registries


def test_a_rank_that_fails_fails_all_and_the_others_give_theirs_back() -> None:
    factories = [Factory(), Factory(OSError("no peer access")), Factory()]
    asked = [signature(tp_size=3, rank=r) for r in range(3)]
    out, registries = on_ranks(3, asked, factories)
    assert all(isinstance(e, CreationError) for e in out), out
    assert {str(e) for e in out} == {"fusion workspace could not be created: rank 1: OSError: no peer access"}
    assert [f.made[0].destroyed for f in factories if f.made] == [1, 1]
    again, _ = on_ranks(3, asked, factories, registries)
    assert all(isinstance(e, CreationError) for e in again), again
    assert [f.calls for f in factories] == [1, 1, 1]


class VendorError(Exception):
    """As Triton's errors are: of no built-in kind."""


@pytest.mark.case("C41")
@pytest.mark.parametrize("error", [AssertionError("wrong arch"), KeyError("sm_90"), VendorError("out of resource")])
def test_whatever_a_kernel_package_raises_on_one_rank_reaches_the_others_and_is_remembered(error: Exception) -> None:
    factories = [Factory(error), Factory()]
    asked = [signature(tp_size=2, rank=r) for r in range(2)]
    out, registries = on_ranks(2, asked, factories)
    assert all(isinstance(e, CreationError) and f"rank 0: {type(error).__name__}" in str(e) for e in out), out
    on_ranks(2, asked, factories, registries)
    assert [f.calls for f in factories] == [1, 1]


def test_ranks_that_ask_for_different_workspaces_are_told_so_on_all_of_them() -> None:
    factories = [Factory(), Factory()]
    out, _ = on_ranks(2, [signature(tp_size=2), signature(tp_size=2, rank=1, hidden=32)], factories)
    assert all(isinstance(e, AgreementError) for e in out), out
    assert all("hidden: rank 0 asks 16, rank 1 asks 32" in str(e) for e in out)
    assert [f.calls for f in factories] == [0, 0]


def test_a_refusal_of_one_rank_reaches_the_others() -> None:
    meeting, factory = Meeting(2), Factory()
    registries = [WorkspaceRegistry(is_capturing=lambda r=r: r == 1) for r in range(2)]
    out = meeting.run(lambda r: registries[r].obtain(signature(tp_size=2, rank=r), meeting.side(r), factory))
    assert isinstance(out[0], AgreementError)
    assert "rank 1: a fusion workspace cannot be created during CUDA graph capture" in str(out[0])
    assert isinstance(out[1], CaptureError)
    assert factory.calls == 0


def test_a_workspace_that_is_live_on_some_ranks_only_is_an_error_on_all() -> None:
    factories = [Factory(), Factory()]
    asked = [signature(tp_size=2, rank=r) for r in range(2)]
    _, registries = on_ranks(2, asked, factories)
    registries[1].release()
    out, _ = on_ranks(2, asked, factories, registries)
    assert all(isinstance(e, AgreementError) and "rank 1 has none" in str(e) for e in out), out
    assert [f.calls for f in factories] == [1, 1]


def test_a_remembered_failure_is_its_group_s_and_does_not_keep_the_group() -> None:
    """The threads of a gloo group end with it: one that outlives the interpreter aborts the process."""
    registry, factory = WorkspaceRegistry(), Factory(RuntimeError("out of handles"))
    first, second = Group(), Group()
    for group in (first, first, second):
        with pytest.raises(CreationError, match="out of handles"):
            registry.obtain(signature(group=group), Alone(), factory)
    assert factory.calls == 2, "what failed is not tried again for its group, and is for another"
    gone = weakref.ref(first)
    factory.fail = None  # its traceback holds what the factory was called with
    del first, group
    gc.collect()
    assert gone() is None
    assert registry.obtain(signature(group=Group()), Alone(), factory) is factory.made[0]
