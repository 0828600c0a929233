"""One checkpoint of each kind a session: writing them is most of the time."""

from __future__ import annotations

import random

import pytest
import torch
from model_checkpoints import Pair, build, load

#: kind, tied embeddings, the largest shard that save_pretrained may write.
KINDS = {
    "dense": ("dense", False, "5GB"),
    "dense-tied": ("dense", True, "50KB"),
    "moe": ("moe", False, "100KB"),
    "moe-tied": ("moe", True, "5GB"),
    "dense-wrapped": ("dense-wrapped", True, "5GB"),
    "moe-wrapped": ("moe-wrapped", False, "5GB"),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def seed() -> int:
    """Fresh each session; every assertion message shows it."""
    return random.SystemRandom().randrange(2**31)


@pytest.fixture(scope="session", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Pair:
    kind, tied, shard = KINDS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    theirs = build(kind, seed, tied)
    theirs.save_pretrained(directory, max_shard_size=shard)
    return Pair(request.param, directory, theirs, load(directory), seed)
