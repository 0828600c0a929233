"""What the rank processes execute with a whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from finalize_pool import Ranked
from torch import Tensor

from qwen35.container import Container, build
from qwen35.domain.errors import CheckpointError
from qwen35.model import Model, Session, TensorParallel, load_model

REFERENCE = {"gdn_decode": "reference", "gdn_extend": "reference", "gdn_verify": "reference", "conv": "reference"}


@dataclass(frozen=True)
class Passes:
    """Logits of a prefill in chunks and of decodes, the fused calls by kind, and why the latest was not fused."""

    logits: Tensor
    calls: dict[str, int]
    adapter: str | None
    reasons: tuple[str, ...] = field(default=())


def ranks_of(ranked: Ranked) -> TensorParallel:
    return TensorParallel(group=ranked.group, size=ranked.size, rank=ranked.rank)


def load_on(container: Container, directory: Path, ranks: TensorParallel, device: str) -> Model:
    return load_model(
        directory, gated_delta_rule=container.gated_delta_rule(), short_convolution=container.short_convolution(),
        finalize=container.finalize(), tensor_parallel=ranks, device=device, dtype=torch.float32, quiet=True,
    )  # fmt: skip


def run_passes(model: Model, prompts: list[list[int]], decodes: int) -> Tensor:
    """The last ``decodes`` tokens of each prompt are decoded, what is before them is prefilled in two chunks."""
    session = Session(model, slots=len(prompts), max_length=max(map(len, prompts)))
    slots = [session.open() for _ in prompts]
    heads = [prompt[: len(prompt) - decodes] for prompt in prompts]
    rows = [
        session.extend(slots, [head[:2] for head in heads], every_token=True),
        session.extend(slots, [head[2:] for head in heads], every_token=True),
    ]
    for i in range(decodes, 0, -1):
        rows.append(session.decode(slots, [prompt[-i] for prompt in prompts]))
    return torch.cat(rows)


def model_passes(
    ranked: Ranked, directory: Path, prompts: list[list[int]], decodes: int, finalize: str, checked: bool
) -> Passes:
    """The passes on the ranks of the pool, with the finalize that ``finalize`` names."""
    container = build(device=ranked.device, finalize=finalize, checked=checked, **REFERENCE)
    try:
        model = load_on(container, directory, ranks_of(ranked), ranked.device)
        tokens = sum(map(len, prompts))
        model.prepare(max_batch=len(prompts), max_tokens=tokens)
        model.prepare(max_batch=len(prompts), max_tokens=2 * tokens)
        logits = run_passes(model, prompts, decodes).cpu()
        counters, choice = container.counters(), container.finalize().choice
        kinds = ("finalize", "all-reduce")
        name = None if choice is None else choice.name
        calls = {kind: counters.total("calls", port="finalize_fusion", phase=kind) for kind in kinds}
        step = model.latest_step
        return Passes(logits, calls, name, () if step is None else step.finalize.reasons)
    finally:
        container.finalize().close()


def weights_of(ranked: Ranked, directory: Path) -> dict[str, Tensor]:
    """This rank's weights."""
    container = build(device="cpu", finalize="off", **REFERENCE)
    return dict(load_on(container, directory, ranks_of(ranked), "cpu").state_dict())


def refusal(ranked: Ranked, directory: Path) -> str:
    """What loading a spoilt checkpoint says on this rank."""
    container = build(device="cpu", finalize="off", **REFERENCE)
    try:
        load_on(container, directory, ranks_of(ranked), "cpu")
    except CheckpointError as exc:
        return str(exc)
    return ""
