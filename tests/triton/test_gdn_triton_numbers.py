"""Numbers that our chunked and tree kernels must get right, against the float64 oracle, under Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import qwen35
from qwen35.domain.capabilities import Phase
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    DecodeCall,
    ExtendCall,
    GatedDeltaRule,
    Gates,
    LogGates,
    RawGates,
    VerifyCall,
)
from qwen35.testing.measure import relative_error

pytestmark = pytest.mark.interpreter

H, HV, K, V = 1, 2, 16, 8


@dataclass(frozen=True)
class Draw:
    """Random tokens from a seed that a failure names."""

    seed: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)

    def gates(self, *leading: int) -> RawGates:
        a, b = torch.randn(2, *leading, HV)
        return RawGates(a=a, b=b, A_log=torch.rand(HV) - 1, dt_bias=torch.randn(HV) - 1)

    def extend(self, lengths: list[int], gates: Gates | None = None, **options: object) -> ExtendCall:
        tokens, sequences = sum(lengths), len(lengths)
        packed = torch.randn(tokens, (2 * H * K) + HV * V)
        q, k = packed[:, : H * K].view(tokens, H, K), packed[:, H * K : 2 * H * K].view(tokens, H, K)
        call = ExtendCall(
            q=q, k=k, v=packed[:, 2 * H * K :].view(tokens, HV, V), gates=gates or self.gates(tokens),
            states=torch.randn(sequences + 2, HV, V, K), slots=torch.randperm(sequences + 2)[:sequences].int(),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        )  # fmt: skip
        return replace(call, **options)  # type: ignore[arg-type]


@pytest.fixture
def draw() -> Draw:
    return Draw(random.SystemRandom().randrange(2**31))


@pytest.fixture
def kernels() -> Iterator[GatedDeltaRule]:
    adapter = qwen35.adapter("gated_delta_rule", "triton")
    yield adapter
    adapter.close()


@pytest.fixture
def oracle() -> GatedDeltaRule:
    return qwen35.adapter("gated_delta_rule", "reference64")


@pytest.mark.parametrize(("rows", "key_width", "value_width"), [(3, 128, 8), (3, 96, 24), (64, 128, 8)])
@pytest.mark.parametrize("to_other_slots", [False, True])
def test_decode_at_the_widths_of_the_model(
    draw: Draw, kernels: GatedDeltaRule, oracle: GatedDeltaRule, rows: int, key_width: int, value_width: int,
    to_other_slots: bool,
) -> None:  # fmt: skip
    """Rows of the state in two pieces, by the tile of few states and by that of many; a padded row is full of NaN."""
    q, k = torch.randn(2, rows, H, key_width)
    call = DecodeCall(
        q=q, k=k, v=torch.randn(rows, HV, value_width), gates=draw.gates(rows),
        states=torch.randn(2 * rows + 1, HV, value_width, key_width), slots=torch.randperm(rows).int(),
    )  # fmt: skip
    call.slots[1] = -1
    for tokens in (call.q, call.v, raw(call).a):
        tokens[1] = float("nan")
    if to_other_slots:
        call = replace(call, write_slots=(rows + torch.randperm(rows)).int())
    truth = replace(call, states=call.states.double().clone())
    want, out = oracle.decode(truth), kernels.decode(call)
    bound = kernels.capabilities.precision[Phase.DECODE].bound("float32", "float32")
    assert relative_error(out, want) < bound.output, draw
    assert relative_error(call.states, truth.states) < bound.state, draw
    assert bool((out[1] == 0).all()), draw


def raw(call: DecodeCall) -> RawGates:
    assert isinstance(call.gates, RawGates)
    return call.gates


def own_states(call: ExtendCall) -> ExtendCall:
    return replace(call, states=call.states.double().clone())


def check(kernels: GatedDeltaRule, oracle: GatedDeltaRule, call: ExtendCall, draw: Draw) -> None:
    """Output and states of ``call`` within the kernels' own bound; padding and NaN in ``out`` come out finite."""
    truth = own_states(call)
    expected = oracle.extend(truth)
    call = replace(call, out=torch.full_like(call.v, float("nan")))
    result = kernels.extend(call)
    bound = kernels.capabilities.precision[Phase.EXTEND].bound("float32", "float32")
    assert relative_error(result.out, expected.out) <= bound.output, draw
    assert relative_error(call.states, truth.states) <= bound.state, draw


@pytest.mark.case("C23")
@pytest.mark.parametrize("lengths", [[1, 31, 33], [63, 0, 65], [130, 64]])
def test_chunks_of_every_length_equal_the_recurrence(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw, lengths: list[int]
) -> None:
    check(kernels, oracle, draw.extend(lengths), draw)


def test_one_key_repeated_without_decay_stays_exact(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw
) -> None:
    call = draw.extend([100], LogGates(g=torch.zeros(100, HV), beta=torch.full((100, HV), 0.999)))
    check(kernels, oracle, replace(call, k=call.k[:1].expand(100, H, K).contiguous()), draw)


def test_a_huge_decay_does_not_blur_the_small_ones_after_it(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw
) -> None:
    g = -torch.rand(64, HV) * 0.05
    g[:20] = -100.0
    check(kernels, oracle, draw.extend([64], LogGates(g=g, beta=torch.rand(64, HV))), draw)


@pytest.mark.parametrize("huge", [-1e3, -1e30, -float("inf")])
def test_a_state_decayed_to_nothing_leaves_finite_results(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw, huge: float
) -> None:
    g = torch.where(torch.rand(70, HV) < 0.3, huge, -torch.rand(70, HV))
    check(kernels, oracle, draw.extend([70], LogGates(g=g, beta=torch.rand(70, HV))), draw)


def test_zero_keys_and_queries_leave_finite_results(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw
) -> None:
    call = draw.extend([66])
    call.k[10:40] = 0
    call.q[20:50] = 0
    check(kernels, oracle, call, draw)


@pytest.mark.case("C4")
@pytest.mark.parametrize("length", [1, 65])
def test_a_fresh_sequence_ignores_nan_in_its_slot(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw, length: int
) -> None:
    call = draw.extend([length, 7], fresh=torch.tensor([True, False]))
    call.states[call.slots[0]] = float("nan")
    check(kernels, oracle, call, draw)


def test_what_an_earlier_call_left_in_scratch_is_never_read(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw
) -> None:
    poison = draw.extend([150])
    poison.v.fill_(float("nan"))
    poison.k.fill_(float("nan"))
    poison.q.fill_(float("nan"))
    kernels.extend(poison)
    check(kernels, oracle, draw.extend([33, 40], slots=torch.tensor([3, -1], dtype=torch.int32)), draw)


@pytest.mark.case("C24")
def test_any_split_of_a_prompt_gives_one_answer(kernels: GatedDeltaRule, draw: Draw) -> None:
    whole = draw.extend([96])
    bound = kernels.capabilities.precision[Phase.EXTEND].bound("float32", "float32")
    results = []
    for split in ([96], [64, 32], [1, 63, 32]):
        states, outs = whole.states.clone(), []
        for start, length in zip(torch.tensor([0, *split]).cumsum(0).tolist(), split, strict=False):
            part = slice(start, start + length)
            gates = whole.gates
            assert isinstance(gates, RawGates)
            piece = replace(
                whole, q=whole.q[part], k=whole.k[part], v=whole.v[part], states=states,
                gates=replace(gates, a=gates.a[part], b=gates.b[part]),
                cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
            )  # fmt: skip
            outs.append(kernels.extend(piece).out)
        results.append((torch.cat(outs), states))
    for out, states in results[1:]:
        assert relative_error(out, results[0][0]) <= 2 * bound.output, draw
        assert relative_error(states, results[0][1]) <= 2 * bound.state, draw


def test_checkpoints_are_the_states_that_shorter_calls_leave(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw
) -> None:
    plan = CheckpointPlan(every=64, starts=torch.tensor([0, 2, 2]), count=2)
    call = draw.extend([130, 63], checkpoints=plan)
    expected = oracle.extend(own_states(call)).checkpoints
    got = kernels.extend(call).checkpoints
    assert got is not None
    assert expected is not None
    bound = kernels.capabilities.precision[Phase.EXTEND].bound("float32", "float32")
    assert relative_error(got, expected) <= bound.state, draw


def verify_call(draw: Draw, batch: int, draft: int, parents: Tensor | None) -> VerifyCall:
    packed = torch.randn(batch, draft, 2 * H + HV, K)
    return VerifyCall(
        q=packed[:, :, :H], k=packed[:, :, H : 2 * H], v=packed[:, :, 2 * H :, :V], gates=draw.gates(batch, draft),
        states=torch.randn(batch + 1, HV, V, K), slots=torch.arange(batch, dtype=torch.int32), parents=parents,
        intermediates=torch.full((batch, draft, HV, V, K), float("nan")),
    )  # fmt: skip


def test_a_chain_written_as_a_tree_is_the_chain_bit_for_bit(kernels: GatedDeltaRule, draw: Draw) -> None:
    chain = verify_call(draw, 2, 4, None)
    tree = replace(
        chain, parents=torch.arange(-1, 3, dtype=torch.int32).expand(2, 4).contiguous(),
        intermediates=chain.intermediates.clone(),
    )  # fmt: skip
    assert torch.equal(kernels.verify(chain), kernels.verify(tree)), draw
    assert torch.equal(chain.intermediates, tree.intermediates), draw


def test_every_node_of_a_tree_continues_from_its_parent(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw
) -> None:
    parents = torch.tensor([[-1, 0, 0, 1, -1, 2], [-1, -1, 1, 1, 1, 4]])
    call = verify_call(draw, 2, 6, parents)
    truth = replace(call, states=call.states.double(), intermediates=call.intermediates.double())
    expected = oracle.verify(truth)
    bound = kernels.capabilities.precision[Phase.VERIFY].bound("float32", "float32")
    assert relative_error(kernels.verify(call), expected) <= bound.output, draw
    assert relative_error(call.intermediates, truth.intermediates) <= bound.state, draw


def test_a_gate_far_below_zero_keeps_its_small_decay(
    kernels: GatedDeltaRule, oracle: GatedDeltaRule, draw: Draw
) -> None:
    """softplus(-12) is 6e-6: 1 + exp(-12) in float32 would keep two of its digits."""
    call = verify_call(draw, 1, 1, None)
    gates = RawGates(
        a=torch.full((1, HV), -12.0), b=torch.full((1, HV), -200.0), A_log=torch.full((HV,), 9.0),
        dt_bias=torch.zeros(HV),
    )  # fmt: skip
    decode = DecodeCall(
        q=call.q[:, 0], k=call.k[:, 0], v=call.v[:, 0], gates=gates, states=call.states, slots=call.slots
    )
    truth = replace(decode, states=decode.states.double())
    expected = oracle.decode(truth)
    bound = kernels.capabilities.precision[Phase.DECODE].bound("float32", "float32")
    assert relative_error(kernels.decode(decode), expected) <= bound.output, draw
    assert relative_error(decode.states, truth.states) <= bound.state, draw
