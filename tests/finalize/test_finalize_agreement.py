"""One rank's failure is everybody's, told once, and nobody is left waiting for it."""

from __future__ import annotations

from typing import Any

import pytest
from finalize_fakes import Meeting
from finalize_pool import Pool
from prepare_tasks import asks_for, mailboxes_where, meets_on_a_twin

from qwen35.domain.errors import AgreementError, CreationError, RankTimeoutError
from qwen35.services.finalize_agreement import Alone, together


def test_a_step_that_all_ranks_did_gives_each_its_own_result() -> None:
    meeting = Meeting(3)
    assert meeting.run(lambda rank: together(meeting.side(rank), "all", lambda: rank * rank)) == [0, 1, 4]
    assert together(Alone(), "one", lambda: None) is None


def test_ranks_that_fail_are_named_alike_on_all_and_a_failure_within_a_failure_once() -> None:
    meeting = Meeting(3)

    def inner(rank: int) -> None:
        if rank:
            raise KeyError(f"sm_{rank}")

    def on(rank: int) -> Any:
        side = meeting.side(rank)
        return together(side, "outer", lambda: together(side, "inner", lambda: inner(rank)))

    out = meeting.run(on)
    assert all(isinstance(e, CreationError) for e in out), out
    assert {str(e) for e in out} == {"outer: rank 1: KeyError: 'sm_1'; rank 2: KeyError: 'sm_2'"}


class Lost:
    """An exchange that a rank never comes to."""

    def exchange(self, value: Any) -> list[Any]:
        raise AgreementError("the ranks could not be heard", ["connection closed by peer"])


def test_who_has_failed_and_cannot_hear_the_others_says_both() -> None:
    def late() -> None:
        raise RankTimeoutError("the launch timed out", [3])

    with pytest.raises(AgreementError, match=r"workspace: RankTimeoutError.*no word from rank 3; connection closed"):
        together(Lost(), "workspace", late)
    with pytest.raises(AgreementError, match="could not be heard: connection closed"):
        together(Lost(), "workspace", lambda: None)


@pytest.mark.case("C41")
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize(
    ("fails", "said", "met"),
    [
        ("allocate", "OutOfMemoryError: no room for mailboxes", 0), ("compile", "KeyError: 'sm_90'", 0),
        ("meet", "OSError: peer access is closed", 1),
    ],
)  # fmt: skip
def test_a_rank_that_fails_alone_leaves_no_other_in_the_rendezvous(
    two_ranks: Pool, fails: str, said: str, met: int, on: int
) -> None:
    assert two_ranks.run(mailboxes_where, fails, on) == [(f"mailboxes between ranks: rank {on}: {said}", met)] * 2
    assert two_ranks.run(mailboxes_where, "nothing", on) == [("made", 1)] * 2


@pytest.mark.row("B17")
@pytest.mark.parametrize("other", [0, 1])
def test_fusion_that_is_off_on_one_rank_is_an_error_on_all(two_ranks: Pool, other: int) -> None:
    settings = ["auto", "auto"]
    settings[other] = "off"
    out = two_ranks.run(asks_for, settings, [False, False])
    assert out[0] == out[1]
    name, text = out[0]
    assert name == "AgreementError"
    assert f"adapter: rank 0 asks {settings[0]}, rank 1 asks {settings[1]}" in text
    assert two_ranks.run(asks_for, ["off", "off"], [False, True]) == [("nothing", "")] * 2
    assert two_ranks.run(asks_for, ["auto", "auto"], [False, False]) == [("prepared", "")] * 2


@pytest.mark.row("B17")
@pytest.mark.parametrize("on", [0, 1])
def test_multiplexed_streams_of_one_rank_are_refused_by_all(two_ranks: Pool, on: int) -> None:
    multiplexed = [rank == on for rank in range(2)]
    out = two_ranks.run(asks_for, ["auto", "auto"], multiplexed)
    assert [name for name, _ in out] == ["ConfigurationError" if here else "AgreementError" for here in multiplexed]
    assert f"rank {on}: the fused finalize cannot be used with multiplexed" in out[1 - on][1]
    assert {name for name, _ in two_ranks.run(asks_for, ["auto", "auto"], [True, True])} == {"ConfigurationError"}


def test_a_rank_that_never_comes_to_agree_ends_the_wait_of_the_others() -> None:
    pool = Pool(2)
    try:
        assert [text for _, text, _ in pool.run(meets_on_a_twin, -1, 20.0)] == ["[0, 1]"] * 2
        waited, away = pool.run(meets_on_a_twin, 1, 2.0)
    finally:
        pool.close()
    assert away[0] == "stayed away"
    assert waited[0] == "AgreementError", waited
    assert waited[1].startswith("the ranks could not be heard: ")
    assert waited[2] < 20, "the time-out that was asked for bounds it"
