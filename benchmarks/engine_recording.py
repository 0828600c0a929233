"""Reads what engine_recorder.py wrote: one GDN call of a live engine, as a call of the contract on fresh copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from qwen35.adapters.sglang.seam_calls import tree_parents
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, LogGates, RawGates, VerifyCall

#: Tokens, and the gates as projected.
_TOKENS = ("q", "k", "v", "a", "b")


@dataclass(frozen=True, slots=True)
class Recording:
    """One call of ``layer`` and ``phase``, its ``number``-th; ``tensors`` as recorded, on the CPU."""

    layer: int
    phase: str
    number: int
    tensors: dict[str, Tensor]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.tensors["q"].shape[:-2].numel()

    def call(
        self, device: str, dtype: torch.dtype | None = None, log_gates: bool = False
    ) -> DecodeCall | ExtendCall | VerifyCall:
        """The call on copies of its tensors, with raw gates or (extend) those that SGLang computed.

        ``dtype`` (None: as recorded) is that of tokens, raw gates and states.
        """
        t = {name: x.to(device, copy=True) for name, x in self.tensors.items()}
        states = t["before"]
        if dtype is not None:
            t |= {name: t[name].to(dtype) for name in _TOKENS}
            states = states.to(dtype)
        raw = RawGates(a=t["a"], b=t["b"], A_log=t["A_log"], dt_bias=t["dt_bias"])
        gates = LogGates(g=t["g"].float(), beta=t["beta"].float()) if log_gates else raw
        if self.phase == "decode":
            return DecodeCall(q=t["q"], k=t["k"], v=t["v"], gates=gates, states=states, slots=t["slots"])
        if self.phase == "verify":
            rows, draft = t["q"].shape[:2]
            links = t.get("links")
            nodes = states.new_full((rows, draft, *states.shape[1:]), torch.nan)
            return VerifyCall(
                q=t["q"], k=t["k"], v=t["v"], gates=raw, states=states, slots=t["slots"], intermediates=nodes,
                rows=torch.arange(rows, device=device, dtype=torch.int32),
                parents=None if links is None else tree_parents(links),
            )  # fmt: skip
        lengths = tuple(int(n) for n in self.tensors["cu_seqlens"].diff())
        return ExtendCall(
            q=t["q"], k=t["k"], v=t["v"], gates=gates, states=states, slots=t["slots"],
            cu_seqlens=t["cu_seqlens"].to(torch.int32), seq_lens_host=lengths,
        )  # fmt: skip


def recordings(folder: Path) -> list[Recording]:
    """Every call in ``folder``, by layer, phase and number. Raises ``FileNotFoundError`` where there is none."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        layer, phase, number = path.stem.split("-")
        found.append(Recording(int(layer), phase, int(number), load_file(path)))
    if not found:
        raise FileNotFoundError(f"{folder} has no recorded calls; was the engine run with --record and without graphs?")
    return found
