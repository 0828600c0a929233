"""Configurations: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_checkpoints import COMMON, DENSE, MOE

from qwen35.domain.errors import CheckpointError
from qwen35.model import TextConfig, read_config, weight_table
from qwen35.model.config import LayerType

BASE = {**COMMON, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
DENSE_TEXT = {"model_type": "qwen3_5_text", **BASE, **DENSE}
MOE_TEXT = {"model_type": "qwen3_5_moe_text", **BASE, **MOE}


def read(tmp_path: Path, config: object) -> TextConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_config(tmp_path)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_a_dense_model_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, {**DENSE_TEXT, "eos_token_id": 5, "tie_word_embeddings": True, "torch_dtype": "bfloat16"})
    assert config.layer_types == (LayerType.GDN,) * 3 + (LayerType.ATTENTION,)
    assert (config.rotary_width, config.rope_theta) == (8, 10_000.0)
    assert (config.gdn.key_heads, config.gdn.value_heads, config.gdn.conv_channels) == (2, 4, 2 * 32 + 48)
    assert (config.intermediate, config.moe, config.tied) == (40, None, True)
    assert (config.stop_tokens, config.dtype) == ({5}, "bfloat16")


def test_a_mixture_is_read_with_its_dense_layers(tmp_path: Path) -> None:
    config = read(
        tmp_path, {**MOE_TEXT, "mlp_only_layers": [1], "decoder_sparse_step": 2, **DENSE, "norm_topk_prob": True}
    )
    assert config.moe is not None
    assert config.moe.layers == {3}
    table = weight_table(config)
    assert table["layers.0.mlp.gate_proj.weight"].shape == (40, 64)
    assert table["layers.3.mlp.experts.gate_up_proj"].shape == (8, 32, 64)
    assert "layers.3.mlp.gate_proj.weight" not in table


@pytest.mark.parametrize("inner", [True, False])
def test_a_wrappers_own_word_on_tied_embeddings_counts(tmp_path: Path, inner: bool) -> None:
    wrapper = {"model_type": "qwen3_5", "text_config": {**DENSE_TEXT, "tie_word_embeddings": inner}}
    assert read(tmp_path, {**wrapper, "tie_word_embeddings": not inner}).tied is not inner
    assert read(tmp_path, wrapper).tied is inner


def test_older_keys_for_rotary_are_read(tmp_path: Path) -> None:
    older = {**without(DENSE_TEXT, "rope_parameters"), "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = read(tmp_path, {**older, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 0]}})
    assert (config.rotary_width, config.rope_theta) == (4, 1e7)
    with pytest.raises(CheckpointError, match=r"rope_scaling\.type must be 'default', .*got 'yarn'"):
        read(tmp_path, {**older, "rope_scaling": {"type": "yarn", "factor": 4}})


def test_stop_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read(tmp_path, {**DENSE_TEXT, "eos_token_id": 9}).stop_tokens == {7, 8, 9}


@pytest.mark.parametrize("base", [DENSE_TEXT, MOE_TEXT])
def test_every_missing_key_is_named(tmp_path: Path, base: dict[str, Any]) -> None:
    optional = {"model_type", "full_attention_interval", "rope_parameters"}
    for key in set(base) - optional:
        with pytest.raises(CheckpointError, match=f"{key} is missing"):
            read(tmp_path, without(base, key))
    with pytest.raises(CheckpointError, match="layer_types or full_attention_interval is missing"):
        read(tmp_path, without(base, "full_attention_interval"))
    with pytest.raises(CheckpointError, match=r"rope_theta is missing.*partial_rotary_factor is missing"):
        read(tmp_path, without(base, "rope_parameters"))
    with pytest.raises(CheckpointError, match=r"rope_parameters\.rope_theta is missing"):
        read(tmp_path, {**base, "rope_parameters": {"partial_rotary_factor": 0.5}})


@pytest.mark.parametrize(
    ("lacking", "change", "silent"),
    [
        ("num_hidden_layers", {"layer_types": ["linear_attention"] * 4}, "layer_types must"),
        ("num_hidden_layers", {"mlp_only_layers": [2]}, "mlp_only_layers"),
        ("num_experts", {"num_experts_per_tok": 4}, "num_experts_per_tok must"),
        ("head_dim", {}, "partial_rotary_factor must"),
        ("num_key_value_heads", {"num_attention_heads": 3}, "num_attention_heads must"),
        ("linear_num_value_heads", {"linear_num_key_heads": 16}, "multiple"),
    ],
)
def test_a_missing_number_is_not_invented_for_a_second_message(
    tmp_path: Path, lacking: str, change: dict[str, Any], silent: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{lacking} is missing") as caught:
        read(tmp_path, {**without(MOE_TEXT, lacking), **change})
    assert silent not in str(caught.value)


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, {**without(DENSE_TEXT, "vocab_size"), "hidden_size": "64", "rms_norm_eps": 0})
    message = str(caught.value)
    for part in ("config.json", "vocab_size is missing", "hidden_size must be a whole number", "rms_norm_eps must be"):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention", "mamba"]},
         r"layer_types\[1\] must be full_attention or linear_attention, got sliding_attention; layer_types\[3\]"),
        ({"layer_types": ["linear_attention"]}, r"layer_types must be num_hidden_layers = 4 entries, got 1"),
        ({"layer_types": "linear_attention"}, "layer_types must be a list"),
        ({"layer_types": [["linear_attention"], {}, 1, None]},
         r"layer_types\[0\] must be .*layer_types\[1\].*layer_types\[2\].*layer_types\[3\] must be .*, got None"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attn_output_gate": False}, "attn_output_gate must be True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be absent"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads = 3, got 4"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple of linear_num_key_heads"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True, the only one supported, got False"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts = 8, got 9"),
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, got 0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be a whole number of at least 2, got 1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 10000, got 1000000000000$"),
        ({"num_hidden_layers": 10**12, "mlp_only_layers": [1]}, "num_hidden_layers must be at most 10000"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0, got nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ({"mlp_only_layers": 0}, "mlp_only_layers must be a list"),
        ({"mlp_only_layers": ""}, "mlp_only_layers must be a list"),
        ({"mlp_only_layers": [0, "1"]}, r"mlp_only_layers\[1\] must be a layer number in 0\.\.3, got '1'"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers\[0\] must be a layer number"),
        ({"mlp_only_layers": [[1]]}, r"mlp_only_layers\[0\] must be a layer number"),
        ({"mlp_only_layers": [-1, 4]}, r"mlp_only_layers\[0\] .*got -1; mlp_only_layers\[1\] .*got 4"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         r"rope_parameters\.rope_type must be 'default'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "must be an even part of head_dim"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "must be an even part of head_dim"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(tmp_path, {**MOE_TEXT, **changes})


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "llama"}, "model_type must be one of .*qwen3_5_moe.*got 'llama'"),
        ({}, "model_type must be one of .*got None"),
        ({"model_type": ["qwen3_5"]}, "model_type must be one of"),
        ({"model_type": "qwen3_5"}, "text_config is missing"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "gemma"}}, r"text_config\.model_type must be"),
        ([1], "must hold a JSON object, got list"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, config: object, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(tmp_path, config)


def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)
    for content in (b"{", b"\xff\xfe\x00"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
            read_config(tmp_path)
