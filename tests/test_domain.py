"""Geometries, tensor-parallel cuts and error bounds, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35.domain.errors import ConfigurationError, UnknownNameError
from qwen35.domain.geometry import GdnGeometry, public_geometry
from qwen35.domain.precision import Precision
from qwen35.domain.tensor_parallel import block_slices, qkv_slices


@pytest.mark.case("C31")
def test_each_rank_gets_its_part_of_each_block() -> None:
    geometry = GdnGeometry(key_heads=2, value_heads=2, key_width=2, value_width=4)  # key width 4, value width 8 in all
    q, k, v = qkv_slices(geometry, tp=2, rank=0)
    assert (q, k, v) == (slice(0, 2), slice(4, 6), slice(8, 12))


@given(widths=st.lists(st.integers(1, 5), min_size=1, max_size=4), tp=st.integers(1, 4))
def test_concatenated_pieces_rebuild_every_block(widths: list[int], tp: int) -> None:
    blocks = tuple(w * tp for w in widths)
    whole = list(range(sum(blocks)))
    ranks = [block_slices(blocks, tp, r) for r in range(tp)]
    start = 0
    for i, width in enumerate(blocks):
        assert [x for rank in ranks for x in whole[rank[i]]] == whole[start : start + width]
        start += width


def test_public_geometries_are_cut_over_ranks() -> None:
    big = public_geometry("397B-A17B").gdn.shard(8)
    assert (big.key_heads, big.value_heads, big.head_ratio) == (2, 8, 4)
    assert big.state_elements == 8 * 128 * 128
    assert public_geometry("35B-A3B").gdn.conv_channels == 2 * 16 * 128 + 32 * 128


def test_a_misspelt_geometry_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean '35B-A3B'"):
        public_geometry("35B-A3")


@pytest.mark.parametrize("bad", [{"value_heads": 3}, {"key_width": 0}, {"key_heads": -2}])
def test_impossible_geometries_are_refused(bad: dict[str, int]) -> None:
    sizes = {"key_heads": 2, "value_heads": 4, "key_width": 8, "value_width": 8} | bad
    with pytest.raises(ConfigurationError):
        GdnGeometry(**sizes)


def test_geometries_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="key_heads = 16 cannot be divided over 3"):
        public_geometry("35B-A3B").gdn.shard(3)


def test_bounds_follow_the_roundoffs() -> None:
    exact = Precision(products="float32").bound("bfloat16", "float32")
    assert exact.output == pytest.approx(2**-8, rel=0.01)
    assert exact.state < 1e-5
    assert Precision(products="float32").bound("bfloat16", "bfloat16").state == pytest.approx(2**-8, rel=0.01)
    assert Precision(products="float64").bound("float64", "float64").output < 1e-13
