"""Cases C13 and C20 to C28: numbers that broke real deployments, for every adapter of the gated delta rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from small import TOKEN_PHASES, case_of, gdn_sizes

from qwen35.domain.capabilities import GateKind, Phase
from qwen35.testing import Bench, Case, assert_close
from qwen35.testing.bench import Refused
from qwen35.testing.kit import Parts
from qwen35.testing.oracle import row_of
from qwen35.testing.refusal_laws import unsupported_options
from qwen35.testing.sequence_laws import decode_tokens, extend_spans
from qwen35.testing.tensors import same_bits
from subjects import Subject, subjects

every = pytest.mark.parametrize("subject", subjects("gated_delta_rule"))
phases = pytest.mark.parametrize("phase", TOKEN_PHASES)


def sequence(bench: Bench, seed: int, tokens: int, **more: Any) -> Case[Any]:
    """One sequence in slot 1 of a pool of 3."""
    return case_of(bench, Phase.EXTEND, seed, (1,), 3, lengths=(tokens,), **more)


@pytest.mark.case("C13")
@pytest.mark.row("D03")
@pytest.mark.row("D19")
@every
@phases
def test_q_and_k_of_one_shape_may_both_be_misaligned(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    aligned = bench.trial(case_of(bench, phase, seed, (2, 0), 4))
    shifted = bench.trial(case_of(bench, phase, seed, (2, 0), 4, shift=1))
    for name in ("q", "k"):
        assert shifted.parts.tokens[name].data_ptr() % 16, "the case is meant to be misaligned"
    want = aligned.truth()
    aligned.matches(aligned.run(), want)
    shifted.matches(shifted.run(), want)


@pytest.mark.case("C20")
@every
@phases
def test_a_log_gate_of_minus_one_decays_the_state_by_e(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    if GateKind.LOG not in bench.adapter.capabilities.gates:
        pytest.skip("log gates are not offered")
    case = case_of(bench, phase, seed, (1,), 3, sizes=gdn_sizes(bench, gates=GateKind.LOG))
    one = {Phase.DECODE: {}, Phase.EXTEND: {"lengths": (1,)}, Phase.VERIFY: {"draft": 1, "nodes": 1}}
    case = replace(case, **one[phase])
    trial = bench.trial(case)
    trial.parts.tokens["g"].fill_(-1.0)
    trial.parts.tokens["beta"].fill_(0.0)
    before = trial.parts.pool[1].double()
    trial.run()
    after = trial.parts.pool[1] if phase is not Phase.VERIFY else trial.parts.intermediates[0, 0]
    assert_close("state", after, before * 0.36787944117144233, trial.bound().state, case)


@pytest.mark.case("C21")
@pytest.mark.row("D16")
@every
@phases
def test_q_and_k_are_normalised(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    case = case_of(bench, phase, seed, (1, 0), 3)
    plain, scaled = bench.trial(case), bench.trial(case)
    for name in ("q", "k"):
        # Unit vectors: at their length the epsilon of the norm is far below every bound.
        unit = torch.nn.functional.normalize(plain.parts.tokens[name].float(), dim=-1)
        plain.parts.tokens[name].copy_(8 * unit)
        scaled.parts.tokens[name].copy_(10 * plain.parts.tokens[name].float())
    terms = plain.terms()
    out, tenfold = plain.run().out, scaled.run().out
    assert out is not None
    assert tenfold is not None
    rounding = 0.0 if case.sizes.token_dtype is torch.float32 else 2.0**-7
    assert_close("out", tenfold, out, 2 * plain.bound().output + rounding, case, terms)


@pytest.mark.case("C22")
@every
def test_beta_is_not_rounded_in_one_path_only(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    case = sequence(bench, seed, 64, sizes=gdn_sizes(bench, gates=bench.limits.gates[0]))
    whole, stepped = bench.trial(case), bench.trial(case)
    for trial in (whole, stepped):
        if "b" in trial.parts.tokens:
            trial.parts.tokens["b"].fill_(0.5)
        else:
            trial.parts.tokens["beta"].fill_(0.6224593312018546)
    want = whole.truth().states[1]
    whole.run()
    decode_tokens(bench, stepped.parts, [(0, 64)])
    assert_close("state of extend", whole.parts.pool[1], want, whole.bound().state, case)
    assert_close("state of decode", stepped.parts.pool[1], want, bench.bound(case, Phase.DECODE, 64).state, case)


@pytest.mark.case("C23")
@every
@pytest.mark.parametrize("tokens", [1, 31, 33, 63, 65, 500])
def test_the_final_state_is_right_at_every_length(subject: Subject, tokens: int, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(sequence(bench, seed, tokens))
    want = trial.truth()
    trial.matches(trial.run(), want)


@pytest.mark.case("C24")
@every
def test_three_ways_to_split_96_tokens_give_one_answer(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    case = sequence(bench, seed, 96)
    want = bench.trial(case).truth()
    for cuts in ((0, 64, 96), (0, 1, 64, 96)):
        parts = bench.trial(case).parts
        outs = [extend_spans(bench, parts, [(a, b)], None) for a, b in pairwise(cuts)]
        bound = bench.bound(case, Phase.EXTEND, len(cuts))
        assert_close(f"out, cut at {cuts}", torch.cat(outs), want.out, bound.output, case, want.terms)
        assert_close(f"state, cut at {cuts}", parts.pool[1], want.states[1], bound.state, case)
    parts = bench.trial(case).parts
    outs = decode_tokens(bench, parts, [(0, 96)])
    bound = bench.bound(case, Phase.DECODE, 96)
    joined = torch.stack([outs[t] for t in range(96)])
    assert_close("out of 96 decodes", joined, want.out, bound.output, case, want.terms)
    assert_close("state of 96 decodes", parts.pool[1], want.states[1], bound.state, case)


@pytest.mark.case("C25")
@every
def test_decode_after_extend_reads_the_state_the_right_way_round(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    case = sequence(bench, seed, 65)
    trial = bench.trial(case)
    want = trial.truth()
    extend_spans(bench, trial.parts, [(0, 64)], None)
    middle = trial.parts.pool[1]
    if middle.shape[-1] == middle.shape[-2]:
        assert not torch.allclose(middle, middle.transpose(-1, -2)), "the case wants a state that is not symmetric"
    outs = decode_tokens(bench, trial.parts, [(64, 65)])
    before, last = bench.bound(case, Phase.EXTEND), bench.bound(case, Phase.DECODE)
    assert_close("out", outs[64], want.out[64], before.output + last.output, case, row_of(want.terms, 64))
    assert_close("state", trial.parts.pool[1], want.states[1], before.state + last.state, case)


@pytest.mark.case("C27")
@pytest.mark.row("D23")
@pytest.mark.parametrize("subject", [*subjects("gated_delta_rule"), *subjects("short_convolution")])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_the_state_follows_the_accepted_tokens_only(subject: Subject, accepted: int, seed: int) -> None:
    bench = subject.bench()
    case = case_of(bench, Phase.VERIFY, seed, (2, 0), 4, draft=3, nodes=3)
    trial = bench.trial(case)
    parts, before = trial.parts, trial.parts.pool.clone()
    trial.run()
    assert same_bits(before, parts.pool), f"verify wrote the pool, seed {seed}"
    last = torch.full_like(parts.slots, accepted - 1)
    bench.run(bench.call(Phase.COMMIT, Parts(
        pool=parts.pool, slots=parts.slots, intermediates=parts.intermediates, last=last)))  # fmt: skip
    tokens = {name: t[:, 2] for name, t in parts.tokens.items()}
    decode = Parts(pool=parts.pool, slots=parts.slots, tokens=tokens, params=parts.params)
    out = bench.run(bench.call(Phase.DECODE, decode)).out
    # The same by the oracle: the accepted tokens and the decoded one as one sequence from the first state.
    kept = {
        name: torch.cat([t[i, :accepted] if j == 0 else t[i, 2:3] for i in range(2) for j in range(2)])
        for name, t in parts.tokens.items()
    }
    offsets = torch.tensor([0, accepted + 1, 2 * accepted + 2], dtype=torch.int32, device=bench.place)
    want = bench.truth(bench.call(Phase.EXTEND, Parts(
        pool=before, slots=parts.slots, tokens=kept, params=parts.params, cu_seqlens=offsets)))  # fmt: skip
    bound = bench.bound(case, Phase.DECODE, 2)
    assert want.out is not None
    rows = [accepted, 2 * accepted + 1]
    assert_close("out", out, want.out[rows], 2 * bound.output, case, row_of(want.terms, rows))
    for slot in (2, 0):
        assert_close(f"state of slot {slot}", parts.pool[slot], want.states[slot], 2 * bound.state, case)


@pytest.mark.case("C28")
@pytest.mark.row("D22")
@every
@pytest.mark.parametrize("option", ["tree", "checkpoints", "zero scale"])
def test_an_option_is_honoured_or_refused_with_a_reason(subject: Subject, option: str, seed: int) -> None:
    bench = subject.bench()
    if option == "tree":
        case = case_of(bench, Phase.VERIFY, seed, (1, 2), 4, draft=4, nodes=4, parents=((-1, 0, 0, 1), (-1, -1, 1, 0)))
    elif option == "checkpoints":
        case = sequence(bench, seed, 70, every=7)
    else:
        case = case_of(bench, Phase.DECODE, seed, (1,), 3, sizes=gdn_sizes(bench, scale=0.0))
    unsupported_options(bench, case)


@pytest.mark.row("C23")
@every
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
def test_every_head_ratio_gives_the_same_values_or_a_reason(subject: Subject, ratio: int, seed: int) -> None:
    bench = subject.bench()
    sizes = gdn_sizes(bench, key_heads=2, value_heads=2 * ratio)
    for phase in TOKEN_PHASES:
        unsupported_options(bench, case_of(bench, phase, seed, (1, 2), 4, sizes=sizes))


@pytest.mark.row("D17")
@every
def test_the_callers_output_of_extend_is_written_in_place_and_returned(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(sequence(bench, seed, 40, own_out=True, packed=True))
    want = trial.truth()
    served = trial.run()
    assert served.out is trial.parts.out
    trial.matches(served, want)
    trial.out_gaps_unchanged()


@pytest.mark.row("D20")
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_extend_serves_pools_of_either_dtype_in_place(subject: Subject, dtype: torch.dtype, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(sequence(bench, seed, 65, sizes=gdn_sizes(bench, state_dtype=dtype)))
    want = trial.truth()
    trial.matches(trial.run(), want)
    trial.only_written_slots_changed()


@pytest.mark.row("D21")
@every
def test_checkpoints_count_whole_multiples_of_each_sequence(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    if not bench.adapter.capabilities.checkpoints:
        raise Refused(["checkpoints are not offered"])
    step = bench.limits.checkpoint_multiple if bench.limits.checkpoint_multiple > 1 else 5
    lengths = (2 * step + 1, step - 1, step)
    trial = bench.trial(case_of(bench, Phase.EXTEND, seed, (2, 0, 1), 4, lengths=lengths, every=step))
    want = trial.truth()
    served = trial.run()
    assert served.checkpoints is not None
    assert served.checkpoints.shape[0] == 3
    trial.matches(served, want)
    bound = trial.bound().state
    assert_close("a boundary is the final state", served.checkpoints[2], want.states[1], bound, trial.case)


@pytest.mark.row("D13")
@every
def test_decode_returns_one_row_a_token_in_the_tokens_dtype(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    sizes = gdn_sizes(bench, token_dtype=bench.limits.token_dtypes[-1])
    trial = bench.trial(case_of(bench, Phase.DECODE, seed, (1, 0), 3, sizes=sizes))
    out = trial.run().out
    assert out is not None
    assert tuple(out.shape) == (2, sizes.value_heads, sizes.value_width)
    assert out.dtype is sizes.token_dtype
