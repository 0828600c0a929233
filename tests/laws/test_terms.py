"""The size of the bound for outputs that cancel: the terms by loops over every index, and the error against them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qwen35.domain.capabilities import GateKind, Phase
from qwen35.testing import KITS, Case, GdnSizes, relative_error, truth
from qwen35.testing.make import make_parts

H, HV, K, V = 2, 4, 3, 2
SLOTS = (2, -1, 0)
CALLS: dict[str, dict[str, Any]] = {
    "decode": {"phase": Phase.DECODE}, "extend": {"phase": Phase.EXTEND, "lengths": (3, 1, 2)},
    "verify": {"phase": Phase.VERIFY, "draft": 3, "nodes": 3, "capacity": 3},
    "tree": {
        "phase": Phase.VERIFY, "draft": 3, "nodes": 3, "capacity": 3, "parents": ((-1, 0, 0), (-1, 0, 0), (-1, 0, 1)),
    },
}  # fmt: skip


def row_terms(state: Tensor, tokens: dict[str, Tensor], parents: list[int], scale: float) -> Tensor:
    """Root of the sum of the squares of S[v, k] q[k], [T, HV, V], of one row; token t continues token parents[t]."""
    after: list[Tensor] = []
    found = torch.zeros(len(parents), HV, V, dtype=torch.float64)
    for t, parent in enumerate(parents):
        new = (state if parent < 0 else after[parent]).clone()
        for head in range(HV):
            k, q = (tokens[name][t, head // (HV // H)] for name in ("k", "q"))
            k, q = k / (k @ k + 1e-6).sqrt(), q / (q @ q + 1e-6).sqrt() * scale
            new[head] *= tokens["g"][t, head].exp()
            for v in range(V):
                delta = tokens["beta"][t, head] * (tokens["v"][t, head, v] - new[head, v] @ k)
                new[head, v] += delta * k
                found[t, head, v] = sum((float(new[head, v, i]) * float(q[i])) ** 2 for i in range(K)) ** 0.5
        after.append(new)
    return found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_terms_are_those_of_every_output_with_the_state_after_its_token(
    name: str, scale: float | None, seed: int
) -> None:
    kit = KITS["gated_delta_rule"]
    sizes = GdnSizes(key_heads=H, value_heads=HV, key_width=K, value_width=V, gates=GateKind.LOG, scale=scale)
    case: Case[GdnSizes] = Case(sizes=sizes, seed=seed, pool=4, slots=SLOTS, **CALLS[name])
    parts = make_parts(kit, case, torch.device("cpu")).parts
    want = truth(kit, kit.call(case.phase, parts))
    assert want.terms is not None
    got = want.terms()
    assert got is not None
    if case.phase is Phase.EXTEND:
        spans = [slice(a, b) for a, b in zip(case.offsets, case.offsets[1:], strict=False)]
        rows = [{n: t[span].double() for n, t in parts.tokens.items()} for span in spans]
        mine = [got[span] for span in spans]
    else:
        lead = (slice(None), None) if case.phase is Phase.DECODE else (slice(None),)
        rows = [{n: t[lead][row].double() for n, t in parts.tokens.items()} for row in range(len(SLOTS))]
        mine = list(got[lead])
    for row, (slot, tokens) in enumerate(zip(SLOTS, rows, strict=True)):
        length = len(tokens["q"])
        parents = list(case.parents[row]) if case.parents else list(range(-1, length - 1))
        expected = torch.zeros_like(mine[row])
        if slot >= 0:
            expected = row_terms(parts.pool[slot].double(), tokens, parents, K**-0.5 if scale is None else scale)
        torch.testing.assert_close(mine[row], expected, rtol=1e-9, atol=1e-12, msg=lambda m: f"seed {seed}: {m}")


def test_an_error_is_relative_to_the_larger_of_the_output_and_its_terms() -> None:
    want, got = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert relative_error(got, want) == pytest.approx(0.1)
    assert relative_error(got, want, torch.tensor([0.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(got, want, torch.tensor([6.0, 8.0])) == pytest.approx(0.05)
    assert relative_error(got, torch.zeros(2), torch.zeros(2)) == float("inf")
