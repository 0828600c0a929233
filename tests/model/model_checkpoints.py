"""Small checkpoints written by transformers' own classes, with weights large enough that logits vary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

import qwen35
from qwen35.model import Model, load_model

VOCABULARY = 211
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
DENSE: dict[str, Any] = {"intermediate_size": 40}
MOE: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
#: How far logits may move when each embedding element moves by one unit in the last place. Random networks have
#: rare prompts (a key nearly orthogonal to its query, two experts nearly tied) where rounding alone moves them
#: more than the tolerance that is to be shown; those say nothing of either implementation.
STEADY = 3e-5


@dataclass(frozen=True)
class Pair:
    """A checkpoint, transformers' model that wrote it, ours that read it, and the seed of its weights."""

    name: str
    directory: Path
    theirs: Any
    ours: Model
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def build(kind: str, seed: int, tied: bool = False, **changes: Any) -> Any:
    """A model of transformers in float32: ``kind`` is "dense" or "moe", with "-wrapped" for the multimodal class."""
    moe = kind.startswith("moe")
    sizes = {**COMMON, **(MOE if moe else DENSE), **changes}
    if kind.endswith("wrapped"):
        config_class, model_class = (
            (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration) if moe
            else (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
        )  # fmt: skip
        config = config_class(text_config=sizes, vision_config=VISION, tie_word_embeddings=tied)
    else:
        config_class, model_class = (
            (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM) if moe else (Qwen3_5TextConfig, Qwen3_5ForCausalLM)
        )
        config = config_class(tie_word_embeddings=tied, **sizes)
    model = model_class(config).float().eval()
    spread(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def spread(model: Any, generator: torch.Generator) -> None:
    """Give every parameter values that matter: a norm of ones or a decay of one would hide a mistake."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(0.8 * noise - 1)
        elif name.endswith("linear_attn.norm.weight"):
            parameter.copy_(1 + 0.3 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise * (0.5 if "conv1d" in name or "embed" in name else 0.2))


def load(directory: Path, dtype: torch.dtype | None = torch.float32) -> Model:
    """The checkpoint on the plain-torch adapters."""
    return load_model(
        directory, gated_delta_rule=qwen35.adapter("gated_delta_rule", "reference", device="cpu"),
        short_convolution=qwen35.adapter("short_convolution", "reference", device="cpu"), device="cpu", dtype=dtype,
        quiet=True,
    )  # fmt: skip


@torch.no_grad()
def true_logits(model: Any, tokens: list[int]) -> Tensor:
    """Transformers' logits after each token [T, vocabulary]."""
    out: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return out


@torch.no_grad()
def their_continuation(model: Any, prompt: list[int], steps: int) -> tuple[list[int], Tensor]:
    """The tokens that transformers generates greedily with its cache, and their logits [steps, vocabulary]."""
    tokens = torch.tensor([prompt])
    # Without a mask of its own, generate() takes every token 0 of the prompt for padding.
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=steps, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


@torch.no_grad()
def is_steady(model: Any, tokens: list[int]) -> bool:
    """Whether transformers' logits over ``tokens`` stand still under a disturbance of one rounding."""
    embedded = model.get_input_embeddings()(torch.tensor([tokens]))
    signs = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(len(tokens))).sign() * 2**-23
    base, up, down = (model(inputs_embeds=embedded * (1 + s)).logits[0] for s in (0 * signs, signs, -signs))
    return max(worst_error(up, base), worst_error(down, base)) < STEADY


def draw_prompts(model: Any, lengths: list[int], generator: torch.Generator) -> list[list[int]]:
    """Random prompts of these lengths over which the model is steady."""
    prompts = []
    for length in lengths:
        for _ in range(20):
            prompt: list[int] = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
            if is_steady(model, prompt):
                break
        else:
            raise AssertionError(f"no steady prompt of {length} tokens in 20 draws")
        prompts.append(prompt)
    return prompts


def draw_continuation(
    model: Any, length: int, steps: int, generator: torch.Generator
) -> tuple[list[int], list[int], Tensor]:
    """A random prompt and transformers' continuation of it, over which its cached and uncached logits agree."""
    for _ in range(20):
        prompt: list[int] = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        tokens, logits = their_continuation(model, prompt, steps)
        uncached = true_logits(model, [*prompt, *tokens])[length - 1 : -1]
        if worst_error(logits, uncached) < STEADY and is_steady(model, [*prompt, *tokens]):
            return prompt, tokens, logits
    raise AssertionError(f"no steady continuation of {length} tokens in 20 draws")


def worst_error(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a row: ||got - want|| / ||want||."""
    assert got.shape == want.shape
    assert bool(torch.isfinite(got).all())
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
