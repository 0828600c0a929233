"""Pools of rank processes that stand for a whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from finalize_pool import Pool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    """Two CPU processes over gloo on the loopback interface."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_gpus() -> Iterator[Pool]:
    """Two processes over NCCL, a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = Pool(2, "nccl", timeout_s=400)
    yield pool
    pool.close()
