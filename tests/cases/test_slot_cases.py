"""Cases C1 to C8: padding, slots, empty sequences and sizes that broke real deployments, for every adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import TOKEN_PHASES, case_of, gdn_sizes

from qwen35.domain.capabilities import Phase
from qwen35.ports.gated_delta_rule import CommitCall
from qwen35.testing.size_laws import FAR, MANY_HEADS, MANY_ROWS, SLOT_STRIDE, far_slots, many_rows
from qwen35.testing.tensors import same_bits
from subjects import SERVE_ALL, Subject, subjects

both_ports = pytest.mark.parametrize("subject", [*subjects("gated_delta_rule"), *subjects("short_convolution")])
gdn = pytest.mark.parametrize("subject", subjects("gated_delta_rule"))
phases = pytest.mark.parametrize("phase", TOKEN_PHASES)


@pytest.mark.case("C1")
@pytest.mark.row("D18")
@both_ports
@phases
def test_a_padded_row_between_live_ones_changes_nothing(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(bench, phase, seed, (2, -1, 5), 6))
    trial.poison_padding()
    before = trial.parts.pool.clone()
    served = trial.run()
    trial.padded_rows_are_zero(served)
    for slot in (0, 1, 3, 4):
        assert same_bits(before[slot], trial.parts.pool[slot]), f"slot {slot} changed, seed {seed}"
    if phase is not Phase.VERIFY:
        assert not same_bits(before[2], trial.parts.pool[2])
        assert not same_bits(before[5], trial.parts.pool[5])


@pytest.mark.case("C2")
@pytest.mark.row("D14")
@both_ports
@phases
def test_padding_does_not_wrap_to_the_last_slot(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(bench, phase, seed, (0, -1), 4))
    trial.fill_slots([3], 7.0)
    trial.run()
    assert bool((trial.parts.pool[3] == 7.0).all()), f"the last slot changed, seed {seed}"


@pytest.mark.case("C3")
@pytest.mark.row("D18")
@both_ports
@phases
def test_padding_is_not_clamped_to_the_first_slot(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(bench, phase, seed, (-1, 1), 2))
    trial.fill_slots([0], 7.0)
    trial.run()
    assert bool((trial.parts.pool[0] == 7.0).all()), f"the first slot changed, seed {seed}"


@pytest.mark.case("C4")
@both_ports
@pytest.mark.parametrize("tokens", [1, 65])
def test_a_fresh_sequence_starts_from_zero_over_nan(subject: Subject, tokens: int, seed: int) -> None:
    bench = subject.bench()
    case = case_of(bench, Phase.EXTEND, seed, (1,), 3, lengths=(tokens,), fresh=(True,))
    dirty, clean = bench.trial(case), bench.trial(replace(case, fresh=None))
    dirty.fill_slots([1], float("nan"))
    clean.fill_slots([1], 0.0)
    want = dirty.truth()
    served, zero = dirty.run(), clean.run().out
    assert served.out is not None
    assert zero is not None
    assert bool(torch.isfinite(served.out).all()), f"seed {seed}"
    dirty.matches(served, want)
    assert torch.equal(served.out, zero), f"a fresh sequence differs from one over zeros, seed {seed}"
    assert torch.equal(dirty.parts.pool[1], clean.parts.pool[1]), f"seed {seed}"


@pytest.mark.case("C5")
@both_ports
@pytest.mark.parametrize("phase", list(Phase))
def test_a_slot_past_two_to_the_31_elements_is_the_right_one(subject: Subject, phase: Phase, seed: int) -> None:
    assert FAR * SLOT_STRIDE > 2**31
    bench = subject.bench()
    last = {"last": (1, 0)} if phase is Phase.COMMIT else {}
    far_slots(bench, case_of(bench, phase, seed, (0, 1), 3, **last))


@pytest.mark.case("C5")
@both_ports
@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.EXTEND])
def test_a_write_slot_past_two_to_the_31_elements_is_the_right_one(
    subject: Subject, phase: Phase, seed: int
) -> None:
    bench = subject.bench()
    far_slots(bench, case_of(bench, phase, seed, (1, 2), 4, write_slots=(0, 3)))


@pytest.mark.case("C6")
@both_ports
@phases
def test_int64_slots_are_the_same_as_int32(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    narrow = bench.trial(case_of(bench, phase, seed, (1, 0), 4))
    wide = bench.trial(case_of(bench, phase, seed, (1, 0), 4, long=True))
    assert wide.parts.slots.dtype is torch.int64
    first, second = narrow.run().out, wide.run().out
    assert first is not None
    assert second is not None
    assert same_bits(first, second), f"seed {seed}"
    assert same_bits(narrow.parts.pool, wide.parts.pool), f"seed {seed}"


@pytest.mark.case("C7")
@both_ports
@pytest.mark.parametrize("fresh", [None, (True, False, False, False), (True, True, True, True)],
                         ids=["no-flags", "first-fresh", "all-fresh"])  # fmt: skip
@pytest.mark.parametrize("write_slots", [None, (4, 0, -1, 5)], ids=["in-place", "elsewhere"])
def test_empty_sequences_among_others_keep_their_states(
    subject: Subject, fresh: tuple[bool, ...] | None, write_slots: tuple[int, ...] | None, seed: int
) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(
        bench, Phase.EXTEND, seed, (3, 0, 2, 1), 6, lengths=(0, 5, 0, 4), fresh=fresh, write_slots=write_slots
    ))  # fmt: skip
    assert trial.parts.cu_seqlens is not None
    assert trial.parts.cu_seqlens.tolist() == [0, 0, 5, 5, 9]
    before, want = trial.parts.pool.clone(), trial.truth()
    trial.matches(trial.run(), want)
    for slot in sorted({2, 3, 4, 5} - trial.case.written):
        assert same_bits(before[slot], trial.parts.pool[slot]), f"slot {slot} changed, seed {seed}"


@pytest.mark.case("C8")
@gdn
def test_more_programs_than_a_grid_axis_holds(subject: Subject, seed: int) -> None:
    assert MANY_ROWS * MANY_HEADS > 65_535
    bench = subject.bench()
    if bench.limits.profile == "interpreter":
        pytest.skip("65,536 programs take minutes in the interpreter")
    ratio = gdn_sizes(bench).geometry.head_ratio
    sizes = gdn_sizes(bench, key_heads=MANY_HEADS // ratio, value_heads=MANY_HEADS)
    slots = tuple(range(MANY_ROWS))
    many_rows(bench, case_of(bench, Phase.DECODE, seed, slots, MANY_ROWS, sizes=sizes))


@pytest.mark.case("C26")
@both_ports
@phases
def test_a_padded_row_of_the_callers_output_is_zeroed(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(bench, phase, seed, (2, -1, 0), 4, own_out=True))
    assert trial.parts.out is not None
    assert bool(trial.parts.out.isnan().all())
    served = trial.run()
    assert served.out is trial.parts.out
    trial.padded_rows_are_zero(served)
    assert bool(torch.isfinite(served.out).all()), f"seed {seed}"


@both_ports
def test_a_commit_does_not_look_at_rows_that_copy_nothing(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(
        bench, Phase.COMMIT, seed, (2, -1, 2, 99, 1), 4, last=(1, 99, -1, -1, 1), rows=(1, -7, 99, 0, 1)))  # fmt: skip
    kept = trial.parts.intermediates
    assert kept is not None
    trial.run()
    trial.other_nodes_unchanged()
    trial.only_written_slots_changed()
    for slot in (1, 2):
        assert torch.equal(trial.parts.pool[slot], kept[1, 1]), f"slot {slot}, seed {seed}"


@pytest.mark.row("D25")
@both_ports
def test_intermediates_are_indexed_by_batch_row_not_by_slot(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(bench, Phase.VERIFY, seed, (14, 15), 16))
    want = trial.truth()
    assert {row for row, _ in want.nodes} == {0, 1}
    trial.matches(trial.run(), want)


@pytest.mark.row("D24")
@both_ports
def test_rows_pick_the_intermediates_of_a_smaller_or_larger_buffer(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    case = case_of(bench, Phase.VERIFY, seed, (0, -1, 2), 4, capacity=2, rows=(1, 1, 0))
    trial = bench.trial(case)
    want = trial.truth()
    trial.matches(trial.run(), want)
    trial.other_nodes_unchanged()


@pytest.mark.parametrize("subject", [p for p in subjects("gated_delta_rule") if p.values[0].name in SERVE_ALL])
def test_intermediates_of_another_dtype_than_the_states_are_rounded_and_converted(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(bench, Phase.VERIFY, seed, (2, 0), 4))
    pool, wide = trial.parts.pool, trial.parts.intermediates
    assert wide is not None
    assert pool.dtype is torch.float32
    narrow = torch.full(wide.shape, float("nan"), dtype=torch.bfloat16, device=wide.device)
    trial.run()
    bench.run(trial.replaced(intermediates=narrow))
    nodes = (slice(None), slice(0, trial.case.draft))
    torch.testing.assert_close(narrow[nodes].float(), wide[nodes], rtol=2.0**-8, atol=2.0**-16, msg=f"seed {seed}")
    slots = torch.tensor([1, 3], dtype=torch.int32, device=wide.device)
    bench.run(CommitCall(states=pool, slots=slots, intermediates=narrow, last=torch.ones_like(slots)))
    assert torch.equal(pool[[1, 3]], narrow[:, 1].float()), f"seed {seed}"
