"""Sizes of a Qwen3.5 model, whole or as one tensor-parallel rank sees it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from qwen35.domain.errors import ConfigurationError, UnknownNameError


def _require_positive(value: Any) -> None:
    for field in fields(value):
        size = getattr(value, field.name)
        if isinstance(size, int) and size < 1:
            raise ConfigurationError(f"{type(value).__name__}.{field.name} must be at least 1, got {size}")


def _divided(name: str, size: int, tp: int) -> int:
    if tp < 1 or size % tp:
        raise ConfigurationError(f"{name} = {size} cannot be divided over {tp} tensor-parallel ranks")
    return size // tp


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnGeometry:
    """Heads and widths of one Gated DeltaNet layer.

    ``key_heads`` is H (query and key heads), ``value_heads`` HV (a multiple of H),
    ``key_width`` K and ``value_width`` V. Value head h reads query/key head ``h // (HV // H)``.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    def __post_init__(self) -> None:
        _require_positive(self)
        if self.value_heads % self.key_heads:
            raise ConfigurationError(
                f"value_heads must be a multiple of key_heads, got {self.value_heads} and {self.key_heads}"
            )

    @property
    def head_ratio(self) -> int:
        """Value heads to one key head."""
        return self.value_heads // self.key_heads

    @property
    def state_elements(self) -> int:
        """Elements of one slot: HV * V * K."""
        return self.value_heads * self.value_width * self.key_width

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution, laid out q, k, v: 2 * H * K + HV * V."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    def shard(self, tp: int) -> GdnGeometry:
        """The geometry of one of ``tp`` ranks."""
        return replace(
            self,
            key_heads=_divided("key_heads", self.key_heads, tp),
            value_heads=_divided("value_heads", self.value_heads, tp),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """Sizes of a public Qwen3.5 mixture-of-experts model, for experiments without its weights."""

    name: str
    hidden: int
    layers: int
    attention_heads: int
    attention_kv_heads: int
    gdn: GdnGeometry
    experts: int
    top_k: int
    expert_width: int
    shared_expert_width: int
    conv_width: int = 4
    attention_head_width: int = 256
    full_attention_interval: int = 4
    vocabulary: int = 248_320


def _public(name: str, hidden: int, layers: int, heads: int, value_heads: int, experts: int, top_k: int,
            width: int) -> ModelGeometry:  # fmt: skip
    gdn = GdnGeometry(key_heads=16, value_heads=value_heads, key_width=128, value_width=128)
    return ModelGeometry(
        name=name, hidden=hidden, layers=layers, attention_heads=heads, attention_kv_heads=2, gdn=gdn,
        experts=experts, top_k=top_k, expert_width=width, shared_expert_width=width,
    )  # fmt: skip


#: From the public configurations of the three models.
PUBLIC_GEOMETRIES = {
    g.name: g
    for g in (
        _public("35B-A3B", 2048, 40, 16, 32, 256, 8, 512),
        _public("122B-A10B", 3072, 48, 32, 64, 256, 8, 1024),
        _public("397B-A17B", 4096, 60, 32, 64, 512, 10, 1024),
    )
}


def public_geometry(name: str) -> ModelGeometry:
    """The public geometry called ``name``; raises ``UnknownNameError`` listing the known ones."""
    try:
        return PUBLIC_GEOMETRIES[name]
    except KeyError:
        raise UnknownNameError("geometry", name, PUBLIC_GEOMETRIES) from None
