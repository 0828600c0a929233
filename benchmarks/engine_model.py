"""The models that engines are compared on, and transformers' own answer for them."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROMPT_LENGTHS = (5, 17, 64, 200, 3, 130, 700)
#: Ids below are special tokens of the tiny models that ``make-model`` writes.
FIRST_ID = 3
SMALL = {
    "vocab_size": 2048, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "max_position_embeddings": 16384,
}  # fmt: skip


def prompts(vocabulary: int, lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    """The same random token ids in every run."""
    source = random.Random(seed)
    return [[source.randrange(FIRST_ID, vocabulary) for _ in range(n)] for n in lengths]


def logprobs_of(outputs: Sequence[Any], which: str) -> list[list[float]]:
    """Of each output of SGLang's those that it has under ``which``: the first token of a prompt has none."""
    return [[entry[0] for entry in said["meta_info"][which] if entry[0] is not None] for said in outputs]


def vocabulary_of(directory: str) -> int:
    return int(json.loads((Path(directory) / "config.json").read_text())["vocab_size"])


def make_model(args: argparse.Namespace) -> None:
    """A Qwen3.5 mixture-of-experts text model as transformers writes it, GDN widths 128, weights from a seed."""
    import torch
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    sizes: dict[str, Any] = dict(SMALL)
    if args.geometry:
        from qwen35.domain.geometry import public_geometry

        g = public_geometry(args.geometry)
        sizes = {
            "vocab_size": g.vocabulary, "hidden_size": g.hidden, "num_hidden_layers": args.layers or g.layers,
            "num_attention_heads": g.attention_heads, "num_key_value_heads": g.attention_kv_heads,
            "head_dim": g.attention_head_width, "linear_num_key_heads": g.gdn.key_heads,
            "linear_num_value_heads": g.gdn.value_heads, "num_experts": g.experts, "num_experts_per_tok": g.top_k,
            "moe_intermediate_size": g.expert_width, "shared_expert_intermediate_size": g.shared_expert_width,
            "max_position_embeddings": 32768,
        }  # fmt: skip
    if args.layers:
        sizes["num_hidden_layers"] = args.layers
    if args.top_k:
        sizes["num_experts_per_tok"] = args.top_k
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = Qwen3_5MoeTextConfig(
        **sizes, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
        initializer_range=args.scale, rope_parameters=rope, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Qwen3_5MoeForCausalLM"]
    directory = Path(args.model)
    directory.mkdir(parents=True, exist_ok=True)
    if args.config_only:
        save_config(config, directory)
        return
    torch.manual_seed(args.seed)
    model = Qwen3_5MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.normal_()
            elif "conv1d" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(directory)
    save_config(config, directory)


def save_config(config: Any, directory: Path) -> None:
    """With the interval of full attention, which SGLang reads and newer releases of transformers no longer write."""
    config.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"full_attention_interval": 4}, indent=1))


#: Of every next id (columns) after each token of a sequence (rows).
LogProbabilities = Callable[[list[int]], "torch.Tensor"]


def by_transformers(directory: str, dtype: str) -> LogProbabilities:
    """transformers' own log-probabilities with the checkpoint in ``directory``."""
    import torch
    from transformers import Qwen3_5MoeForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3_5MoeForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()

    @torch.no_grad()
    def logprobs(ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([ids], device=device)).logits[0]
        return logits.double().log_softmax(-1).cpu()

    return logprobs


def truth(args: argparse.Namespace) -> None:
    """transformers' own log-probabilities of the same tokens, and its greedy ids with theirs, as ``run`` has them."""
    found = continued(by_transformers(args.model, args.dtype), prompts(vocabulary_of(args.model)), args.new)
    said = {"tag": f"transformers {args.dtype}", **found, **where_and_when()}
    Path(args.out).write_text(json.dumps(said))


def judge(args: argparse.Namespace) -> None:
    """transformers' log-probabilities of the ids that engines chose, added to their results; those that are not there
    are left out."""
    logprobs, asked = by_transformers(args.model, args.dtype), prompts(vocabulary_of(args.model))
    for path in map(Path, args.results):
        if path.is_file():
            result = json.loads(path.read_text())
            result["output_logprobs_truth"] = judged(logprobs, asked, result["output_ids"])
            path.write_text(json.dumps(result, indent=1))


def judged(logprobs: LogProbabilities, asked: list[list[int]], chosen: list[list[int]]) -> list[list[float]]:
    """Of each prompt the log-probabilities of the ids ``chosen`` after it, each given all of those before."""
    found = []
    for prompt, ids in zip(asked, chosen, strict=True):
        whole = logprobs([*prompt, *ids])
        found.append([float(whole[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)])
    return found


def continued(logprobs: LogProbabilities, asked: list[list[int]], new: int) -> dict[str, Any]:
    """Of each prompt the log-probabilities of its own tokens, and ``new`` greedy ids with theirs.

    Every new token computes the whole sequence anew, so no state of a recurrence is carried from one to the next.
    """
    found: dict[str, list[Any]] = {"prompt_logprobs": [], "output_ids": [], "output_logprobs": []}
    for prompt in asked:
        ids = list(prompt)
        for _ in range(new):
            ids.append(int(logprobs(ids)[-1].argmax()))
        whole = logprobs(ids)
        values = [float(whole[i, following]) for i, following in enumerate(ids[1:])]
        found["prompt_logprobs"].append(values[: len(prompt) - 1])
        found["output_ids"].append(ids[len(prompt) :])
        found["output_logprobs"].append(values[len(prompt) - 1 :])
    return found


def where_and_when() -> dict[str, Any]:
    """What every result says of its making. The GPU's name is asked of the driver: an engine owns the GPU."""
    from qwen35.testing.machine import versions

    names = ["CPU"]
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(["python", *sys.argv]),
        "device": names[0], "versions": versions(),
    }  # fmt: skip
