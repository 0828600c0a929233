"""The overlap scheduler's FutureMap under orders of payloads: SGLang's own class, as it is and with the plugin.

On 0.5.20 it fails in some orders, and the plugin mends it. 0.5.23 mended what raised or was dropped itself, and may
relay through buffers that a CUDA graph writes, so the plugin leaves it alone: the same tests pass there without a hook.
Rows that no step wrote (H03) are undefined there as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from seam_machine import installed_seam, start
from torch import Tensor

from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.domain.errors import UnavailableError

ROWS = 6
TAILS: Mapping[str, tuple[int, ...]] = {"topk_p": (2,), "topk_index": (2,), "hidden_states": (3,), "draft_probs": (5,)}
#: What a payload carries or lacks together.
CARRIED = {"topk": ("topk_p", "topk_index"), "hidden": ("hidden_states",), "probs": ("draft_probs",)}

MENDED = "relay_stash" in installed_seam().targets
needs_mending = pytest.mark.skipif(not MENDED, reason="this release needs no mending")
left_alone = pytest.mark.skipif(MENDED, reason="this release is mended")


def plain_gather(indices: Tensor, *buffers: Tensor | None) -> tuple[Tensor | None, ...]:
    """What SGLang's Triton kernel gathers."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


@pytest.fixture(autouse=True)
def _cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's GPU-only steps on the CPU; memory that torch.empty gives holds NaN, or the greatest integer."""
    from sglang.srt.managers import overlap_utils

    monkeypatch.setattr(overlap_utils, "gather_spec_extras", plain_gather)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def future_map(algorithm: str = "EAGLE") -> Any:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    pool = SimpleNamespace(req_to_token=torch.zeros(ROWS, 4, dtype=torch.int32))
    return FutureMap("cpu", SpeculativeAlgorithm.from_string(algorithm), pool)


def values(count: int, *names: str) -> dict[str, Tensor]:
    """Fresh rows of bonus tokens, which every payload has, and of what ``names`` carry."""
    fields = [field for name in names for field in CARRIED[name]]
    rows = {field: torch.randn(count, *TAILS[field]) for field in fields}
    if "topk_index" in rows:
        rows["topk_index"] = torch.randint(1, 1000, (count, *TAILS["topk_index"]))
    return rows | {"bonus_tokens": torch.randint(1, 1000, (count,))}


def stash(a_map: Any, rows: list[int], *names: str) -> dict[str, Tensor]:
    from sglang.srt.managers.overlap_utils import RelayPayload

    carried = values(len(rows), *names)
    a_map.stash(torch.tensor(rows, dtype=torch.int64), RelayPayload(**carried))
    return carried


def resolve(a_map: Any, rows: list[int], **has: Tensor) -> Any:
    """The draft input of a batch of ``rows`` after the gather."""
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    draft = EagleDraftInput(future_indices=torch.tensor(rows, dtype=torch.int64), **has)
    a_map._resolve_spec_extras(SimpleNamespace(spec_info=draft))
    return draft


def mends() -> dict[str, int]:
    one = sglang_plugin.running()
    assert one is not None
    counted = one.container.counters().snapshot()
    return {dict(labels)["reason"]: int(count) for (name, labels), count in counted.items() if name == "relay_mends"}


@pytest.mark.row("H02")
def test_a_payload_without_topk_and_hidden_states_keeps_the_rows() -> None:
    start()
    a_map = future_map()
    before = stash(a_map, [1, 2, 3], "topk", "hidden")
    after = stash(a_map, [3, 1])
    draft = resolve(a_map, [1, 2, 3])
    for field in ("topk_p", "topk_index", "hidden_states"):
        torch.testing.assert_close(getattr(draft, field), before[field], rtol=0, atol=0)
    tokens = [after["bonus_tokens"][1], before["bonus_tokens"][1], after["bonus_tokens"][0]]
    assert draft.bonus_tokens.tolist() == tokens


@pytest.mark.row("H02")
@pytest.mark.parametrize(("lacks", "has"), [("topk", "hidden"), ("hidden", "topk")])
def test_a_payload_may_lack_one_of_the_fields(lacks: str, has: str) -> None:
    start()
    a_map = future_map()
    before, after = stash(a_map, [1, 2], lacks, has), stash(a_map, [1, 2], has)
    draft = resolve(a_map, [1, 2])
    for expected, name in ((before, lacks), (after, has)):
        for field in CARRIED[name]:
            torch.testing.assert_close(getattr(draft, field), expected[field], rtol=0, atol=0)


@needs_mending
@pytest.mark.row("H02")
def test_sglang_alone_raises_there_and_again_when_the_plugin_is_off() -> None:
    a_map = future_map()
    stash(a_map, [1], "topk")
    with pytest.raises(AttributeError, match="NoneType"):
        stash(a_map, [1])
    start()
    stash(a_map, [1])  # a map that was in use before the plugin came
    assert mends() == {"payload without topk_p, topk_index": 1}
    mended = future_map()
    stash(mended, [1], "topk")
    sglang_plugin.uninstall()
    for one in (a_map, mended):
        with pytest.raises(AttributeError, match="NoneType"):
            stash(one, [1])
    stash(mended, [1], "topk")


@needs_mending
@pytest.mark.row("H03")
def test_rows_that_were_never_stashed_are_zero() -> None:
    start()
    a_map = future_map()
    before = stash(a_map, [2, 0, 0], "topk", "hidden", "probs")
    draft = resolve(a_map, [5, 2, 1], draft_probs=torch.zeros(3, *TAILS["draft_probs"]))
    for field in (*TAILS, "bonus_tokens"):
        got = getattr(draft, field)
        assert not got[[0, 2]].any(), field
        torch.testing.assert_close(got[1], before[field][0], rtol=0, atol=0)


@pytest.mark.row("H03")
def test_rows_that_were_never_stashed_are_whatever_memory_held_in_sglang_alone() -> None:
    """In both releases: where SGLang zeroes them itself, this fails and the seam can go."""
    a_map = future_map()
    stash(a_map, [2], "topk", "hidden", "probs")
    draft = resolve(a_map, [5], draft_probs=torch.zeros(1, *TAILS["draft_probs"]))
    for field in ("topk_p", "hidden_states", "draft_probs"):
        assert getattr(draft, field).isnan().all(), field
    assert draft.bonus_tokens.tolist() == [torch.iinfo(torch.int64).max]


@pytest.mark.row("H04")
def test_draft_probs_that_appear_later_are_gathered() -> None:
    start()
    a_map = future_map()
    stash(a_map, [1, 2], "topk", "hidden")
    assert resolve(a_map, [1, 2]).draft_probs is None, "nobody has carried any"
    later = stash(a_map, [2, 3], "topk", "hidden", "probs")["draft_probs"]
    torch.testing.assert_close(resolve(a_map, [3, 2]).draft_probs, later[[1, 0]], rtol=0, atol=0)
    if MENDED:
        assert not resolve(a_map, [1]).draft_probs.any(), "row 1 has had none: zero"


@needs_mending
@pytest.mark.row("H04")
def test_sglang_alone_drops_them() -> None:
    a_map = future_map()
    stash(a_map, [1, 2], "topk", "hidden")
    stash(a_map, [2, 3], "topk", "hidden", "probs")
    assert resolve(a_map, [2]).draft_probs is None


def test_what_sglang_can_do_is_left_to_it() -> None:
    """The same payloads in an order that needs no mending: equal values, and nothing counted."""
    gathered = []
    for plugin in (False, True):
        if plugin:
            start()
        torch.manual_seed(7)
        a_map = future_map()
        stash(a_map, [1, 2, 3], "topk", "hidden", "probs")
        stash(a_map, [], "topk")
        stash(a_map, [2, 4, 0, 0], "topk", "hidden", "probs")
        gathered.append(resolve(a_map, [4, 1, 2, 3], draft_probs=torch.zeros(4, *TAILS["draft_probs"])))
        plain = future_map("NONE")
        tokens = stash(plain, [1, 2])["bonus_tokens"]
        assert plain.output_tokens_buf[[1, 2]].tolist() == tokens.tolist()
    for field in (*TAILS, "bonus_tokens"):
        torch.testing.assert_close(*(getattr(draft, field) for draft in gathered), rtol=0, atol=0)
    assert mends() == {}


def machine() -> type[RuleBasedStateMachine]:
    class FutureMapMachine(RuleBasedStateMachine):
        """Compares a FutureMap with a dictionary of rows."""

        def __init__(self) -> None:
            super().__init__()
            self.map = future_map()
            self.model: dict[str, dict[int, Tensor]] = {}

        @rule(
            rows=st.sets(st.integers(1, ROWS - 1)),
            padding=st.integers(0, 2),
            names=st.sets(st.sampled_from([*CARRIED])),
        )
        def stash(self, rows: set[int], padding: int, names: set[str]) -> None:
            order = [*rows, *[0] * padding]
            carried = stash(self.map, order, *sorted(names))
            for field, new in carried.items() if order else ():
                self.model.setdefault(field, {}).update(zip(rows, new, strict=False))

        @rule(rows=st.sets(st.integers(1, ROWS - 1), min_size=1))
        def resolve(self, rows: set[int]) -> None:
            draft = resolve(self.map, [*rows])
            for field in (*TAILS, "bonus_tokens"):
                carried = self.model.get(field, {}) if field != "draft_probs" or "topk_p" in self.model else {}
                got = getattr(draft, field)
                if got is None:
                    assert not carried, f"{field} was dropped"
                for i, row in enumerate(rows):
                    if row in carried:
                        torch.testing.assert_close(got[i], carried[row], rtol=0, atol=0)
                    elif got is not None and MENDED:
                        assert not got[i].any(), f"{field} row {row} was never carried"

    return FutureMapMachine


STEPS = settings(max_examples=40, stateful_step_count=8, deadline=None, report_multiple_bugs=False, database=None)


@pytest.mark.row("H08")
def test_every_order_of_payloads_gathers_what_was_last_stashed() -> None:
    start()
    run_state_machine_as_test(machine(), settings=STEPS)


@needs_mending
@pytest.mark.row("H08")
def test_the_orders_are_enough_to_see_sglang_alone_fail() -> None:
    with pytest.raises((AttributeError, AssertionError)):
        run_state_machine_as_test(machine(), settings=STEPS)


@needs_mending
@pytest.mark.parametrize("method", ["__init__", "stash", "_resolve_spec_extras", "_maybe_init_forward_bufs"])
def test_a_changed_method_is_one_clear_error_and_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from sglang.srt.managers.overlap_utils import FutureMap

    monkeypatch.setattr(FutureMap, method, lambda self, somehow: None)
    with pytest.raises(UnavailableError, match=rf"FutureMap\.{method} must take .* takes \(self, somehow\)"):
        start()
    assert seam.installed() == ()


@left_alone
def test_this_release_is_left_alone_because_it_holds_and_relays_through_other_buffers() -> None:
    from sglang.srt.managers import overlap_utils

    one = start()
    assert one.relay.hooks() == {}
    assert not [path for path in seam.installed() if "overlap_utils" in path]
    assert overlap_utils.FutureMap._relay is None, "SGLang's own relay buffers, which ours would displace"
    a_map = future_map()
    before = stash(a_map, [1, 2], "topk", "hidden", "probs")
    stash(a_map, [1, 2])
    torch.testing.assert_close(resolve(a_map, [1, 2]).topk_p, before["topk_p"], rtol=0, atol=0)
    torch.testing.assert_close(resolve(a_map, [1, 2]).draft_probs, before["draft_probs"], rtol=0, atol=0)
