"""From the states that SGLang's Triton extend returns to the checkpoints that were planned."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.ports.gated_delta_rule import CheckpointPlan


def planned_checkpoints(
    chunk_states: Tensor, plan: CheckpointPlan, offsets: Tensor, final: Tensor, chunk: int
) -> Tensor:
    """The states after every ``plan.every`` tokens, [1, count, HV, V, K] in ``final``'s dtype.

    ``chunk_states`` [1, C, HV, V, K] are the states *before* each chunk of ``chunk`` tokens, the chunks of all
    sequences in a row; ``offsets`` [S+1] the sequences' token offsets; ``final`` [S, HV, V, K] the states after each
    sequence, where a checkpoint at its very end is found. Nothing waits for the device.
    """
    offsets = offsets.to(torch.int64)
    lengths = offsets.diff()
    chunks = torch.zeros_like(offsets)
    chunks[1:] = ((lengths + chunk - 1) // chunk).cumsum(0)
    rows = torch.arange(plan.count, device=offsets.device)
    sequence = torch.searchsorted(plan.starts[1:].contiguous(), rows, right=True)
    tokens = (rows - plan.starts[sequence] + 1) * plan.every
    before = chunks[sequence] + tokens // chunk
    at_end = tokens == lengths[sequence]
    inner = chunk_states[0][before.clamp(max=chunk_states.shape[1] - 1)].to(final.dtype)
    return torch.where(at_end[:, None, None, None], final[sequence], inner)[None]
