"""The weights of a Qwen3.5 text model, declared once: name, shape, dtype, and how ranks share each of them.

Names are those of the text model itself, without the prefixes that checkpoints put before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwen35.model.config import LayerType, TextConfig


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that a checkpoint may hold instead of a packed one: it fills ``[expert, start:stop]``."""

    name: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One weight. ``keep_float32``: held in float32 whatever the model's dtype.

    ``shard_dim`` is the dimension that tensor-parallel ranks divide (None: each holds the whole). ``blocks`` are
    the widths of the blocks side by side in that dimension; each is cut separately (None: one block).
    ``parts`` are the tensors that may stand for a packed weight. ``heads`` are the key/value heads of that
    dimension: fewer of them than ranks are held by several ranks each. ``padded``: the dimension need not divide,
    zeros follow it. ``on_first_rank``: what is added once to a sum over ranks, zeros on all ranks but the first.
    """

    shape: tuple[int, ...]
    shard_dim: int | None = None
    blocks: tuple[int, ...] | None = None
    keep_float32: bool = False
    parts: tuple[Part, ...] = ()
    heads: int | None = None
    padded: bool = False
    on_first_rank: bool = False


Named = Iterator[tuple[str, WeightSpec]]


def weight_table(config: TextConfig) -> dict[str, WeightSpec]:
    """Every weight of the model that ``config`` describes, by name."""
    table = dict(_outer(config))
    for i, kind in enumerate(config.layer_types):
        mixer = _gdn(config) if kind is LayerType.GDN else _attention(config)
        block = _moe(config, f"layers.{i}.mlp.") if config.is_moe(i) else _mlp(config)
        norms = (("input_layernorm.weight", _norm(config.hidden)),
                 ("post_attention_layernorm.weight", _norm(config.hidden)))  # fmt: skip
        for group in (norms, mixer, block):
            table.update((f"layers.{i}.{name}", spec) for name, spec in group)
    return table


def _norm(width: int) -> WeightSpec:
    return WeightSpec(shape=(width,), keep_float32=True)


def _columns(out: int, into: int, blocks: tuple[int, ...] | None = None) -> WeightSpec:
    """A projection whose outputs the ranks divide."""
    return WeightSpec(shape=(out, into), shard_dim=0, blocks=blocks)


def _rows(out: int, into: int) -> WeightSpec:
    """A projection whose inputs the ranks divide; its output is summed over them."""
    return WeightSpec(shape=(out, into), shard_dim=1)


def _outer(c: TextConfig) -> Named:
    tokens = WeightSpec(shape=(c.vocabulary, c.hidden), shard_dim=0, padded=True)
    yield "embed_tokens.weight", tokens
    yield "norm.weight", _norm(c.hidden)
    if not c.tied:
        yield "lm_head.weight", tokens


def _gdn(c: TextConfig) -> Named:
    g, at = c.gdn, "linear_attn."
    key, value = g.key_heads * g.key_width, g.value_heads * g.value_width
    qkv = (key, key, value)
    yield f"{at}in_proj_qkv.weight", _columns(g.conv_channels, c.hidden, qkv)
    yield f"{at}in_proj_z.weight", _columns(value, c.hidden)
    yield f"{at}in_proj_b.weight", _columns(g.value_heads, c.hidden)
    yield f"{at}in_proj_a.weight", _columns(g.value_heads, c.hidden)
    yield f"{at}conv1d.weight", WeightSpec(shape=(g.conv_channels, 1, c.conv_width), shard_dim=0, blocks=qkv)
    yield f"{at}A_log", WeightSpec(shape=(g.value_heads,), shard_dim=0, keep_float32=True)
    yield f"{at}dt_bias", WeightSpec(shape=(g.value_heads,), shard_dim=0, keep_float32=True)
    yield f"{at}norm.weight", _norm(g.value_width)
    yield f"{at}out_proj.weight", _rows(c.hidden, value)


def _attention(c: TextConfig) -> Named:
    at = "self_attn."
    # A head's query and its output gate lie side by side, so cutting between heads keeps them together.
    widths = {"q_proj": 2 * c.attention_heads * c.head_width, "k_proj": c.kv_heads * c.head_width,
              "v_proj": c.kv_heads * c.head_width}  # fmt: skip
    for name, width in widths.items():
        heads = None if name == "q_proj" else c.kv_heads
        yield f"{at}{name}.weight", WeightSpec(shape=(width, c.hidden), shard_dim=0, heads=heads)
        if c.attention_bias:
            yield f"{at}{name}.bias", WeightSpec(shape=(width,), shard_dim=0, heads=heads)
    yield f"{at}o_proj.weight", _rows(c.hidden, c.attention_heads * c.head_width)
    if c.attention_bias:
        yield f"{at}o_proj.bias", WeightSpec(shape=(c.hidden,), on_first_rank=True)
    yield f"{at}q_norm.weight", _norm(c.head_width)
    yield f"{at}k_norm.weight", _norm(c.head_width)


def _gated(hidden: int, width: int, at: str) -> Named:
    yield f"{at}gate_proj.weight", _columns(width, hidden)
    yield f"{at}up_proj.weight", _columns(width, hidden)
    yield f"{at}down_proj.weight", _rows(hidden, width)


def _mlp(c: TextConfig) -> Named:
    assert c.intermediate is not None
    return _gated(c.hidden, c.intermediate, "mlp.")


def _moe(c: TextConfig, prefix: str) -> Named:
    assert c.moe is not None
    m, at = c.moe, "mlp."
    width, experts = m.expert_width, range(m.experts)
    gate_up = tuple(
        Part(f"{prefix}experts.{e}.{name}_proj.weight", e, start, start + width)
        for e in experts
        for name, start in (("gate", 0), ("up", width))
    )
    down = tuple(Part(f"{prefix}experts.{e}.down_proj.weight", e, 0, c.hidden) for e in experts)
    yield f"{at}gate.weight", WeightSpec(shape=(m.experts, c.hidden))
    yield (
        f"{at}experts.gate_up_proj",
        WeightSpec(shape=(m.experts, 2 * width, c.hidden), shard_dim=1, blocks=(width, width), parts=gate_up),
    )
    yield f"{at}experts.down_proj", WeightSpec(shape=(m.experts, c.hidden, width), shard_dim=2, parts=down)
    yield from _gated(c.hidden, m.shared_width, f"{at}shared_expert.")
    yield f"{at}shared_expert_gate.weight", WeightSpec(shape=(1, c.hidden))
