"""What each rank holds, for more ranks than the two that run: sizes, pieces, and sizes that cannot be divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_checkpoints import build

from qwen35.domain.errors import ConfigurationError
from qwen35.model.config import TextConfig, read_config
from qwen35.model.sharding import piece_of, shard_config
from qwen35.model.weights import Part, WeightSpec, weight_table


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, seed: int) -> TextConfig:
    """4 attention heads, 2 key/value heads, 2 key heads and 4 value heads of GDN, a vocabulary of 211."""
    path = tmp_path_factory.mktemp("moe")
    build("moe", seed).config.save_pretrained(path)
    return read_config(Path(path))


@pytest.mark.parametrize("size", [1, 2])
def test_every_piece_has_the_shape_that_the_ranks_model_wants(config: TextConfig, size: int) -> None:
    whole, own = weight_table(config), weight_table(shard_config(config, size))
    assert whole.keys() == own.keys()
    for name, spec in whole.items():
        for rank in range(size):
            piece = piece_of(spec, None, size, rank)
            assert piece.read(torch.zeros(spec.shape)).shape == own[name].shape, name


def test_experts_stored_one_by_one_make_up_the_packed_piece(config: TextConfig) -> None:
    for name, spec in weight_table(config).items():
        if not spec.parts:
            continue
        whole = torch.randn(spec.shape)
        for rank in range(2):
            want = piece_of(spec, None, 2, rank).read(whole)
            got = torch.full_like(want, float("nan"))
            for part in spec.parts:
                piece = piece_of(spec, part, 2, rank)
                rows = piece.read(whole[part.expert, part.start : part.stop])
                got[part.expert, piece.start : piece.start + rows.shape[0]] = rows
            assert torch.equal(got, want), f"{name}, rank {rank}"


def test_fewer_heads_than_ranks_are_held_by_neighbours() -> None:
    spec = WeightSpec(shape=(6, 2), shard_dim=0, heads=2)
    weight = torch.arange(12.0).view(6, 2)
    pieces = [piece_of(spec, None, 4, rank).read(weight) for rank in range(4)]
    for rank, head in enumerate((weight[:3], weight[:3], weight[3:], weight[3:])):
        assert torch.equal(pieces[rank], head)


def test_a_vocabulary_that_does_not_divide_ends_in_zeros() -> None:
    spec = WeightSpec(shape=(5, 1), shard_dim=0, padded=True)
    weight = torch.arange(1.0, 6.0)[:, None]
    pieces = [piece_of(spec, None, 4, rank).read(weight)[:, 0].tolist() for rank in range(4)]
    assert pieces == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_sizes_that_cannot_be_divided_are_all_named(config: TextConfig) -> None:
    with pytest.raises(ConfigurationError) as caught:
        shard_config(config, 3)
    for name in (
        "num_key_value_heads = 2", "num_attention_heads = 4", "linear_num_key_heads = 2", "linear_num_value_heads = 4",
        "moe_intermediate_size = 16", "shared_expert_intermediate_size = 20",
    ):  # fmt: skip
        assert name in str(caught.value)
    assert "vocabulary" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="intermediate_size = 7"):
        shard_config(replace(config, intermediate=7), 2)


def test_one_rank_keeps_the_config(config: TextConfig) -> None:
    assert shard_config(config, 1) is config
    spec = WeightSpec(shape=(2, 4, 3), shard_dim=1)
    assert piece_of(spec, Part("gate", 0, 2, 4), 1, 0).start == 2
