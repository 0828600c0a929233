"""The loader reads every layout that checkpoints come in, and says exactly what is wrong with a bad one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import build, load
from safetensors.torch import load_file, save_file
from torch import Tensor

import qwen35
from qwen35.domain.errors import CheckpointError, ConfigurationError
from qwen35.domain.tensor_parallel import block_slices
from qwen35.model import Model, load_model, weight_table

Tensors = dict[str, Tensor]
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """A mixture in one file, as save_pretrained writes it."""
    path = tmp_path_factory.mktemp("moe")
    build("moe", seed).save_pretrained(path)
    return path


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(written, tmp_path / "checkpoint"))


def rewrite(directory: Path, change: Callable[[Tensors], Tensors | None]) -> None:
    tensors = load_file(directory / FILE)
    save_file(change(tensors) or tensors, directory / FILE)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def packed(tensors: Tensors) -> Tensors:
    """The same experts packed as ``experts.gate_up_proj`` and ``experts.down_proj``."""
    out = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{at}.{e}.{kind}_proj.weight"] for e in range(8)]) for kind in ("gate", "up", "down")
        )
        out[f"{at}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        out[f"{at}.down_proj"] = down
    return out


def shard(directory: Path, parts: int = 3) -> None:
    """Split model.safetensors into shards with an index."""
    tensors = load_file(directory / FILE)
    (directory / FILE).unlink()
    where = {name: f"model-{i % parts}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: t for name, t in tensors.items() if where[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def same(a: Model, b: Model) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_packed_and_sharded_experts_give_the_model_that_single_ones_give(written: Path, checkpoint: Path) -> None:
    single = load(written)
    assert any(".experts.0." in name for name in load_file(written / FILE)), "save_pretrained packs now"
    rewrite(checkpoint, packed)
    assert same(load(checkpoint), single)
    shard(checkpoint)
    assert same(load(checkpoint), single)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_prefixes_of_the_wrappers_are_read(written: Path, checkpoint: Path, prefix: str) -> None:
    def renamed(tensors: Tensors) -> Tensors:
        out = {prefix + n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"}
        head = "language_model.lm_head.weight" if prefix.startswith("language_model") else "lm_head.weight"
        return {**out, head: tensors["lm_head.weight"]}

    rewrite(checkpoint, renamed)
    assert same(load(checkpoint), load(written))


def test_vision_and_multi_token_layers_are_passed_over(written: Path, checkpoint: Path) -> None:
    extra = {name: torch.full((2,), float("nan")) for name in ("model.visual.merger.x", "visual.y", "mtp.norm.weight")}
    rewrite(checkpoint, lambda tensors: {**tensors, **extra})
    assert same(load(checkpoint), load(written))


def test_every_parameter_is_loaded_and_follows_the_table(written: Path) -> None:
    model = load(written, torch.bfloat16)
    table = weight_table(model.config)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == table.keys()
    for name, spec in table.items():
        assert parameters[name].shape == spec.shape
        assert parameters[name].dtype == (torch.float32 if spec.keep_float32 else torch.bfloat16)
        assert not parameters[name].requires_grad
        assert not parameters[name].is_meta
    assert not any(buffer.is_meta for buffer in model.buffers())


@pytest.mark.parametrize("tp", [1, 2])
def test_the_tables_blocks_cover_the_dimension_that_ranks_divide(written: Path, tp: int) -> None:
    for name, spec in weight_table(load(written).config).items():
        if spec.shard_dim is None:
            assert spec.blocks is None
            continue
        size = spec.shape[spec.shard_dim]
        blocks = spec.blocks or (size,)
        assert sum(blocks) == size, name
        if name != "embed_tokens.weight" and name != "lm_head.weight":
            assert sum(s.stop - s.start for r in range(tp) for s in block_slices(blocks, tp, r)) == size, name


def test_tied_embeddings_may_be_stored_twice_but_not_differ(checkpoint: Path) -> None:
    edit_config(checkpoint, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight must equal embed_tokens\.weight"):
        load(checkpoint)
    rewrite(checkpoint, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    twice = load(checkpoint)
    rewrite(checkpoint, lambda t: {name: v for name, v in t.items() if name != "lm_head.weight"})
    assert same(twice, load(checkpoint))
    assert twice.lm_head is None


def test_a_model_with_dense_and_mixture_layers_loads(checkpoint: Path) -> None:
    edit_config(checkpoint, mlp_only_layers=[0], intermediate_size=24)

    def dense_first(tensors: Tensors) -> Tensors:
        out = {name: t for name, t in tensors.items() if not name.startswith("model.layers.0.mlp.")}
        shapes = {"gate": (24, 64), "up": (24, 64), "down": (64, 24)}
        return out | {f"model.layers.0.mlp.{n}_proj.weight": torch.randn(s) for n, s in shapes.items()}

    rewrite(checkpoint, dense_first)
    model = load(checkpoint)
    pools = model.pools(slots=1, max_length=3)
    logits = model(torch.tensor([1, 2, 3]), pools.extend_batch([pools.open()], [3]), pools)
    assert bool(torch.isfinite(logits).all())


def test_everything_that_does_not_fit_is_listed_at_once(checkpoint: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors[EXPERT], tensors["model.layers.0.linear_attn.A_log"]
        tensors["model.layers.9.mlp.gate.weight"] = torch.zeros(2)
        tensors["transformer.h.0"] = torch.zeros(2)
        tensors["model.layers.0.linear_attn.conv1d.weight"] = torch.zeros(112, 4)
        tensors["model.layers.3.mlp.experts.0.down_proj.weight"] = torch.zeros(64, 17)
        tensors["model.layers.3.self_attn.q_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)

    rewrite(checkpoint, spoil)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    message = str(caught.value)
    missing, *others = message.split("; ")
    for name in ("model.norm.weight", EXPERT, "model.layers.0.linear_attn.A_log"):
        assert name in missing
    rest = "; ".join(others)
    for part in (
        "conv1d.weight must have shape [112, 1, 4], got [112, 4]",
        "experts.0.down_proj.weight must have shape [64, 16], got [64, 17]",
        "q_proj.weight must be a float of BF16, F16, F32, F64, got I8",
        "unexpected: ", "model.layers.9.mlp.gate.weight", "transformer.h.0",
    ):  # fmt: skip
        assert part in rest


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("model.", "lm_head."), ("model.language_model.", "lm_head."),
     ("language_model.model.", "language_model.lm_head."), ("", "lm_head.")],
)  # fmt: skip
def test_what_is_missing_is_spelled_as_the_checkpoint_spells_the_rest(checkpoint: Path, prefix: str, head: str) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        kept = {n.replace("model.", prefix, 1): v for n, v in tensors.items() if n != "model.norm.weight"}
        return {**{n: v for n, v in kept.items() if n != "lm_head.weight"}, f"{prefix}foo": torch.zeros(2)}

    rewrite(checkpoint, spoil)
    found = f"missing: {prefix}norm.weight, {head}weight; unexpected: {prefix}foo"
    with pytest.raises(CheckpointError, match=re.escape(found) + "$"):
        load(checkpoint)


@pytest.mark.parametrize("form", [dict, packed], ids=["single", "packed"])
@pytest.mark.parametrize(("key", "most", "found"), [("num_hidden_layers", 264, 4), ("num_experts", 272, 8)])
def test_far_more_than_is_stored_is_refused_before_a_table_is_made(
    checkpoint: Path, form: Callable[[Tensors], Tensors], key: str, most: int, found: int
) -> None:
    rewrite(checkpoint, form)
    edit_config(checkpoint, **{key: most, "layer_types": None, "full_attention_interval": 4})
    with pytest.raises(CheckpointError, match="missing: " if key == "num_hidden_layers" else "must have shape"):
        load(checkpoint)
    for count in (most + 1, 10_000):
        edit_config(checkpoint, **{key: count})
        with pytest.raises(CheckpointError) as caught:
            load(checkpoint)
        said = f"config.json: {key} must fit the stored tensors, which are of {found}, got {count}"
        assert str(caught.value) == said


def test_a_number_of_experts_that_no_memory_holds_is_refused_at_once(checkpoint: Path) -> None:
    edit_config(checkpoint, num_experts=10**12)
    with pytest.raises(CheckpointError, match="num_experts must fit the stored tensors"):
        load(checkpoint)


def test_experts_stored_both_ways_or_a_name_under_two_prefixes_are_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: {**packed(t), EXPERT: t[EXPERT], "norm.weight": t["model.norm.weight"].clone()})
    with pytest.raises(CheckpointError, match=f"same weight.*unexpected: {EXPERT}"):
        load(checkpoint)


def test_missing_packed_experts_are_reported_under_the_packed_name(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: {n: v for n, v in t.items() if ".experts." not in n})
    with pytest.raises(CheckpointError, match=r"missing: .*gate_up_proj, model\.layers\.0\.mlp\.experts\.down_proj"):
        load(checkpoint)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [EXPERT, "model.layers.0.linear_attn.A_log", "lm_head.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(checkpoint: Path, name: str, bad: float) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = bad

    rewrite(checkpoint, spoil)
    with pytest.raises(CheckpointError, match=rf"{name} in .*{FILE} has NaN or infinite values"):
        load(checkpoint)


def test_weights_beyond_the_range_of_the_dtype_are_refused(checkpoint: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[EXPERT][0, 0] = 1e6

    rewrite(checkpoint, spoil)
    assert load(checkpoint).dtype == torch.float32
    with pytest.raises(CheckpointError, match=r"beyond the range of torch\.float16"):
        load(checkpoint, torch.float16)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2], lambda data: data[:-1], lambda data: data[:5], lambda _: b"",
        lambda data: data[:8] + b"x" + data[9:], lambda data: b"\xff" * 8 + data[8:], lambda data: data + b"tail",
    ],
    ids=["half", "one-byte-short", "in-the-length", "empty", "header-not-json", "header-length", "tail"],
)  # fmt: skip
def test_a_truncated_or_corrupted_file_is_refused_by_name(
    checkpoint: Path, sharded: bool, damage: Callable[[bytes], bytes]
) -> None:
    file = checkpoint / FILE
    if sharded:
        shard(checkpoint)
        file = checkpoint / "model-1.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"{file.name} cannot be read, it is truncated or corrupted"):
        load(checkpoint)


def edit_index(directory: Path, change: Callable[[dict[str, object]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_an_index_that_does_not_agree_with_its_files_is_refused(checkpoint: Path) -> None:
    shard(checkpoint)
    good = (checkpoint / INDEX).read_text()
    for change, match in (
        (lambda m: m.update({"model.norm.weight": "model-9.safetensors"}), r"missing: model-9\.safetensors"),
        (lambda m: m.update({"model.extra": "model-0.safetensors"}), r"model\.extra is not in model-0"),
        (lambda m: m.pop("model.norm.weight"), r"model\.norm\.weight of model-\d\.safetensors is not in the index"),
        (lambda m: m.update({"model.norm.weight": "../other.safetensors"}), "must be in a .safetensors file beside it"),
        (lambda m: m.update({"model.norm.weight": 3}), "must be in a .safetensors file beside it"),
        (lambda m: m.clear(), "has no weight_map"),
    ):
        (checkpoint / INDEX).write_text(good)
        edit_index(checkpoint, change)
        with pytest.raises(CheckpointError, match=match):
            load(checkpoint)
    (checkpoint / INDEX).write_text(good[:-9])
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read as JSON"):
        load(checkpoint)
    (checkpoint / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(checkpoint)


def test_dtypes_that_the_model_cannot_have_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"dtype must be one of float32, bfloat16, float16, got torch\.int8"):
        load(checkpoint, torch.int8)
    edit_config(checkpoint, dtype="float8_e4m3fn")
    with pytest.raises(CheckpointError, match=r"dtype must be one of .*got float8_e4m3fn"):
        load(checkpoint, None)


KERNELS: dict[str, Any] = {
    "gated_delta_rule": qwen35.adapter("gated_delta_rule", "reference", device="cpu"),
    "short_convolution": qwen35.adapter("short_convolution", "reference", device="cpu"),
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"device": "gpu"}, "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        ({"device": "meta"}, "device must be .*got 'meta'"),
        ({"device": torch.device("meta")}, "device must be .*got 'meta'"),
        ({"device": "cuda:x"}, "device must be .*got 'cuda:x'"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, rf"device 'cuda:{torch.cuda.device_count()}' is not there"),
        ({"device": 0}, "device must be text or a torch.device, got 0"),
        ({"device": None}, "device must be text or a torch.device, got None"),
        ({"gated_delta_rule": "triton"}, "gated_delta_rule must implement GatedDeltaRule, got 'triton'; qwen35.build"),
        ({"short_convolution": None}, "short_convolution must implement ShortConvolution, got None"),
        ({"finalize": "auto"}, "finalize must be a FinalizeService or None, got 'auto'"),
        ({"tensor_parallel": 2}, "tensor_parallel must be a TensorParallel, got 2"),
        ({"directory": 5}, "directory must be the path of a checkpoint, got 5"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(
    written: Path, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        load_model(**{"directory": written, **KERNELS, "quiet": True, **change})


def test_cuda_without_a_gpu_is_refused_by_name(written: Path) -> None:
    if torch.cuda.is_available():
        assert load_model(written, **KERNELS, device="cuda", quiet=True).device.type == "cuda"
    else:
        with pytest.raises(ConfigurationError, match="device 'cuda' is not there: torch sees 0 GPUs"):
            load_model(written, **KERNELS, device="cuda", quiet=True)


FREED = """
import gc, sys, weakref
import qwen35
from qwen35.model import load_model

gc.collect()
gc.disable()
model = load_model(
    sys.argv[1], gated_delta_rule=qwen35.adapter("gated_delta_rule", "reference", device="cpu"),
    short_convolution=qwen35.adapter("short_convolution", "reference", device="cpu"), quiet=True,
)
left = weakref.ref(model)
del model
print("freed" if left() is None else "held")
"""


def test_the_first_model_of_a_process_is_freed_without_the_garbage_collector(written: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREED, str(written)], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "freed\n", "two models at once, where one follows another, need twice the memory"
