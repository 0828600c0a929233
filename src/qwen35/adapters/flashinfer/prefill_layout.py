"""Where the inputs of FlashInfer's prefill lie in one piece of scratch, settled once for extends that look alike."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from qwen35.domain.alignment import padded
from qwen35.ports.gdn_calls import ExtendCall, GdnPlan
from qwen35.services.scratch import ALIGNMENT

FLOAT = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """T tokens and S sequences: q and k [T, H, K], v [T, HV, V] where it is copied, decay and beta [T, HV] float32,
    offsets [S + 1] int64, initial and final states [S, HV, V, K] float32. ``address``: of the scratch they lie in."""

    address: int
    q: Tensor
    k: Tensor
    v: Tensor | None = None
    decay: Tensor
    beta: Tensor
    offsets: Tensor
    initial: Tensor
    final: Tensor


class ExtendLayout:
    """What extends of one layout share: whether their sequences are ``split``, and for the ``plan`` that covers them
    ``size`` bytes of scratch and what lies where, which is the same place for all layouts under one plan."""

    __slots__ = ("_places", "generation", "plan", "size", "split")

    def __init__(self, split: bool) -> None:
        self.split, self.generation = split, -1

    def settle(self, call: ExtendCall, plan: GdnPlan, generation: int) -> None:
        """Lay out ``call`` under ``plan``, which is that of this ``generation`` of plans."""
        tokens, sequences = call.v.shape[0], call.slots.shape[0]
        most_tokens, most_sequences = max(plan.max_tokens, tokens), max(plan.max_batch, sequences)
        key, value, state = call.q.shape[1:], call.v.shape[1:], call.states.shape[1:]
        copies = plan.may_pad and sequences > 1
        wanted = {
            "q": (tokens, most_tokens, key, call.q.dtype), "k": (tokens, most_tokens, key, call.q.dtype),
            "decay": (tokens, most_tokens, value[:1], FLOAT), "beta": (tokens, most_tokens, value[:1], FLOAT),
            "offsets": (sequences + 1, most_sequences + 1, (), torch.int64),
            "initial": (sequences, most_sequences, state, FLOAT), "final": (sequences, most_sequences, state, FLOAT),
        }  # fmt: skip
        if copies:
            wanted["v"] = (tokens, most_tokens, value, call.v.dtype)
        self._places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self.size = 0
        for name, (rows, most, width, dtype) in wanted.items():
            self._places[name] = self.size, (rows, *width), dtype
            self.size += padded(most * prod(width) * dtype.itemsize, ALIGNMENT)
        self.plan, self.generation = plan, generation

    def cut(self, room: Tensor) -> Pieces:
        """The pieces of ``room``, ``size`` bytes; for the autograd mode of now, as a layout is."""
        found = {
            name: room[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (at, shape, dtype) in self._places.items()
        }
        return Pieces(address=room.data_ptr(), **found)
