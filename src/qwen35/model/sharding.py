"""What one tensor-parallel rank holds of the model: its sizes, and its piece of every weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qwen35.domain.errors import ConfigurationError
from qwen35.domain.tensor_parallel import block_slices
from qwen35.model.config import MoeConfig, TextConfig
from qwen35.model.weights import Part, WeightSpec


def shard_config(config: TextConfig, size: int) -> TextConfig:
    """The sizes that one of ``size`` ranks computes with; hidden, experts and top_k stay whole.

    Where there are fewer key/value heads than ranks each rank has one. A vocabulary that does not divide is padded.
    Raises ``ConfigurationError`` naming every size that cannot be divided.
    """
    if size == 1:
        return config
    problems: list[str] = []

    def divided(name: str, whole: int) -> int:
        if whole % size:
            problems.append(f"{name} = {whole}")
        return whole // size

    kv_heads = 1
    if config.kv_heads >= size:
        kv_heads = divided("num_key_value_heads", config.kv_heads)
    elif size % config.kv_heads:
        problems.append(f"num_key_value_heads = {config.kv_heads}")
    heads = divided("num_attention_heads", config.attention_heads)
    divided("linear_num_key_heads", config.gdn.key_heads)
    divided("linear_num_value_heads", config.gdn.value_heads)
    intermediate = config.intermediate
    if intermediate is not None:
        intermediate = divided("intermediate_size", intermediate)
    moe: MoeConfig | None = None
    if config.moe is not None:
        expert = divided("moe_intermediate_size", config.moe.expert_width)
        shared = divided("shared_expert_intermediate_size", config.moe.shared_width)
        moe = replace(config.moe, expert_width=expert, shared_width=shared)
    if problems:
        raise ConfigurationError(f"cannot be divided over {size} tensor-parallel ranks: {', '.join(problems)}")
    return replace(
        config, vocabulary=padded(config.vocabulary, size) // size, attention_heads=heads, kv_heads=kv_heads,
        gdn=config.gdn.shard(size), intermediate=intermediate, moe=moe,
    )  # fmt: skip


def padded(width: int, size: int) -> int:
    """``width`` rounded up to a multiple of ``size``."""
    return -(-width // size) * size


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a stored tensor that a rank reads.

    ``cuts`` along ``dim`` are laid one after another (no cuts: the whole tensor), and followed by zeros up to
    ``length``. ``start`` is where a part of a packed weight begins in the rank's own weight. ``zero`` tells that
    the rank holds zeros instead.
    """

    dim: int = 0
    cuts: tuple[slice, ...] = ()
    length: int = 0
    start: int = 0
    zero: bool = False

    def read(self, stored: Any) -> Tensor:
        """The piece of ``stored``, which indexing by slices reads (a slice of a safetensors file)."""
        if not self.cuts:
            tensor: Tensor = stored[:]
            return tensor
        before = (slice(None),) * self.dim
        tensor = torch.cat([stored[(*before, cut)] for cut in self.cuts], dim=self.dim)
        missing = self.length - tensor.shape[self.dim]
        if missing:
            shape = (*tensor.shape[: self.dim], missing, *tensor.shape[self.dim + 1 :])
            tensor = torch.cat((tensor, tensor.new_zeros(shape)), dim=self.dim)
        return tensor


def piece_of(spec: WeightSpec, part: Part | None, size: int, rank: int) -> Piece:
    """What ``rank`` of ``size`` reads of a tensor that holds the weight ``spec``, or its ``part``."""
    dim, start = spec.shard_dim, 0 if part is None else part.start
    if size == 1 or dim is None:
        return Piece(start=start, zero=spec.on_first_rank and rank > 0)
    if part is None:
        return _cut(dim, _cuts(spec, spec.blocks or (spec.shape[dim],), size, rank))
    # A part has no dimension of experts, and in the dimension of its rows it is one block.
    if dim == 1:
        return _cut(0, _cuts(spec, (part.stop - part.start,), size, rank), start // size)
    return _cut(dim - 1, _cuts(spec, (spec.shape[dim],), size, rank), start)


def _cut(dim: int, pieces: Sequence[tuple[slice, int]], start: int = 0) -> Piece:
    return Piece(dim, tuple(cut for cut, _ in pieces), sum(length for _, length in pieces), start)


def _cuts(spec: WeightSpec, blocks: tuple[int, ...], size: int, rank: int) -> list[tuple[slice, int]]:
    """Each block's slice, and its length with padding."""
    if spec.heads is not None and spec.heads < size:
        # Neighbouring ranks share a head: there the group is as large as the number of heads.
        return _cuts(replace(spec, heads=None), blocks, spec.heads, rank * spec.heads // size)
    if spec.padded:
        (width,) = blocks
        share = padded(width, size) // size
        low = min(rank * share, width)
        return [(slice(low, min(low + share, width)), share)]
    return [(cut, cut.stop - cut.start) for cut in block_slices(blocks, size, rank)]
