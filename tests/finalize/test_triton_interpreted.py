"""The finalize kernels, phase by phase, with plain tensors as every rank's mailboxes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import handoff_tensors
from qwen35.services.finalize_agreement import Alone
from qwen35.testing.finalize_cases import NAN, FinalizeCase

pytestmark = pytest.mark.interpreter

#: A pretended device so small that one row is shared by two programs and nine rows are looped over.
MULTIPROCESSORS = 2


class Ranks:
    """All ranks of one signature in this process; programs of one launch run one after another."""

    def __init__(
        self, size: int, hidden: int, top_k: int, max_m: int, *, dtype: str = "float32", wire: str = "float32",
        weight_bias: float = 0.0, shared: bool = True, **tuned: int,
    ) -> None:  # fmt: skip
        from qwen35.adapters.triton.finalize_launch import Cut, Tuning
        from qwen35.adapters.triton.finalize_mailboxes import local_mailboxes, sizes
        from qwen35.adapters.triton.kernels.finalize_common import BUFFERS

        tuning = Tuning(wire=wire, min_slice=8, **tuned)
        self.cuts = [
            Cut(
                WorkspaceSignature(
                    group=self, tp_size=size, rank=rank, hidden=hidden, top_k=top_k, max_m=max_m, dtype=dtype,
                    weight_bias=weight_bias, shared_expert=shared,
                ),
                MULTIPROCESSORS, tuning,
            )
            for rank in range(size)
        ]  # fmt: skip
        self.signature = self.cuts[0].signature
        self.mail = local_mailboxes(self.signature, sizes(self.signature, wire, BUFFERS))

    def run(
        self, case: FinalizeCase, *, one_shot: bool, experts: bool = True, absent: int | None = None, spins: int = 0
    ) -> list[tuple[Tensor, Tensor]]:
        """Norm and residual of every rank; ``absent`` is a rank that never sends."""
        from qwen35.adapters.triton.finalize_launch import Rows, launch

        rows = []
        for rank in range(case.tp_size):
            out = [torch.full((case.m, case.hidden), NAN, dtype=case.residual().dtype) for _ in range(2)]
            common = {"residual": case.residual(), "gamma": case.gamma(), "norm": out[0], "out_residual": out[1]}
            if experts:
                routed, weights, indices, shared = handoff_tensors(case.handoff(rank))
                rows.append(Rows(source=routed, weights=weights, indices=indices, shared=shared, **common))
            else:
                rows.append(Rows(source=case.local(rank), **common))
        phases = [(True, False, False), (False, True, False), (False, False, True)]
        for phase in [phases[0], phases[2]] if one_shot else phases:
            for rank in range(case.tp_size):
                if absent == rank and phase[0]:
                    continue
                launch(
                    self.cuts[rank], self.mail[rank], rows[rank], rank, one_shot=one_shot, phases=phase,
                    spin_limit=spins,
                )  # fmt: skip
        return [(r.norm, r.out_residual) for r in rows]


def case_of(ranks: Ranks, m: int, seed: int, **changes: object) -> FinalizeCase:
    s = ranks.signature
    values = {"dtype": s.dtype, "weight_dtype": "float32", "shared": s.shared_expert} | changes
    return FinalizeCase(seed=seed, m=m, top_k=s.top_k, hidden=s.hidden, tp_size=s.tp_size, **values)


def assert_right(ranks: Ranks, case: FinalizeCase, got: list[tuple[Tensor, Tensor]], *, experts: bool = True) -> None:
    s = ranks.signature
    oracle = case.finalize_oracle if experts else case.all_reduce_oracle
    bound = FusionCapabilities().bound(s.dtype)
    for value, expected in zip(got[0], oracle(s.eps, s.weight_bias), strict=True):
        error = (value.double() - expected).norm() / expected.norm()
        assert error <= bound, f"{case}: {error:.2e} over {bound:.2e}"
    for other in got[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got[0], other, strict=True)), f"{case}: ranks differ in bits"


@pytest.mark.parametrize("one_shot", [True, False], ids=["one-shot", "two-step"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.row("A10")
def test_every_rank_ends_with_the_oracles_rows_and_the_same_bits(size: int, one_shot: bool) -> None:
    ranks = Ranks(size, hidden=24 if size == 2 else 32, top_k=2, max_m=11)
    for seed, m in enumerate((1, 2, 11, 1)):
        case = case_of(ranks, m, seed)
        assert_right(ranks, case, ranks.run(case, one_shot=one_shot))


@pytest.mark.parametrize(
    "tuned",
    [
        {"min_piece": 8},
        {"wave": 1},
        {"wave": 1, "min_piece": 16},
        {"wave": 1, "min_piece": 8, "pieces": 2},
        {"min_piece": 8, "pieces": 2},
        {"crowding": 4},
    ],
    ids=str,
)
def test_pieces_waves_and_crowds_change_no_result(tuned: dict[str, int]) -> None:
    ranks = Ranks(2, hidden=24, top_k=2, max_m=11, **tuned)
    for seed, m in enumerate((1, 4, 11, 2)):
        case = case_of(ranks, m, seed)
        assert_right(ranks, case, ranks.run(case, one_shot=True))


@pytest.mark.row("A12")
@pytest.mark.parametrize("one_shot", [True, False], ids=["one-shot", "two-step"])
def test_the_all_reduce_is_the_same_without_experts(one_shot: bool) -> None:
    ranks = Ranks(2, hidden=24, top_k=2, max_m=9, weight_bias=1.0, shared=False)
    for seed, m in enumerate((1, 9)):
        case = case_of(ranks, m, seed)
        assert_right(ranks, case, ranks.run(case, one_shot=one_shot, experts=False), experts=False)


def test_mailboxes_serve_many_uses_in_a_row_of_either_kind_and_any_size() -> None:
    ranks = Ranks(2, hidden=32, top_k=1, max_m=3)
    for seed, m in enumerate((1, 3, 1, 1, 2, 1, 1, 1, 3, 1, 1)):
        case = case_of(ranks, m, seed)
        assert_right(ranks, case, ranks.run(case, one_shot=seed % 3 != 2))


#: Uses by (rows, one-shot): what follows a use whose row programs share is one of each kind.
SHARED_ROW, ROW_EACH, TWO_STEPS, ONE_OF_TWO_STEPS = (1, True), (3, True), (3, False), (1, False)


@pytest.mark.parametrize(
    ("tuned", "uses"),
    [
        ({}, (ROW_EACH, SHARED_ROW, SHARED_ROW, SHARED_ROW, SHARED_ROW, SHARED_ROW)),
        ({}, (SHARED_ROW, ROW_EACH, SHARED_ROW, SHARED_ROW, ROW_EACH, ROW_EACH, SHARED_ROW)),
        ({"wave": 1}, (SHARED_ROW, ROW_EACH, SHARED_ROW, SHARED_ROW, ROW_EACH, ROW_EACH, SHARED_ROW)),
        ({}, (TWO_STEPS, ONE_OF_TWO_STEPS, ONE_OF_TWO_STEPS, ONE_OF_TWO_STEPS, ONE_OF_TWO_STEPS)),
        ({}, (SHARED_ROW, TWO_STEPS, SHARED_ROW, SHARED_ROW, ONE_OF_TWO_STEPS, ROW_EACH, TWO_STEPS)),
    ],
    ids=["shared", "shared and single", "shared and looping", "two-step", "shared and two-step"],
)
def test_every_use_leaves_nothing_behind_that_a_later_one_could_take_for_its_own(
    tuned: dict[str, int], uses: tuple[tuple[int, bool], ...]
) -> None:
    """All words are unmarked again but those of a row shared by programs, whose last buffer waits for its next use."""
    ranks = Ranks(2, hidden=32, top_k=1, max_m=3, **tuned)
    assert [ranks.cuts[0].splits(m) for m in (1, 3)] == [2, 1]
    assert ranks.cuts[0].single(3) is not bool(tuned)
    epochs, shared = [0, 0, 0], [False, False, False]
    for use, (m, one_shot) in enumerate(uses, start=1):
        case = case_of(ranks, m, use)
        assert_right(ranks, case, ranks.run(case, one_shot=one_shot))
        for row in range(m):
            epochs[row] += 1
            shared[row] = one_shot and m == 1
        for mail in ranks.mail:
            assert mail.epochs.tolist() == epochs, f"use {use}"
            assert bool((mail.outbox == -1).all()), f"use {use}"
            held = (mail.inbox.view(3, 4, -1) != -1).any(-1)
            expected = torch.zeros(3, 4, dtype=torch.bool)
            for row in range(3):
                expected[row, (epochs[row] - 1) % 4] = shared[row]
            assert torch.equal(held, expected), f"use {use}: words left in {held.nonzero().tolist()}"


@pytest.mark.row("A11")
@pytest.mark.row("A27")
@pytest.mark.parametrize("changes", [{"dropped": 1.0}, {"zeroed": 1.0, "dropped": 0.0}, {"padding": 40}])
def test_terms_that_do_not_count_leave_no_trace(changes: dict[str, float]) -> None:
    ranks = Ranks(2, hidden=24, top_k=2, max_m=4)
    case = case_of(ranks, 4, 5, **changes)
    assert_right(ranks, case, ranks.run(case, one_shot=True))


@pytest.mark.row("A26")
@pytest.mark.parametrize(("dtype", "wire"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("one_shot", [True, False], ids=["one-shot", "two-step"])
def test_negative_zero_and_not_a_number_are_values_like_any_other(one_shot: bool, dtype: str, wire: str) -> None:
    """Neither the sentinel's own bits nor -0.0 may be taken for "has not arrived", on the way to the owner or back."""
    words = {"float32": torch.int32, "bfloat16": torch.int16}[dtype]
    tokens = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]

    class Odd(FinalizeCase):
        def local(self, rank: int) -> Tensor:
            value = torch.full((self.m, self.hidden), -0.0, dtype=tokens)
            value[1] = torch.tensor(-1, dtype=words).view(tokens)
            return value

    ranks = Ranks(2, hidden=32, top_k=2, max_m=4, dtype=dtype, wire=wire)
    case = Odd(seed=1, m=3, top_k=2, hidden=32, tp_size=2, dtype=dtype)
    norm, residual = ranks.run(case, one_shot=one_shot, experts=False, spins=50)[1]
    assert all(mail.missing.tolist() == [0, 0] for mail in ranks.mail), "a value was taken for one that is missing"
    assert torch.equal(residual[0], case.residual()[0])
    assert norm[1].isnan().all()
    assert residual[1].isnan().all()
    assert not norm[2].isnan().any()


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_bfloat16_tokens_round_once_a_rank_at_most(wire: str) -> None:
    ranks = Ranks(2, hidden=32, top_k=2, max_m=3, dtype="bfloat16", wire=wire)
    for seed, m in enumerate((1, 3)):
        case = case_of(ranks, m, seed)
        got = ranks.run(case, one_shot=True)
        bound = FusionCapabilities(roundings=1.0 if wire == "float32" else 3.0).bound("bfloat16")
        for value, expected in zip(got[1], case.finalize_oracle(1e-6, 0.0), strict=True):
            assert (value.double() - expected).norm() <= bound * expected.norm(), case


@pytest.mark.parametrize("one_shot", [True, False], ids=["one-shot", "two-step"])
def test_checked_mode_names_the_rank_that_never_came(one_shot: bool) -> None:
    ranks = Ranks(3, hidden=24, top_k=1, max_m=3)
    case = case_of(ranks, 3, 7)
    got = ranks.run(case, one_shot=one_shot, absent=1, spins=3)
    assert any(mail.missing.tolist() == [0, 1, 0] for mail in ranks.mail)
    assert ranks.mail[0].missing[0] == 0
    assert got[0][0].isnan().any()


@pytest.mark.parametrize("shared", [True, False])
def test_more_tokens_than_mailboxes_have_rows_travel_in_several_launches(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    from qwen35.adapters.triton import finalize_mailboxes
    from qwen35.adapters.triton.finalize_fusion import make_workspace

    monkeypatch.setattr(finalize_mailboxes, "MOST_ROWS", 4)
    ranks = Ranks(1, hidden=32, top_k=2, max_m=11, shared=shared, max_splits=1)
    workspace = make_workspace(ranks.cuts[0], Alone(), 0)
    for seed, m in enumerate((4, 5, 8, 11)):
        case = case_of(ranks, m, seed)
        got = workspace.finalize(case.handoff(0), case.residual(), case.gamma())
        assert_right(ranks, case, [(got.norm, got.residual)])
        got = workspace.all_reduce(case.local(0), case.residual(), case.gamma())
        assert_right(ranks, case, [(got.norm, got.residual)], experts=False)


def test_indices_out_of_range_are_never_read() -> None:
    ranks = Ranks(1, hidden=32, top_k=2, max_m=4)
    case = case_of(ranks, 2, 3, dropped=0.0, zeroed=0.0, padding=0)
    routed, _, indices, _ = handoff_tensors(case.handoff(0))
    from qwen35.adapters.triton.finalize_launch import Rows, launch

    out = [torch.full((2, 32), NAN) for _ in range(2)]
    bad = torch.tensor([[-2, routed.shape[0]], [routed.shape[0] + 7, -(2**31)]], dtype=torch.int32)
    launch(
        ranks.cuts[0], ranks.mail[0],
        Rows(source=routed, weights=torch.ones(2, 2), indices=bad, residual=case.residual(), gamma=case.gamma(),
             norm=out[0], out_residual=out[1]),
        0, one_shot=True, phases=(True, True, True),
    )  # fmt: skip
    assert indices.shape == bad.shape
    assert torch.equal(out[1], case.residual())
