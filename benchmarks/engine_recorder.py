"""Records the tensors of the first real GDN calls of a live engine, as a plugin of SGLang's own.

``GDN_RECORD_DIR`` names the folder (unset: nothing is hooked), ``GDN_RECORD_CALLS`` how many calls of each layer and
phase, ``GDN_RECORD_LAYERS`` which layers ("0,4"; unset: all). Only eager calls on real sequences are recorded: run the
engine without decode CUDA graphs. Every call becomes one safetensors file, ``LAYER-PHASE-NUMBER.safetensors``, with the
slots that it names in a pool of their own; rows past the last sequence are left out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DIRECTORY, CALLS, LAYERS = "GDN_RECORD_DIR", "GDN_RECORD_CALLS", "GDN_RECORD_LAYERS"
DISPATCHER = "sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher"
LAYER = "sglang.srt.layers.radix_linear_attention.RadixLinearAttention.forward"

#: The layer that runs and its raw gates: a dispatcher's extend is given neither.
_Running = tuple[Any, Tensor, Tensor]
_RUNNING: ContextVar[_Running | None] = ContextVar("running", default=None)


class Recorder:
    """Writes at most ``calls`` calls of each layer and phase into ``folder``; ``layers`` None: of every layer."""

    def __init__(self, folder: Path, calls: int, layers: frozenset[int] | None = None) -> None:
        self._folder, self._calls, self._layers = folder, calls, layers
        self._seen: Counter[tuple[int, str]] = Counter()
        folder.mkdir(parents=True, exist_ok=True)

    def around_layer(self, original: Callable[..., Any], layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor,
                     b: Tensor) -> Any:  # fmt: skip
        """RadixLinearAttention.forward."""
        token = _RUNNING.set((layer, a, b))
        try:
            return original(layer, forward_batch, mixed_qkv, a, b)
        finally:
            _RUNNING.reset(token)

    def around_packed(self, original: Callable[..., Any], dispatcher: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor,
                      **given: Any) -> Any:  # fmt: skip
        """GDNKernelDispatcher.packed_decode, which may overwrite its input."""
        heads, width, states = given["num_v_heads"], given["head_v_dim"], given["ssm_states"]
        keys = (mixed_qkv.shape[-1] - heads * width) // 2
        q, k, v = torch.split(mixed_qkv, [keys, keys, heads * width], dim=-1)
        q, k = (x.unflatten(-1, (-1, states.shape[-1])) for x in (q, k))
        tokens = {"q": q, "k": k, "v": v.unflatten(-1, (heads, width)), "a": a, "b": b}
        return self._around(
            "decode", lambda: original(dispatcher, mixed_qkv, a, b, **given), tokens, states, given["cache_indices"]
        )

    def around_decode(self, original: Callable[..., Any], dispatcher: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor,
                      b: Tensor, **given: Any) -> Any:  # fmt: skip
        """GDNKernelDispatcher.decode; SGLang calls it by names."""
        tokens = {"q": q[0], "k": k[0], "v": v[0], "a": a, "b": b}
        return self._around(
            "decode", lambda: original(dispatcher, q, k, v, a, b, **given), tokens, given["ssm_states"],
            given["cache_indices"],
        )  # fmt: skip

    def around_extend(self, original: Callable[..., Any], dispatcher: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
                      beta: Tensor, **given: Any) -> Any:  # fmt: skip
        """GDNKernelDispatcher.extend; SGLang calls it by names."""
        tokens = {"q": q[0], "k": k[0], "v": v[0], "g": g[0], "beta": beta[0]}
        return self._around(
            "extend", lambda: original(dispatcher, q, k, v, g, beta, **given), tokens, given["ssm_states"],
            given["cache_indices"], given["query_start_loc"],
        )  # fmt: skip

    def around_verify(self, original: Callable[..., Any], dispatcher: Any, **given: Any) -> Any:
        """GDNKernelDispatcher.target_verify, of drafts of one length; SGLang calls it by names.

        Kept are rows of sequences only, [B, T, ...], and as "after" the states behind each draft token.
        """
        states, rows, draft = given["ssm_states"], given["query_start_loc"].shape[0] - 1, given["cache_steps"]
        slots = given["cache_indices"][:rows]
        found = self._recorded("verify", states, slots)
        if found is None:
            return original(dispatcher, **given)
        (layer, _, _), used = found
        real = slots > 0

        def by_row(x: Tensor) -> Tensor:
            return x.reshape(rows, draft, *x.shape[-1 if x.dim() < 4 else -2 :])[real]

        kept = {name: by_row(given[name]).clone() for name in ("q", "k", "v", "a", "b")}
        kept |= {name: given[name].detach().clone() for name in ("A_log", "dt_bias")}
        kept |= {"before": states[used].clone(), "slots": torch.searchsorted(used, slots[real], out_int32=True)}
        if given["retrieve_parent_token"] is not None:
            kept["links"] = given["retrieve_parent_token"][:rows][real]
        out = original(dispatcher, **given)
        buffer, places = given["intermediate_states_buffer"], given["intermediate_state_indices"][:rows]
        kept |= {"out": by_row(out), "after": buffer[places[real].to(torch.int64), :draft]}
        self._write(layer.layer_id, "verify", kept)
        return out

    def _around(self, phase: str, call: Callable[[], Any], tokens: dict[str, Tensor], states: Tensor, slots: Tensor,
                offsets: Tensor | None = None) -> Any:  # fmt: skip
        sequences = tokens["q"].shape[0] if offsets is None else offsets.shape[0] - 1
        slots = slots[:sequences]
        found = self._recorded(phase, states, slots)
        if found is None:
            return call()
        (layer, a, b), used = found
        real = sequences if offsets is None else int(offsets[-1])
        raw = {"a": a, "b": b} | tokens  # a decode is given gates of its own: its layer's may still be packed
        raw |= {name: raw[name].reshape(-1, raw[name].shape[-1]) for name in ("a", "b")}
        kept = {name: x[:real].clone() for name, x in raw.items()}
        kept |= {"A_log": layer.A_log.detach().clone(), "dt_bias": layer.dt_bias.detach().clone()}
        kept["before"] = states[used].clone()
        result = call()
        out = result if phase == "decode" else result[0]
        places = torch.searchsorted(used, slots, out_int32=True)
        kept |= {
            "after": states[used], "out": out[0][:real], "slots": torch.where(slots > 0, places, -1),
        }  # fmt: skip
        if offsets is not None:
            kept["cu_seqlens"] = offsets
        self._write(layer.layer_id, phase, kept)
        return result

    def _recorded(self, phase: str, states: Tensor, slots: Tensor) -> tuple[_Running, Tensor] | None:
        """The layer that runs, and the slots that its call names, in order; None where the call is not to be recorded,
        or is warm-up: every row is padding or in the slot that SGLang reserves."""
        running = _RUNNING.get()
        if running is None or not self._wanted(running[0].layer_id, phase) or _capturing(states):
            return None
        used = torch.unique(slots[slots > 0])
        return (running, used) if used.numel() else None

    def _wanted(self, layer: int, phase: str) -> bool:
        chosen = self._layers is None or layer in self._layers
        return chosen and self._seen[layer, phase] < self._calls

    def _write(self, layer: int, phase: str, kept: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        number = self._seen[layer, phase]
        self._seen[layer, phase] += 1
        path = self._folder / f"{layer:03d}-{phase}-{number:03d}.safetensors"
        save_file({name: x.detach().cpu().contiguous() for name, x in kept.items()}, path)


def _capturing(states: Tensor) -> bool:
    return states.is_cuda and torch.cuda.is_current_stream_capturing()


def hooks(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """What is hooked; none of it is among the targets that the plugin under test patches."""
    return {
        LAYER: recorder.around_layer, f"{DISPATCHER}.packed_decode": recorder.around_packed,
        f"{DISPATCHER}.decode": recorder.around_decode, f"{DISPATCHER}.extend": recorder.around_extend,
        f"{DISPATCHER}.target_verify": recorder.around_verify,
    }  # fmt: skip


def register() -> None:
    """SGLang calls this in every process; only a scheduler's makes calls. Tensor-parallel ranks would share the folder:
    record with one."""
    folder = os.environ.get(DIRECTORY)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    layers = os.environ.get(LAYERS)
    chosen = frozenset(int(text) for text in layers.split(",")) if layers else None
    for path, hook in hooks(Recorder(Path(folder), int(os.environ.get(CALLS, "8")), chosen)).items():
        HookRegistry.register(path, hook, HookType.AROUND)
