"""How FlashInfer 0.6.18 keeps what its decode compiled: fakes of the two modules, kernels being the fake's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fake_flashinfer import FakeFlashInfer
from qwen35.adapters.flashinfer.compiled import CompiledDecodes
from qwen35.adapters.flashinfer.release import FlashInferKernels

Kernel = Callable[..., None]


def as_it_is(kernel: Kernel) -> Kernel:
    return kernel


@dataclass
class FakeCompiled:
    """``fake``'s functions, which keep a kernel for each layout as FlashInfer does. ``launched`` counts launches of
    kept kernels from outside the functions; ``altered`` makes another kernel of each; what is named in ``hidden`` is
    not to be found, nor kernels for pools with gaps while ``keeps_padded`` is false."""

    fake: FakeFlashInfer
    altered: Callable[[Kernel], Kernel] = as_it_is
    hidden: str = ""
    keeps_padded: bool = True
    launched: list[str] = field(default_factory=list)

    compiled: CompiledDecodes | None = None

    def __post_init__(self) -> None:
        def kept_for(*_key: object) -> dict[str, Any]:
            return {}

        self.float32: dict[str, Any] = {
            "_get_compiled_decode_kernel": cache(kept_for), "cuda": SimpleNamespace(CUstream=int),
        }  # fmt: skip
        self.bfloat16: dict[str, Any] = {
            "_compiled_kernels_mtp": {}, "_compiled_kernels_wide_vec": {}, "_USE_PACKED_FMA": False,
            "_select_wide_vec_tile_v": lambda batch, heads: 64 if batch * heads >= 8 else 32 if batch > 1 else None,
            "_get_bf16_mtp_config": lambda *_: (16, 4), "cuda": SimpleNamespace(CUstream=int),
        }  # fmt: skip

    def kernels(self) -> FlashInferKernels:
        """The functions, and what finds their kernels, which is ``compiled`` too."""
        modules = {torch.float32: self.float32, torch.bfloat16: self.bfloat16}
        compiled = self.compiled = CompiledDecodes({
            dtype: {name: what for name, what in names.items() if name != self.hidden}
            for dtype, names in modules.items()
        })  # fmt: skip
        return self.fake.kernels(decode=self.decode, compiled=compiled)

    def decode(self, **arguments: Any) -> None:
        """The function: keeps a kernel, and does what the fake does."""
        q, v, states = arguments["q"], arguments["v"], arguments["initial_state"]
        batch, tokens, heads, width = q.shape
        sizes = (tokens, heads, v.shape[2], width, states.shape[2])
        if not (states.is_contiguous() or self.keeps_padded):
            pass
        elif states.dtype == torch.float32:
            self._keep_float32(q, sizes, states, arguments["scale"])
        else:
            self._keep_bfloat16(sizes, states, arguments, batch)
        self.fake.decode(**arguments)

    def _keep_float32(self, q: Tensor, sizes: tuple[int, ...], states: Tensor, scale: float) -> None:
        kept = self.float32["_get_compiled_decode_kernel"](*sizes, q.dtype, scale, True, True, *states.stride()[1:])
        offsets = torch.zeros(q.shape[0] + 1, dtype=torch.int32)
        aux = kept.setdefault("aux", {})
        aux.setdefault((q.shape[0], q.device), (torch.zeros(q.shape[0], dtype=torch.int32), offsets))

        def kernel(h: Tensor, A_log: Tensor, a: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor,
                   out: Tensor, read: Tensor, write: Tensor, cu: Tensor, stream: int) -> None:  # fmt: skip
            assert stream == 0
            assert cu is kept["aux"][q.shape[0], q.device][1]
            self._run(scale, h, A_log, a, dt_bias, q, k, v, b, out, read, write)

        kept["compiled"] = self.altered(kernel)

    def _keep_bfloat16(self, sizes: tuple[int, ...], states: Tensor, arguments: dict[str, Any], batch: int) -> None:
        read, write, scale = (arguments[n] for n in ("initial_state_indices", "output_state_indices", "scale"))
        same = write is None or write is read
        pool = (-1, (-1,)) if states.is_contiguous() else (states.shape[0], states.stride())
        dtypes = (arguments["A_log"].dtype, arguments["dt_bias"].dtype, read.dtype)
        tile = self.bfloat16["_select_wide_vec_tile_v"](batch, sizes[2])
        wide = tile is not None and tile >= 64

        def kernel(h: Tensor, corner: Tensor, A_log: Tensor, a: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor,
                   v: Tensor, b: Tensor, out: Tensor, read: Tensor, write: Tensor, *more: Any) -> None:  # fmt: skip
            assert corner.shape == (1, 1, 1, h.shape[3])
            assert corner.stride() == h.stride()
            assert len(more) == (1 if wide else 3)
            assert more[-1] == 0
            self._run(scale, h, A_log, a, dt_bias, q, k, v, b, out, read, None if same else write)

        entry = {"compiled": self.altered(kernel), "defaults_by_B": {}}
        if wide:
            key = (
                "v3_mtp_bf16_tiled_dynB", *sizes, *pool, tile, False, False, True, scale, 1.0, 20.0, False, same,
                dtypes,
            )  # fmt: skip
            self.bfloat16["_compiled_kernels_wide_vec"][key] = entry
            return
        key = (
            "mtp_bf16_dynB", *sizes, *pool, 16, 4, False, False, True, scale, 1.0, 20.0, False, same, False, False,
            False, False, dtypes,
        )  # fmt: skip
        kept = self.bfloat16["_compiled_kernels_mtp"].setdefault(key, entry)
        steps, slots = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, 1, dtype=torch.int32)
        kept["defaults_by_B"][batch] = {"accepted_steps": steps, "ssm_state_indices": slots}

    def _run(
        self, scale: float, h: Tensor, A_log: Tensor, a: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor,
        b: Tensor, out: Tensor, read: Tensor, write: Tensor | None,
    ) -> None:  # fmt: skip
        self.launched.append("float32" if h.dtype == torch.float32 else "bfloat16")
        before = len(self.fake.calls)
        self.fake.decode(
            q=q, k=k, v=v, state=None, A_log=A_log, a=a, dt_bias=dt_bias, b=b, scale=scale, output=out,
            use_qk_l2norm=True, initial_state=h, initial_state_indices=read, output_state_indices=write,
        )  # fmt: skip
        del self.fake.calls[before:]  # no call of the function
