"""The overlap scheduler's part of the seam: orders of payloads that SGLang's FutureMap does not survive.

Only releases that list the FutureMap among their targets are at fault. SGLang's own methods do every write and gather;
a Relay lends them its zeroed buffers, completes a payload from which they would read None, and gathers what they drop.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qwen35.adapters.sglang.seam import Hook
from qwen35.adapters.sglang.seam_moved import Guard
from qwen35.adapters.sglang.seams.release import Release
from qwen35.services.counters import Counters
from qwen35.services.relay import Relay

#: The payload's fields that have buffers of their own, in ``FutureMap.<field>_buf``, made when first carried.
FIELDS = ("topk_p", "topk_index", "hidden_states", "draft_probs", "dsa_topk_indices")
#: What hooks read of a FutureMap while it serves, where it is too late to give up.
_read_while_serving = operator.attrgetter(
    "spec_algo.is_none", "spec_algo.is_ngram", "need_topk", "need_hidden_states", "req_pool_size", "device",
    *(f"{field}_buf" for field in FIELDS),
)  # fmt: skip


class RelaySeam:
    """Mends the FutureMaps of ``release``, if it is one that needs it, and counts in ``relay_mends`` where it did.
    ``guard``: our half of their constructor goes on inside it."""

    def __init__(self, release: Release, counters: Counters, guard: Guard) -> None:
        self._release, self._counters, self._guard = release, counters, guard
        self._relays: weakref.WeakKeyDictionary[Any, Relay] = weakref.WeakKeyDictionary()

    def hooks(self) -> dict[str, Hook]:
        """What to hook, by key of the release's targets; nothing where the release's own relay holds."""
        hooks: dict[str, Hook] = {
            "relay": self._around_init, "relay_stash": self._around_stash, "relay_resolve": self._around_resolve,
        }  # fmt: skip
        return hooks if hooks.keys() <= self._release.targets.keys() else {}

    def _around_init(self, original: Callable[..., None], future_map: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.managers import overlap_utils

        original(future_map, *args, **kwargs)
        with self._guard("relay"):
            _read_while_serving(future_map)
            if not overlap_utils._DEBUG_ASSERT:  # else SGLang has poisoned the rows, and checks that they are written
                future_map.output_tokens_buf.zero_()

    def _around_stash(
        self, original: Callable[..., None], future_map: Any, future_indices: Tensor, payload: Any
    ) -> None:
        algorithm = future_map.spec_algo
        if future_indices.shape[0] == 0 or algorithm.is_none() or algorithm.is_ngram():
            original(future_map, future_indices, payload)
            return
        relay = self._relay(future_map)
        original(future_map, future_indices, self._completed(future_map, relay, future_indices, payload))
        _lend_buffers(future_map, relay, future_indices)

    def _around_resolve(self, original: Callable[..., None], future_map: Any, batch: Any) -> None:
        original(future_map, batch)
        draft = batch.spec_info
        if draft is None or not future_map.need_topk or future_map.draft_probs_buf is None:
            return
        if draft.future_indices.shape[0] == 0 or draft.draft_probs is not None:
            return
        self._counters.add("relay_mends", reason="draft_probs not gathered for a draft input that has none yet")
        draft.draft_probs = self._relay(future_map).gather(draft.future_indices, ["draft_probs"])["draft_probs"]

    def _completed(self, future_map: Any, relay: Relay, indices: Tensor, payload: Any) -> Any:
        """``payload``, or a copy of it whose missing fields have what the rows hold, so that the rows keep it."""
        missing: list[str] = []
        if future_map.need_topk and payload.topk_p is None:
            missing += ["topk_p", "topk_index"]
        if future_map.need_hidden_states and payload.hidden_states is None:
            missing.append("hidden_states")
        if not missing:
            return payload
        self._counters.add("relay_mends", reason=f"payload without {', '.join(missing)}")
        return dataclasses.replace(payload, **relay.gather(indices, missing))

    def _relay(self, future_map: Any) -> Relay:
        relay = self._relays.get(future_map)
        if relay is None:
            relay = self._relays[future_map] = Relay(future_map.req_pool_size, future_map.device)
        _lend_buffers(future_map, relay, None)
        return relay


def _lend_buffers(future_map: Any, relay: Relay, written: Tensor | None) -> None:
    """Exchange buffers that SGLang made since for the relay's, which keep the rows ``written`` (None: all of them)
    and are zero elsewhere."""
    known = relay.fields
    for name in FIELDS:
        buffer = getattr(future_map, f"{name}_buf")
        if buffer is None or name in known:
            continue
        rows = torch.arange(buffer.shape[0], device=buffer.device) if written is None else written.to(buffer.device)
        values = buffer[rows]
        # Let go of first, so that the allocator can hand out the same memory: draft_probs rows are vocabulary-wide.
        del buffer
        setattr(future_map, f"{name}_buf", None)
        relay.stash(rows, {name: values})
        setattr(future_map, f"{name}_buf", relay.buffer(name))
