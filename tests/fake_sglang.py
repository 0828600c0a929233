"""SGLang 0.5.20's Triton GDN functions in plain torch, faults included, so that mends are tested without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qwen35.adapters.sglang.driven_kernels import SGLangKernels


@dataclass
class FakeSGLang:
    """``calls`` keeps every call's arguments."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _remembered: list[tuple[Tensor, list[tuple[int, int]]]] = field(default_factory=list)

    def kernels(self) -> SGLangKernels:
        """The functions as the adapter takes them."""
        return SGLangKernels(packed_decode=self.packed_decode, recurrent=self.recurrent, chunked=self.chunked)

    def latest(self, name: str) -> dict[str, Any]:
        """Arguments of the latest call of ``name``."""
        return next(arguments for called, arguments in reversed(self.calls) if called == name)

    @torch.no_grad()  # as a kernel: it knows no autograd
    def packed_decode(
        self, *, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
        initial_state: Tensor, out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool,
    ) -> None:  # fmt: skip
        """Skips padding and writes zeros there; rounds beta to the dtype of b."""
        self.calls.append(("packed_decode", locals() | {"self": None}))
        assert out.is_contiguous()
        assert use_qk_l2norm_in_kernel
        value_heads, value_width, width = initial_state.shape[1:]
        keys = (mixed_qkv.shape[1] - value_heads * value_width) // 2
        q, k, v = mixed_qkv.split([keys, keys, value_heads * value_width], dim=1)
        for i, slot in enumerate(ssm_state_indices.tolist()):
            if slot < 0:
                out[i] = 0
                continue
            beta = torch.sigmoid(b[i].float()).to(b.dtype).float()
            state, o = _step(
                initial_state[slot].float(), q[i].view(-1, width), k[i].view(-1, width),
                v[i].view(value_heads, value_width), _decay(a[i], A_log, dt_bias), beta, scale,
            )  # fmt: skip
            initial_state[slot], out[i, 0] = state, o

    @torch.no_grad()  # as a kernel: it knows no autograd
    def recurrent(
        self, *, A_log: Tensor, a: Tensor, dt_bias: Tensor, softplus_beta: float, softplus_threshold: float, q: Tensor,
        k: Tensor, v: Tensor, b: Tensor, initial_state_source: Tensor, initial_state_indices: Tensor, scale: float,
        use_qk_l2norm_in_kernel: bool, cu_seqlens: None, disable_state_update: bool = False,
        intermediate_states_buffer: Tensor | None = None, intermediate_state_indices: Tensor | None = None,
        cache_steps: int | None = None, retrieve_parent_token: None = None,
    ) -> Tensor:  # fmt: skip
        """Computes padded rows from a zero state, writes their intermediates, and no slot."""
        self.calls.append(("recurrent", locals() | {"self": None}))
        assert scale > 0
        assert use_qk_l2norm_in_kernel
        batch, draft = q.shape[:2]
        for x in (q, k, v, a, b):
            assert batch == 1 or x.stride(0) == draft * x.stride(1)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for i, slot in enumerate(initial_state_indices.tolist()):
            state = initial_state_source[max(slot, 0)].float()
            state = torch.zeros_like(state) if slot < 0 else state
            for t in range(draft):
                state, out[i, t] = _step(
                    state, q[i, t], k[i, t], v[i, t], _decay(a[i, t], A_log, dt_bias), torch.sigmoid(b[i, t].float()),
                    scale,
                )  # fmt: skip
                row = -1 if intermediate_state_indices is None else int(intermediate_state_indices[i])
                if intermediate_states_buffer is not None and row >= 0:
                    intermediate_states_buffer[row, t] = state
            if not disable_state_update and slot >= 0:
                initial_state_source[slot] = state
        return out

    @torch.no_grad()  # as a kernel: it knows no autograd
    def chunked(
        self, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor,
        initial_state_indices: Tensor, cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool, inplace_update: bool,
    ) -> tuple[Tensor, None, Tensor]:  # fmt: skip
        """Copies a pool with gaps and loses its update; remembers chunk indices by the identity of cu_seqlens; takes
        the chunks of an empty sequence's successor for its own."""
        self.calls.append(("chunked", locals() | {"self": None}))
        assert inplace_update
        assert not use_qk_l2norm_in_kernel
        pool = initial_state.contiguous()
        known = next((sizes for seen, sizes in self._remembered if seen is cu_seqlens), None)
        if known is None:
            known = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
            self._remembered.append((cu_seqlens, known))
        assert all(start < end for start, end in known), "an empty sequence shifts the chunks of those after it"
        out = torch.empty_like(v)
        for s, (start, end) in enumerate(known):
            slot = int(initial_state_indices[s])
            state = torch.zeros_like(pool[0], dtype=torch.float32) if slot < 0 else pool[slot].float()
            for t in range(start, end):
                state, out[0, t] = _step(
                    state, q[0, t], k[0, t], v[0, t], g[0, t].exp(), beta[0, t], scale, normalise=False
                )
            if slot >= 0:
                pool[slot] = state
        return out, None, pool


def _decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    x = a.float() + dt_bias.float()
    softplus = torch.where(x <= 20, torch.log1p(x.clamp(max=20.0).exp()), x)
    return (-A_log.float().exp() * softplus).exp()


def _step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, scale: float, normalise: bool = True
) -> tuple[Tensor, Tensor]:
    dtype = v.dtype
    q, k, v = q.float(), k.float(), v.float()
    if normalise:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[0] // q.shape[0], dim=0) for x in (q * scale, k))
    state = state * alpha[:, None, None]
    error = v - torch.einsum("hvk,hk->hv", state, k)
    state = state + beta[:, None, None] * error[:, :, None] * k[:, None, :]
    return state, torch.einsum("hvk,hk->hv", state, q).to(dtype)
