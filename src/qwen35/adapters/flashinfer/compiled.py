"""FlashInfer's compiled decode kernels, launched without what its functions do around them.

For every call these look for the kernel that they compiled, by a key of up to two dozen parts, ask torch for the
stream, and cut views that the kernel does not read. Of calls that look like one that was served, all of that is known.
The names used here are private, known from 0.6.18. Where a release lacks one of them, or keeps its kernels by other
keys, nothing is found; and no family of kernels is used before ``prepare`` has seen one of it do what the function
does, to the bit, over tensors laid out as those of the call (``LOOSE``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from qwen35.services.devices import current_stream

#: q, k, v, a, b, A_log, dt_bias, scale, out, the pool, slots to read, slots to write (None: those that are read).
DecodeKernel = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor | None], object
]  # fmt: skip

#: Modules of FlashInfer that keep compiled kernels, by state dtype.
MODULES = {
    torch.float32: "flashinfer.gdn_kernels.gdn_decode_pretranspose",
    torch.bfloat16: "flashinfer.gdn_kernels.gdn_decode_bf16_state",
}
#: softplus_beta and softplus_threshold, which FlashInfer's functions pass on as they are.
_SOFTPLUS = (1.0, 20.0)

#: In what a call's tensors may differ from dense ones whose states are written where they are read.
LOOSE = frozenset({"split", "packed", "padded"})

#: What a launch that is not the function's may raise: it is then not used.
UNLIKE = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """What FlashInfer looks for a kernel by, and how the tensors lie.

    ``split``: states are written to other slots than they are read from. ``packed``: some of the tokens, their gates or
    the output are views whose rows lie further apart.
    """

    tokens: torch.dtype
    batch: int
    key_heads: int
    value_heads: int
    width: int
    scale: float
    split: bool
    packed: bool
    states: Tensor
    device: torch.device

    @staticmethod
    def of(q: Tensor, v: Tensor, scale: float, states: Tensor, *, split: bool, packed: bool) -> DecodeLayout:
        """Of a decode with q [B, 1, H, K] and v [B, 1, HV, V]."""
        batch, _, key_heads, width = q.shape
        return DecodeLayout(q.dtype, batch, key_heads, v.shape[2], width, scale, split, packed, states, q.device)

    @property
    def loose(self) -> frozenset[str]:
        """What of ``LOOSE`` it has."""
        has = {"split": self.split, "packed": self.packed, "padded": not self.states.is_contiguous()}
        return frozenset(name for name in LOOSE if has[name])

    @property
    def sizes(self) -> tuple[int, ...]:
        """T, H, HV, K, V."""
        return 1, self.key_heads, self.value_heads, self.width, self.states.shape[2]


@dataclass(frozen=True, slots=True)
class CompiledDecode:
    """A kernel by the name of its family, and a launch of it that takes what ``DecodeKernel`` does."""

    family: str
    launch: DecodeKernel


class CompiledDecodes:
    """Finds what FlashInfer compiled. ``modules``: the names of FlashInfer's modules by state dtype."""

    def __init__(self, modules: Mapping[torch.dtype, Mapping[str, Any]]) -> None:
        self._modules = modules
        #: By state dtype and family, what of ``LOOSE`` the launches had that were seen to do what the function does.
        self._trusted: dict[tuple[torch.dtype, str], frozenset[str]] = {}
        #: Key widths of elements, by device.
        self._rows: dict[tuple[torch.device, int], Tensor] = {}

    def reserve(self, device: torch.device, width: int) -> None:
        """Allocate what launches for keys of ``width`` on ``device`` need; nothing is found without. Not in capture."""
        if (device, width) not in self._rows:
            self._rows[device, width] = torch.empty(width, dtype=torch.bfloat16, device=device)

    def find(self, layout: DecodeLayout) -> CompiledDecode | None:
        """The kernel that FlashInfer's function has launched for a call of ``layout``; None where it is not there.

        Allocates nothing: a layout may be seen first inside capture.
        """
        names = self._modules.get(layout.states.dtype)
        if names is None or layout.tokens != torch.bfloat16:
            return None
        try:
            if layout.states.dtype == torch.float32:
                return _of_float32(names, layout)
            return _of_bfloat16(names, layout, self._rows[layout.device, layout.width])
        except UNLIKE:
            return None

    def trusted(self, layout: DecodeLayout) -> DecodeKernel | None:
        """As ``find``, of the families that were seen to do what the function does over tensors that lie so."""
        if not self._trusted:
            return None
        found = self.find(layout)
        seen = None if found is None else self._trusted.get((layout.states.dtype, found.family))
        return found.launch if found is not None and seen is not None and layout.loose <= seen else None

    def judge(self, layout: DecodeLayout, family: str, same: bool) -> None:
        """Whether a launch of ``family`` for ``layout`` did what the function does. Of a state dtype for which one did
        not, none is trusted again."""
        dtype = layout.states.dtype
        if same:
            self._trusted[dtype, family] = self._trusted.get((dtype, family), frozenset()) | layout.loose
        else:
            self._modules = {known: names for known, names in self._modules.items() if known != dtype}
            self._trusted = {known: seen for known, seen in self._trusted.items() if known[0] != dtype}


def load_compiled() -> CompiledDecodes:
    """Of the FlashInfer that is imported, whose modules import where its decode does."""
    found: dict[torch.dtype, Mapping[str, Any]] = {}
    for dtype, name in MODULES.items():
        try:
            found[dtype] = vars(import_module(name))
        except (ImportError, RuntimeError):  # RuntimeError: one of them asks for a GPU when it is imported
            continue
    return CompiledDecodes(found)


def _of_float32(names: Mapping[str, Any], layout: DecodeLayout) -> CompiledDecode:
    key = (*layout.sizes, torch.bfloat16, layout.scale, True, True, *map(int, layout.states.stride()[1:]))
    kept = names["_get_compiled_decode_kernel"](*key)
    kernel, (_, offsets) = kept["compiled"], kept["aux"][layout.batch, layout.device]
    stream_of = _streams(names, layout.device)

    def launch(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, _scale: float,
        out: Tensor, states: Tensor, read: Tensor, write: Tensor | None,
    ) -> None:  # fmt: skip
        to = read if write is None else write
        kernel(states, A_log, a, dt_bias, q, k, v, b, out, read, to, offsets, stream_of())

    return CompiledDecode("pretranspose", launch)


def _of_bfloat16(names: Mapping[str, Any], layout: DecodeLayout, row: Tensor) -> CompiledDecode:
    """``row`` [K] is neither read nor written."""
    tile = names["_select_wide_vec_tile_v"](layout.batch, layout.value_heads)
    states = layout.states
    whole = states.is_contiguous()
    pool = (-1, (-1,)) if whole else (states.shape[0], tuple(map(int, states.stride())))
    rest = (layout.scale, *_SOFTPLUS, names["_USE_PACKED_FMA"], not layout.split)
    dtypes = (torch.float32, torch.float32, torch.int32)
    more: tuple[Tensor, ...] = ()
    if tile is not None and tile >= 64:
        family = "wide_vec_t1"
        key = ("v3_mtp_bf16_tiled_dynB", *layout.sizes, *pool, tile, False, False, True, *rest, dtypes)
        kept = names["_compiled_kernels_wide_vec"][key]
    else:
        family = "mtp_ilp4"
        tile, rows = names["_get_bf16_mtp_config"](layout.batch, 1, layout.value_heads, states.shape[2])
        flags = False, False, False, False  # disable_output, and three ways to give steps and slots by token
        key = ("mtp_bf16_dynB", *layout.sizes, *pool, tile, rows, False, False, True, *rest, *flags, dtypes)
        kept = names["_compiled_kernels_mtp"][key]
        unread = kept["defaults_by_B"][layout.batch]
        more = unread["accepted_steps"], unread["ssm_state_indices"]
    kernel, stream_of = kept["compiled"], _streams(names, layout.device)
    # The place of intermediates, which are not written: shaped as FlashInfer's, a corner of the pool.
    corner = row.as_strided((1, 1, 1, states.shape[3]), states.stride())

    def launch(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, _scale: float,
        out: Tensor, states: Tensor, read: Tensor, write: Tensor | None,
    ) -> None:  # fmt: skip
        to = read if write is None else write
        kernel(states, corner, A_log, a, dt_bias, q, k, v, b, out, read, to, *more, stream_of())

    return CompiledDecode(family, launch)


def _streams(names: Mapping[str, Any], device: torch.device) -> Callable[[], object]:
    """The current stream of ``device`` as FlashInfer's kernels take it."""
    make = names["cuda"].CUstream

    def stream() -> object:
        return make(current_stream(device))

    return stream
