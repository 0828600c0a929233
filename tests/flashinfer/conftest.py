"""The bench of the tests that run FlashInfer's own kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from flashinfer_gpu_bed import Bench


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for adapter in bench.made:
        adapter.close()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.reseed(random.randrange(2**31))
    return shared
