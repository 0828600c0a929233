"""Two ranks give the logits of one: dense and mixture, fused and not, prefill and decode, over gloo."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from finalize_pool import Pool
from model_tasks import Passes, model_passes, refusal, run_passes, weights_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.model_checkpoints import STEADY, VOCABULARY, load, worst_error
from model.model_checkpoints import build as build_theirs
from qwen35.model.config import read_config
from qwen35.model.weights import weight_table

TOLERANCE = 1e-4
LENGTHS, DECODES = [13, 9], 4
#: One key/value head for two ranks; biases; a dense layer among mixtures, in the middle and last.
KINDS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "dense": ("dense", False, {"attention_bias": True, "num_key_value_heads": 1}),
    "dense-tied": ("dense", True, {}),
    "moe": ("moe", False, {}),
    "moe-tied": ("moe", True, {"num_key_value_heads": 1}),
    "mixed": ("moe", False, {"mlp_only_layers": [1, 3], "intermediate_size": 24}),
}
#: Mixtures by kind: how many layers hand over.
MIXTURES = {"dense": 0, "dense-tied": 0, "moe": 4, "moe-tied": 4, "mixed": 2}


@pytest.fixture(scope="module")
def seed() -> int:
    """Fresh each time; every assertion message shows it."""
    return random.SystemRandom().randrange(2**31)


@pytest.fixture(scope="module", params=list(KINDS))
def single(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> tuple[str, Path, list[list[int]], Tensor]:
    """Kind, checkpoint, prompts, and the logits of one process by itself."""
    kind, tied, changes = KINDS[request.param]
    theirs = build_theirs(kind, seed, tied, **{k: v for k, v in changes.items() if k != "mlp_only_layers"})
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory)
    if "mlp_only_layers" in changes:
        make_dense(directory, changes["mlp_only_layers"], changes["intermediate_size"], seed)
    return request.param, directory, *steady_prompts(directory, seed)


def steady_prompts(directory: Path, seed: int) -> tuple[list[list[int]], Tensor]:
    """Prompts and their logits, which stand still when every embedding moves by about one rounding."""
    generator = torch.Generator().manual_seed(seed)
    plain, moved = load(directory), load(directory)
    weight = moved.embed_tokens.weight
    weight.mul_(1 + torch.randn(weight.shape, generator=generator).sign() * 2**-23)
    for _ in range(20):
        prompts = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
        want = run_passes(plain, prompts, DECODES)
        if worst_error(run_passes(moved, prompts, DECODES), want) < STEADY:
            return prompts, want
    raise AssertionError("no steady prompts in 20 draws")


def make_dense(directory: Path, layers: list[int], width: int, seed: int) -> None:
    """Give these layers of a mixture dense MLPs."""
    path, file = directory / "config.json", directory / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mlp_only_layers": layers, "intermediate_size": width}))
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    for layer in layers:
        at = f"model.layers.{layer}.mlp."
        tensors = {name: t for name, t in tensors.items() if not name.startswith(at)}
        for name, shape in (("gate", (width, 64)), ("up", (width, 64)), ("down", (64, width))):
            tensors[f"{at}{name}_proj.weight"] = torch.randn(shape, generator=generator) / 5
    save_file(tensors, file)


def assert_equal(results: list[Passes], want: Tensor, where: str) -> None:
    assert want.std() > 0.5, f"{where}: the logits hardly vary, the comparison would show nothing"
    assert all(torch.equal(result.logits, results[0].logits) for result in results), f"{where}: ranks differ"
    assert worst_error(results[0].logits, want) < TOLERANCE, where


@pytest.mark.row("B15")
@pytest.mark.row("C06")
@pytest.mark.row("C10")
def test_fused_ranks_give_the_logits_of_one_process(
    two_ranks: Pool, single: tuple[str, Path, list[list[int]], Tensor], seed: int
) -> None:
    kind, directory, prompts, want = single
    results = two_ranks.run(model_passes, directory, prompts, DECODES, "reference", True)
    assert_equal(results, want, f"{kind}, seed {seed}")
    passes, mixtures = 2 + DECODES, MIXTURES[kind]
    for result in results:
        if not mixtures:
            assert not any(result.calls.values())
            assert "model type requires qwen3_5_moe_text" in " ".join(result.reasons)
            continue
        assert (result.adapter, result.reasons) == ("reference", ())
        assert result.calls["finalize"] == passes * mixtures
        # Every mixer's sum; and of the dense layers the second's, but not the last one's.
        assert result.calls["all-reduce"] == passes * (4 + (kind == "mixed"))


def test_unfused_ranks_give_the_logits_of_one_process(
    two_ranks: Pool, single: tuple[str, Path, list[list[int]], Tensor], seed: int
) -> None:
    kind, directory, prompts, want = single
    results = two_ranks.run(model_passes, directory, prompts, DECODES, "off", False)
    assert_equal(results, want, f"{kind}, seed {seed}")
    for result in results:
        assert not any(result.calls.values())
        assert "fusion requires the finalize setting, which is off" in result.reasons


@pytest.mark.gpu
@pytest.mark.parametrize("finalize", ["auto", "reference", "off"])
def test_two_gpus_give_the_logits_of_one_process_on_the_cpu(
    two_gpus: Pool, single: tuple[str, Path, list[list[int]], Tensor], finalize: str, seed: int
) -> None:
    kind, directory, prompts, want = single
    results = two_gpus.run(model_passes, directory, prompts, DECODES, finalize, False)
    assert torch.equal(results[0].logits, results[1].logits), f"{kind}, seed {seed}: ranks differ"
    assert worst_error(results[0].logits, want) < 10 * TOLERANCE, f"{kind}, seed {seed}"
    fused = finalize != "off" and bool(MIXTURES[kind])
    assert bool(results[0].calls["finalize"]) == fused, f"{results[0].adapter}: {results[0].reasons}"


def test_ranks_hold_pieces_that_make_up_the_checkpoint(
    two_ranks: Pool, single: tuple[str, Path, list[list[int]], Tensor]
) -> None:
    kind, directory, _, _ = single
    whole = load(directory).state_dict()
    shares = two_ranks.run(weights_of, directory)
    for name, spec in weight_table(read_config(directory)).items():
        full, dim, first, second = whole[name], spec.shard_dim, *(share[name] for share in shares)
        if spec.on_first_rank:
            assert torch.equal(first, full), f"{kind} {name}"
            assert not second.any(), f"{kind} {name}"
        elif dim is None or spec.heads == 1:
            assert torch.equal(first, full), f"{kind} {name}"
            assert torch.equal(second, full), f"{kind} {name}"
        elif spec.blocks is not None:
            halves = [block.chunk(2, dim) for block in full.split(spec.blocks, dim)]
            for rank, share in enumerate((first, second)):
                assert torch.equal(share, torch.cat([half[rank] for half in halves], dim)), f"{kind} {name}"
        else:
            joined = torch.cat((first, second), dim)
            assert torch.equal(joined.narrow(dim, 0, full.shape[dim]), full), f"{kind} {name}"
            assert first.shape == second.shape
            assert not joined.narrow(dim, full.shape[dim], joined.shape[dim] - full.shape[dim]).any()


def test_a_weight_that_one_rank_alone_finds_bad_is_an_error_on_both(two_ranks: Pool, tmp_path: Path, seed: int) -> None:
    build_theirs("dense", seed).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][-1, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = two_ranks.run(refusal, tmp_path)
    assert "up_proj.weight" in second
    assert "has NaN" in second
    assert first == f"another rank could not load its share: rank 1: {second}"
