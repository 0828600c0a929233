"""Requests share pools without touching one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_checkpoints import Pair, build, draw_prompts, load, true_logits, worst_error
from torch import Tensor

from qwen35.domain.errors import DtypeError, ShapeError, ValueRangeError
from qwen35.model import Model, Session
from qwen35.model.pools import GdnPool

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Pair:
    directory = tmp_path_factory.mktemp("moe")
    theirs = build("moe", seed)
    theirs.save_pretrained(directory)
    return Pair("moe", directory, theirs, load(directory), seed)


@pytest.fixture(scope="module")
def model(moe: Pair) -> Model:
    return moe.ours


def poison(session: Session, slot: int) -> None:
    """Leave NaN in everything that the last holder of ``slot`` could have left."""
    for pool in session.pools.layers:
        for tensor in (pool.states, pool.windows) if isinstance(pool, GdnPool) else (pool.keys, pool.values):
            tensor[slot] = float("nan")


def test_a_slot_whose_last_holder_left_nan_serves_the_next_request(moe: Pair) -> None:
    short, long = draw_prompts(moe.theirs, [3, 21], moe.generator())
    session = Session(moe.ours, slots=3, max_length=24)
    first, second, third = (session.open() for _ in range(3))
    session.extend([first, second, third], [long, long, long])
    session.close(second)
    poison(session, second)
    assert session.open() == second
    session.extend([second], [short[:-1]])
    got = session.decode([first, second], [5, short[-1]])
    assert worst_error(got[1:], true_logits(moe.theirs, short)[-1:]) < TOLERANCE, f"seed {moe.seed}"
    assert worst_error(got[:1], true_logits(moe.theirs, [*long, 5])[-1:]) < 1e-3, f"seed {moe.seed}"


def test_requests_joining_and_leaving_do_not_disturb_the_others(moe: Pair) -> None:
    a, b = draw_prompts(moe.theirs, [18, 11], moe.generator())
    session = Session(moe.ours, slots=2, max_length=20)
    one = session.open()
    session.extend([one], [a[:4]])
    session.decode([one], [a[4]])
    two = session.open()
    session.extend([two, one], [b[:7], a[5:6]])
    session.decode([two], [b[7]])
    session.extend([one], [a[6:-1]])
    session.extend([two], [b[8:-1]])
    got = session.decode([two, one], torch.tensor([b[-1], a[-1]]))
    want = torch.stack([true_logits(moe.theirs, b)[-1], true_logits(moe.theirs, a)[-1]])
    assert worst_error(got, want) < TOLERANCE, f"seed {moe.seed}"


def test_a_refused_call_changes_nothing(model: Model) -> None:
    session = Session(model, slots=2, max_length=4)
    slot = session.open()
    session.extend([slot], [[1, 2, 3]])
    before = [t.clone() for pool in session.pools.layers for t in vars_of(pool)]
    for slots, chunks, match in (
        ([slot], [[]], r"chunks\[0\] must hold at least one token"),
        ([slot], [[211]], r"chunks\[0\]\[0\] must be a token id in 0..210, got 211"),
        ([slot], [[-1]], "must be a token id"),
        ([slot], [[True]], "must be a token id"),
        ([slot], [[1, 2]], r"at most max_length = 4 tokens, got 3 \+ 2"),
        ([slot, slot], [[1], [2]], "name each slot once"),
        ([1], [[1]], "slot 1 is not open"),
        ([[slot]], [[1]], r"slot \[0\] is not open"),
        (["0"], [[1]], "slot '0' is not open"),
        ([False], [[1]], "slot False is not open"),
        ([slot], [[1], [2]], "a length for each slot"),
        ([], [], "a length for each slot"),
    ):
        with pytest.raises(ValueRangeError, match=match):
            session.extend(slots, chunks)  # type: ignore[arg-type]
    for token in (900, -1, 2.7, True, "x", None):
        with pytest.raises(ValueRangeError, match=rf"tokens\[0\] must be a token id in 0\.\.210, got {token!r}"):
            session.decode([slot], [token])  # type: ignore[list-item]
    with pytest.raises(ValueRangeError, match=r"must be in 0\.\.210, got 900"):
        session.decode([slot], torch.tensor([900]))
    for bad in (5, "12", b"12", None, torch.tensor(1)):
        for what, call in (
            ("slots must be a list of slots", lambda bad=bad: session.extend(bad, [[1]])),
            ("chunks must be a list with the token ids", lambda bad=bad: session.extend([slot], bad)),
            (r"chunks\[0\] must be a list of token ids", lambda bad=bad: session.extend([slot], [bad])),
            ("slots must be a list of slots", lambda bad=bad: session.decode(bad, [1])),
        ):
            with pytest.raises(ValueRangeError, match=what):
                call()
        if not isinstance(bad, torch.Tensor):
            with pytest.raises(ValueRangeError, match="tokens must be a list of token ids"):
                session.decode([slot], bad)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"tokens must be \[T\] = \[1\]"):
        session.decode([slot], [1, 2])
    with pytest.raises(DtypeError, match="int64"):
        session.decode([slot], torch.tensor([1.0]))
    assert session.length(slot) == 3
    after = [t for pool in session.pools.layers for t in vars_of(pool)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def vars_of(pool: object) -> list[torch.Tensor]:
    return [pool.states, pool.windows] if isinstance(pool, GdnPool) else [pool.keys, pool.values]  # type: ignore[attr-defined]


def test_slots_run_out_and_sizes_are_checked(model: Model) -> None:
    session = Session(model, slots=1, max_length=4)
    slot = session.open()
    with pytest.raises(ValueRangeError, match="all 1 slots are in use"):
        session.open()
    with pytest.raises(ValueRangeError, match="has no tokens yet"):
        session.decode([slot], [1])
    session.close(slot)
    with pytest.raises(ValueRangeError, match="not open"):
        session.close(slot)
    with pytest.raises(ValueRangeError, match="slots must be an int of at least 1, got 0"):
        Session(model, slots=0, max_length=4)
    for bad in (0, 2.5, True, "4"):
        with pytest.raises(ValueRangeError, match=f"max_length must be an int of at least 1, got {bad!r}"):
            Session(model, slots=1, max_length=bad)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"state_dtype must be a torch\.dtype, got 'bfloat16'"):
        Session(model, slots=1, max_length=4, state_dtype="bfloat16")  # type: ignore[arg-type]


def test_bfloat16_stays_near_float32_and_keeps_what_needs_float32(moe: Pair) -> None:
    half = load(moe.directory, torch.bfloat16)
    kept = {name for name, p in half.named_parameters() if p.dtype == torch.float32}
    assert kept == {
        name for name, _ in half.named_parameters() if "norm" in name or name.endswith(("A_log", "dt_bias"))
    }
    # Rounding may turn a close choice of experts, and all later rows with it: a row that none has reached is judged.
    assert float(rounding(moe, half).min()) < 2**-8 * 20, f"seed {moe.seed}"


def test_bfloat16_without_experts_stays_near_float32_in_most_rows(tmp_path: Path, seed: int) -> None:
    theirs = build("dense", seed)
    theirs.save_pretrained(tmp_path)
    pair = Pair("dense", tmp_path, theirs, load(tmp_path), seed)
    assert float(rounding(pair, load(tmp_path, torch.bfloat16)).median()) < 2**-8 * 40, f"seed {seed}"


def rounding(pair: Pair, half: Model) -> Tensor:
    """How far each row of logits by ``half`` is from those by the float32 model, relative."""
    (prompt,) = draw_prompts(pair.theirs, [40], pair.generator())
    logits = []
    for model in (half, pair.ours):
        session = Session(model, slots=1, max_length=40)
        logits.append(session.extend([session.open()], [prompt], every_token=True))
    assert logits[0].dtype == torch.float32
    return (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)


def test_the_checkpoints_own_dtype_is_the_default(tmp_path: Path, seed: int) -> None:
    build("dense", seed).bfloat16().save_pretrained(tmp_path)
    assert load(tmp_path, None).dtype == torch.bfloat16
