"""Our logits are transformers': float32 on the CPU, within 1e-4 relative."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import (
    Pair,
    build,
    draw_continuation,
    draw_prompts,
    load,
    true_logits,
    worst_error,
)

from qwen35.model import GenerateOptions, Session, generate

TOLERANCE = 1e-4
LENGTHS = [37, 1, 70, 5]


def test_prefill_of_unequal_prompts_gives_transformers_logits_after_every_token(pair: Pair) -> None:
    prompts = draw_prompts(pair.theirs, LENGTHS, pair.generator())
    session = Session(pair.ours, slots=len(prompts), max_length=max(LENGTHS))
    got = session.extend([session.open() for _ in prompts], prompts, every_token=True)
    for prompt, rows in zip(prompts, got.split(LENGTHS), strict=True):
        want = true_logits(pair.theirs, prompt)
        assert want.std() > 0.5, "the checkpoint's logits hardly vary: the comparison would show nothing"
        assert worst_error(rows, want) < TOLERANCE, f"{pair.name}, length {len(prompt)}, seed {pair.seed}"


def test_thirty_two_decode_steps_give_transformers_tokens_and_logits(pair: Pair) -> None:
    generator = pair.generator()
    theirs = [draw_continuation(pair.theirs, length, 33, generator) for length in (9, 1, 70)]
    options = GenerateOptions(max_new_tokens=33, logits=True, quiet=True)
    results = generate(pair.ours, [prompt for prompt, _, _ in theirs], options)
    for result, (prompt, tokens, logits) in zip(results, theirs, strict=True):
        where = f"{pair.name}, length {len(prompt)}, seed {pair.seed}"
        assert result.logits is not None
        assert worst_error(result.logits, logits) < TOLERANCE, where
        assert list(result.tokens) == tokens, where


def test_any_split_of_the_prompts_gives_the_same_logits(pair: Pair) -> None:
    prompts = draw_prompts(pair.theirs, [70, 9, 33], pair.generator())
    want = [true_logits(pair.theirs, prompt) for prompt in prompts]
    for trial in range(6):
        chance = random.Random(pair.seed + trial)
        session = Session(pair.ours, slots=3, max_length=70)
        slots = [session.open() for _ in prompts]
        while waiting := [i for i, p in enumerate(prompts) if session.length(slots[i]) < len(p)]:
            chosen = chance.sample(waiting, chance.randint(1, len(waiting)))
            starts = [session.length(slots[i]) for i in chosen]
            stops = [s + chance.choice((1, 2, 7, 40)) for s in starts]
            chunks = [prompts[i][s:e] for i, s, e in zip(chosen, starts, stops, strict=True)]
            got = session.extend([slots[i] for i in chosen], chunks)
            for row, i in zip(got, chosen, strict=True):
                error = worst_error(row[None], want[i][None, session.length(slots[i]) - 1])
                assert error < TOLERANCE, f"{pair.name}, prompt {i}, trial {trial}, seed {pair.seed}"


def test_a_prompt_fed_token_by_token_through_decode_gives_the_same_logits(pair: Pair) -> None:
    (prompt,) = draw_prompts(pair.theirs, [24], pair.generator())
    want = true_logits(pair.theirs, prompt)
    session = Session(pair.ours, slots=1, max_length=24)
    slot = session.open()
    got = [session.extend([slot], [prompt[:1]]), *(session.decode([slot], [token]) for token in prompt[1:])]
    assert worst_error(torch.cat(got), want) < TOLERANCE, f"{pair.name}, seed {pair.seed}"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dense", {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 16}),
        ("moe", {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}),
        ("dense", {"linear_num_key_heads": 1, "attention_bias": True}),
        ("moe", {"num_key_value_heads": 1, "num_experts_per_tok": 1, "rms_norm_eps": 1e-3}),
        ("dense", {"num_key_value_heads": 4, "layer_types": ["full_attention", "linear_attention"] * 2}),
        ("dense", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}}),
    ],
    ids=["ratio-1", "ratio-3-width-3", "ratio-4-bias", "one-kv-head", "attention-first", "full-rotary"],
)
def test_other_shapes_of_the_family_give_transformers_logits(
    kind: str, changes: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    theirs = build(kind, seed, **changes)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    prompts = draw_prompts(theirs, [19, 6], torch.Generator().manual_seed(seed))
    session = Session(ours, slots=2, max_length=20)
    slots = [session.open(), session.open()]
    session.extend(slots, [prompt[:-1] for prompt in prompts])
    got = session.decode(slots, [prompt[-1] for prompt in prompts])
    want = torch.stack([true_logits(theirs, prompt)[-1] for prompt in prompts])
    assert worst_error(got, want) < TOLERANCE, f"seed {seed}"
