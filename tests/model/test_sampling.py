"""Sampling draws from the distribution that its options describe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qwen35.model.sampling import Sampling, choose

LOGITS = torch.tensor([0.6, 0.25, 0.1, 0.05]).log()[[2, 0, 3, 1]]  # token 1 likeliest, then 3, 0, 2
DRAWS = 8000


def frequencies(sampling: Sampling) -> Tensor:
    generators = sampling.generators(1) * DRAWS
    return choose(LOGITS.expand(DRAWS, -1), sampling, generators).bincount(minlength=4) / DRAWS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.1, 0.6, 0.05, 0.25]),
        ({"temperature": 1.0, "top_k": 2}, [0.0, 0.6 / 0.85, 0.0, 0.25 / 0.85]),
        ({"temperature": 1.0, "top_k": 9}, [0.1, 0.6, 0.05, 0.25]),
        ({"temperature": 1.0, "top_p": 0.5}, [0.0, 1.0, 0.0, 0.0]),
        ({"temperature": 1.0, "top_p": 0.7}, [0.0, 0.6 / 0.85, 0.0, 0.25 / 0.85]),
        ({"temperature": 1.0, "top_p": 1e-9}, [0.0, 1.0, 0.0, 0.0]),
        # top_p counts what top_k left: 0.6 / 0.85 = 0.706 reaches 0.7 alone.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, [0.0, 1.0, 0.0, 0.0]),
        ({"temperature": 0.5}, [0.01 / 0.435, 0.36 / 0.435, 0.0025 / 0.435, 0.0625 / 0.435]),
        ({"temperature": 0.0}, [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_tokens_come_as_often_as_they_should(options: dict[str, float], expected: list[float], seed: int) -> None:
    got = frequencies(Sampling(**options, seed=seed))  # type: ignore[arg-type]
    want = torch.tensor(expected)
    # Five standard deviations of a frequency; a token that was cut must never come.
    allowed = 5 * (want * (1 - want) / DRAWS).sqrt() + 1e-9
    assert bool(((got - want).abs() <= allowed).all()), f"{got.tolist()}, seed {seed}"


def test_top_p_stops_at_the_token_that_reaches_it_exactly() -> None:
    halves = torch.tensor([[0.0, 0.0, float("-inf")]]).expand(50, -1)
    drawn = choose(halves, Sampling(temperature=1.0, top_p=0.5), Sampling().generators(50))
    assert set(drawn.tolist()) == {0}


def test_a_tiny_temperature_is_greedy_and_equal_logits_give_a_kept_token() -> None:
    assert frequencies(Sampling(temperature=1e-30)).tolist() == [0, 1, 0, 0]
    equal = choose(torch.zeros(50, 4), Sampling(temperature=1.0), Sampling().generators(50))
    assert set(equal.tolist()) == {0, 1, 2, 3}
