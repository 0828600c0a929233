"""Cases C30 and C31 and the fused-decode rows, for every adapter of the short convolution.

Row C24, the switch of the engine's fused projection, is about the engine alone: the contract begins after it.
"""

from __future__ import annotations

import pytest
import torch
from small import case_of, conv_sizes

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.geometry import GdnGeometry
from qwen35.domain.tensor_parallel import qkv_slices
from qwen35.testing.kit import Parts
from subjects import Subject, subjects

every = pytest.mark.parametrize("subject", subjects("short_convolution"))


@pytest.mark.case("C30")
@every
@pytest.mark.parametrize("phase", [Phase.EXTEND, Phase.DECODE])
def test_two_tokens_move_the_window_by_two(subject: Subject, phase: Phase, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(bench, Phase.EXTEND, seed, (1,), 3, lengths=(2,), sizes=conv_sizes(bench, width=4)))
    parts = trial.parts
    old, x = parts.pool[1].clone(), parts.tokens["x"]
    if phase is Phase.EXTEND:
        trial.run()
    else:
        for t in range(2):
            step = Parts(pool=parts.pool, slots=parts.slots, tokens={"x": x[t : t + 1]}, params=parts.params)
            bench.run(bench.call(Phase.DECODE, step))
    expected = torch.stack([old[:, 2], x[0].to(old.dtype), x[1].to(old.dtype)], dim=-1)
    assert torch.equal(parts.pool[1], expected), f"seed {seed}"


@pytest.mark.row("C25")
@every
def test_x_may_be_the_qkv_columns_of_a_wider_projection(subject: Subject, seed: int) -> None:
    bench = subject.bench()
    trial = bench.trial(case_of(bench, Phase.DECODE, seed, (2, -1, 0), 4, packed=True))
    assert trial.parts.tokens["x"].stride(0) > trial.case.sizes.channels
    trial.poison_padding()
    want = trial.truth()
    served = trial.run()
    trial.padded_rows_are_zero(served)
    trial.matches(served, want)
    trial.only_written_slots_changed()


@pytest.mark.case("C31")
@pytest.mark.row("G12")
def test_each_rank_gets_its_part_of_q_of_k_and_of_v() -> None:
    geometry = GdnGeometry(key_heads=2, value_heads=2, key_width=2, value_width=4)
    channels = torch.arange(geometry.conv_channels)
    q, k, v = channels[:4], channels[4:8], channels[8:]
    ranks = [[channels[part] for part in qkv_slices(geometry, 2, rank)] for rank in range(2)]
    assert [part.tolist() for part in ranks[0]] == [q[0:2].tolist(), k[0:2].tolist(), v[0:4].tolist()]
    rebuilt = torch.cat([torch.cat([ranks[rank][block] for rank in range(2)]) for block in range(3)])
    assert torch.equal(rebuilt, channels)


def test_heads_that_do_not_divide_over_the_ranks_are_refused() -> None:
    geometry = GdnGeometry(key_heads=2, value_heads=6, key_width=2, value_width=4)
    with pytest.raises(ConfigurationError, match="key_heads = 2"):
        qkv_slices(geometry, 3, 0)
    with pytest.raises(ConfigurationError, match="rank must be in"):
        qkv_slices(geometry, 2, 2)
