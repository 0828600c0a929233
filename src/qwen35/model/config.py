"""What config.json says of a Qwen3.5 text model, checked and frozen."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from qwen35.domain.errors import CheckpointError, ConfigurationError
from qwen35.domain.geometry import GdnGeometry
from qwen35.model._keys import Keys

DENSE, MOE = "qwen3_5_text", "qwen3_5_moe_text"
#: The multimodal wrappers, whose text part stands under ``text_config``.
WRAPPERS = {"qwen3_5": DENSE, "qwen3_5_moe": MOE}
#: Far beyond any model: what is kept layer by layer must fit in memory before the weights are looked at.
MOST_LAYERS = 10_000


class LayerType(StrEnum):
    """The token mixer of a layer, spelled as in config.json."""

    GDN = "linear_attention"
    ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Sizes of a mixture-of-experts block; ``layers`` are the layers that have one (the others are dense)."""

    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """A Qwen3.5 text model. Widths are in elements; ``rotary_width`` is the rotated part of an attention head.

    ``intermediate`` is the width of the dense MLP (None where every layer is a mixture). ``stop_tokens`` end a
    generation. ``dtype`` is the name that the checkpoint gives ("bfloat16"), or None.
    """

    vocabulary: int
    hidden: int
    layer_types: tuple[LayerType, ...]
    attention_heads: int
    kv_heads: int
    head_width: int
    rotary_width: int
    rope_theta: float
    attention_bias: bool
    gdn: GdnGeometry
    conv_width: int
    intermediate: int | None
    moe: MoeConfig | None
    eps: float
    tied: bool
    max_positions: int
    stop_tokens: frozenset[int]
    dtype: str | None

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` ends in a mixture of experts."""
        return self.moe is not None and layer in self.moe.layers


def read_config(directory: Path) -> TextConfig:
    """The text model of a checkpoint ``directory``, from config.json and, for stop tokens, generation_config.json.

    Raises ``CheckpointError`` naming the file and every missing or wrong key.
    """
    path = directory / "config.json"
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory: a checkpoint is a folder with config.json and weights")
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: it is not a checkpoint directory")
    top = read_json(path)
    generation = directory / "generation_config.json"
    extra = read_json(generation).get("eos_token_id") if generation.is_file() else None
    return parse_config(top, str(path), extra)


def read_json(path: Path) -> dict[str, object]:
    """The object in ``path``; raises ``CheckpointError`` where it is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise CheckpointError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def parse_config(top: dict[str, object], where: str, generation_eos: object = None) -> TextConfig:
    """The text model that the object ``top`` describes; ``where`` names its source in errors."""
    model_type, text, tied = _text_part(top, where)
    keys = Keys(text, where)
    _refuse_what_is_not_built(keys)
    types = _layer_types(keys)
    moe = _moe(keys, types) if model_type == MOE else None
    dense = moe is None or len(moe.layers) < len(types)
    head_width = keys.size("head_dim")
    theta, rotary_width = _rope(keys, head_width)
    gdn = _gdn(keys)
    eos = [*_token_ids(keys, "eos_token_id", text.get("eos_token_id", top.get("eos_token_id"))),
           *_token_ids(keys, "generation_config.json eos_token_id", generation_eos)]  # fmt: skip
    dtype = text.get("dtype", text.get("torch_dtype", top.get("dtype", top.get("torch_dtype"))))
    heads, kv_heads = keys.size("num_attention_heads"), keys.size("num_key_value_heads")
    if keys.holds("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        keys.wrong("num_attention_heads", f"a multiple of num_key_value_heads = {kv_heads}", heads)
    config = TextConfig(
        vocabulary=keys.size("vocab_size"), hidden=keys.size("hidden_size"), layer_types=types,
        attention_heads=heads, kv_heads=kv_heads, head_width=head_width,
        rotary_width=rotary_width, rope_theta=theta, attention_bias=keys.flag("attention_bias", False),
        gdn=gdn, conv_width=keys.size("linear_conv_kernel_dim", least=2),
        intermediate=keys.size("intermediate_size") if dense else None, moe=moe,
        eps=keys.positive("rms_norm_eps"), tied=keys.boolean("tie_word_embeddings", tied),
        max_positions=keys.size("max_position_embeddings"), stop_tokens=frozenset(eos),
        dtype=dtype if isinstance(dtype, str) else None,
    )  # fmt: skip
    keys.raise_problems()
    return config


def _text_part(top: dict[str, object], where: str) -> tuple[str, dict[str, object], object]:
    """The text model's type, its object, and whether embeddings are tied (a wrapper's own word counts)."""
    model_type = top.get("model_type")
    if isinstance(model_type, str) and model_type in (DENSE, MOE):
        return model_type, top, top.get("tie_word_embeddings", False)
    if not isinstance(model_type, str) or model_type not in WRAPPERS:
        known = ", ".join((DENSE, MOE, *WRAPPERS))
        raise CheckpointError(f"{where}: model_type must be one of {known}, got {model_type!r}")
    text = top.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{where}: text_config is missing; a {model_type} checkpoint must have one")
    inner = text.get("model_type", WRAPPERS[model_type])
    if inner not in (DENSE, MOE):
        raise CheckpointError(f"{where}: text_config.model_type must be {DENSE} or {MOE}, got {inner!r}")
    return str(inner), text, top.get("tie_word_embeddings", text.get("tie_word_embeddings", False))


def _refuse_what_is_not_built(keys: Keys) -> None:
    keys.fixed("hidden_act", "silu")
    keys.fixed("attn_output_gate", True)
    if keys.get("quantization_config") is not None:
        keys.wrong("quantization_config", "absent (quantised weights are not read)", "one")


def _layer_types(keys: Keys) -> tuple[LayerType, ...]:
    count = keys.size("num_hidden_layers")
    if count > MOST_LAYERS:
        keys.wrong("num_hidden_layers", f"at most {MOST_LAYERS}", count)
        count = 1
    given = keys.get("layer_types")
    if given is None:
        every = keys.size("full_attention_interval", "layer_types or full_attention_interval")
        return tuple(LayerType.GDN if (i + 1) % every else LayerType.ATTENTION for i in range(count))
    known = {t.value for t in LayerType}
    if not isinstance(given, list):
        keys.wrong("layer_types", "a list", given)
        return ()
    types = [LayerType(name) for name in given if isinstance(name, str) and name in known]
    for i, name in enumerate(given):
        if not isinstance(name, str) or name not in known:
            keys.wrong(f"layer_types[{i}]", " or ".join(sorted(known)), name)
    if keys.holds("num_hidden_layers") and len(given) != count:
        keys.wrong("layer_types", f"num_hidden_layers = {count} entries", f"{len(given)} entries")
    return tuple(types)


def _moe(keys: Keys, types: tuple[LayerType, ...]) -> MoeConfig:
    layers = len(types)
    experts, top_k = keys.size("num_experts"), keys.size("num_experts_per_tok")
    if keys.holds("num_experts", "num_experts_per_tok") and top_k > experts:
        keys.wrong("num_experts_per_tok", f"at most num_experts = {experts}", top_k)
    keys.fixed("norm_topk_prob", True)  # transformers' class has no such key: its weights always sum to 1
    step = keys.size("decoder_sparse_step", default=1)
    dense = _layer_numbers(keys, "mlp_only_layers", layers)
    return MoeConfig(
        experts=experts, top_k=top_k, expert_width=keys.size("moe_intermediate_size"),
        shared_width=keys.size("shared_expert_intermediate_size"),
        layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )  # fmt: skip


def _layer_numbers(keys: Keys, name: str, layers: int) -> frozenset[int]:
    """A list of layers, none where the key is absent or null."""
    given = keys.get(name)
    if given is None:
        return frozenset()
    if not isinstance(given, list):
        keys.wrong(name, "a list of layer numbers", repr(given))
        return frozenset()
    counted = keys.holds("num_hidden_layers", "layer_types", "full_attention_interval")
    expected = f"a layer number in 0..{layers - 1}" if counted else "a layer number"
    for i, number in enumerate(given):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0 or (counted and number >= layers):
            keys.wrong(f"{name}[{i}]", expected, repr(number))
    return frozenset(number for number in given if isinstance(number, int))


def _rope(keys: Keys, head_width: int) -> tuple[float, int]:
    """Theta and rotated width. For text the three position sections of mrope are equal: plain rotary."""
    given = keys.get("rope_parameters")
    rope = Keys(given, keys.where, "rope_parameters.", keys) if isinstance(given, dict) else keys
    rope.fixed("rope_type", "default")
    scaling = keys.get("rope_scaling")
    if isinstance(scaling, dict):
        old = Keys(scaling, keys.where, "rope_scaling.", keys)
        for name in ("rope_type", "type"):
            old.fixed(name, "default")
    theta = rope.positive("rope_theta")
    holder = rope if rope.get("partial_rotary_factor") is not None else keys
    factor = holder.positive("partial_rotary_factor")
    width = int(head_width * factor)
    known = keys.holds("head_dim") and holder.holds("partial_rotary_factor")
    if known and (not 0 < width <= head_width or width % 2):
        keys.wrong("partial_rotary_factor", f"an even part of head_dim = {head_width}", factor)
    return theta, width


def _gdn(keys: Keys) -> GdnGeometry:
    heads = {"key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads"}
    widths = {"key_width": "linear_key_head_dim", "value_width": "linear_value_head_dim"}
    sizes = {field: keys.size(name) for field, name in (heads | widths).items()}
    if not keys.holds(*heads.values()):
        sizes["key_heads"] = sizes["value_heads"] = 1
    try:
        return GdnGeometry(**sizes)
    except ConfigurationError as exc:
        keys.wrong("linear_num_value_heads", "a multiple of linear_num_key_heads", exc)
        return GdnGeometry(key_heads=1, value_heads=1, key_width=1, value_width=1)


def _token_ids(keys: Keys, name: str, value: object) -> Iterable[int]:
    """``value`` is None, a token id, or a list of them."""
    given = [] if value is None else value if isinstance(value, list) else [value]
    ids = [t for t in given if isinstance(t, int) and not isinstance(t, bool) and t >= 0]
    if len(ids) < len(given):
        keys.wrong(name, "a token id or a list of them", value)
    return ids
