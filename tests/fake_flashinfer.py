"""FlashInfer 0.6.18's GDN functions in plain torch, faults included, so that mends are tested without a GPU.

The faults are those that were measured or read in its sources: see docs/upstream.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qwen35.adapters.flashinfer.release import FlashInferKernels

CHUNK = 64


@dataclass
class FakeFlashInfer:
    """``calls`` keeps every call's arguments. ``later``: as 0.7 behaves where that differs."""

    later: bool = False
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def kernels(self, **changes: Any) -> FlashInferKernels:
        """The functions as the adapter takes them."""
        backend = frozenset({"decode", "prefill"}) if self.later else frozenset()
        taken = {"decode": self.decode, "mtp": self.mtp, "mtp_bf16": self.mtp_bf16, "prefill": self.prefill}
        return FlashInferKernels(**(taken | {"backend": backend} | changes))

    def latest(self, name: str) -> dict[str, Any]:
        """Arguments of the latest call of ``name``."""
        return next(arguments for called, arguments in reversed(self.calls) if called == name)

    def decode(
        self, *, q: Tensor, k: Tensor, v: Tensor, state: None, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
        scale: float, output: Tensor, use_qk_l2norm: bool, initial_state: Tensor, initial_state_indices: Tensor,
        output_state_indices: Tensor | None, backend: str | None = None,
    ) -> None:  # fmt: skip
        """A bfloat16 pool lends slot 0 to padding; a float32 pool lends it to write slot -1 only."""
        self.calls.append(("decode", locals() | {"self": None}))
        assert state is None
        assert A_log.dtype == dt_bias.dtype == torch.float32
        assert initial_state_indices.dtype == torch.int32
        assert output.dtype == a.dtype == b.dtype == torch.bfloat16
        assert (backend is not None) == self.later
        writes = initial_state_indices if output_state_indices is None else output_state_indices
        bf16 = initial_state.dtype == torch.bfloat16
        for i, (read, write) in enumerate(zip(initial_state_indices.tolist(), writes.tolist(), strict=True)):
            if read < 0 and not bf16:
                output[i] = 0
                continue
            start = initial_state[max(read, 0)].float()
            states, o = self._steps(start, q[i], k[i], v[i], A_log, a[i], dt_bias, b[i], scale, use_qk_l2norm, bf16)
            output[i] = o
            initial_state[max(write, 0)] = states[-1]

    def decode_bf16(
        self, *, A_log: Tensor, a: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor,
        initial_state_source: Tensor, initial_state_indices: Tensor, output_state_indices: Tensor | None,
        use_qk_l2norm_in_kernel: bool, scale: float, output: Tensor,
    ) -> None:  # fmt: skip
        """What ``decode`` calls for a bfloat16 pool; counted as a call of that too."""
        self.calls.append(("decode_bf16", {}))
        assert initial_state_source.dtype == torch.bfloat16
        self.decode(
            q=q, k=k, v=v, state=None, A_log=A_log, a=a, dt_bias=dt_bias, b=b, scale=scale, output=output,
            use_qk_l2norm=use_qk_l2norm_in_kernel, initial_state=initial_state_source,
            initial_state_indices=initial_state_indices, output_state_indices=output_state_indices,
            backend="flashinfer" if self.later else None,
        )  # fmt: skip

    def mtp(
        self, *, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor, initial_state_indices: Tensor,
        A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, scale: float, output: Tensor,
        intermediate_states_buffer: Tensor, disable_state_update: bool, use_qk_l2norm: bool,
    ) -> None:  # fmt: skip
        """Skips padded rows and leaves their output as it is; packs rows of the buffer T nodes apart."""
        self.calls.append(("mtp", locals() | {"self": None}))
        assert initial_state.dtype == intermediate_states_buffer.dtype == torch.float32
        assert disable_state_update
        assert intermediate_states_buffer.is_contiguous()
        pool = _whole_pool(initial_state)
        packed = intermediate_states_buffer.view(-1, *initial_state.shape[1:])
        draft = q.shape[1]
        for i, read in enumerate(initial_state_indices.tolist()):
            if read < 0:
                continue
            states, o = self._steps(
                pool[read], q[i], k[i], v[i], A_log, a[i], dt_bias, b[i], scale, use_qk_l2norm, naive=True
            )
            output[i] = o
            packed[i * draft : (i + 1) * draft] = states

    def mtp_bf16(
        self, *, A_log: Tensor, a: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor,
        initial_state_source: Tensor, initial_state_indices: Tensor, intermediate_states_buffer: Tensor,
        disable_state_update: bool, use_qk_l2norm_in_kernel: bool, scale: float, output: Tensor,
    ) -> None:  # fmt: skip
        """Reads slot 0 for padded rows and writes their outputs and nodes like any other's."""
        self.calls.append(("mtp_bf16", locals() | {"self": None}))
        assert initial_state_indices.dtype == torch.int32
        assert intermediate_states_buffer.shape[0] == q.shape[0]
        assert disable_state_update
        for i, read in enumerate(initial_state_indices.tolist()):
            states, o = self._steps(
                initial_state_source[max(read, 0)].float(), q[i], k[i], v[i], A_log, a[i], dt_bias, b[i], scale,
                use_qk_l2norm_in_kernel, naive=True,
            )  # fmt: skip
            output[i] = o
            intermediate_states_buffer[i, : q.shape[1]] = states

    def prefill(
        self, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor,
        output_final_state: bool, cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool, output: Tensor,
        output_state: Tensor, state_checkpoints: Tensor | None, checkpoint_cu_starts: Tensor | None,
        checkpoint_every_n_tokens: int, use_cp: bool, backend: str | None = None,
    ) -> None:  # fmt: skip
        """0.6.18 never normalises. The block that ends a sequence multiplies what follows it by zero."""
        self.calls.append(("prefill", locals() | {"self": None}))
        dense = (q, k, v, g, beta, output, initial_state, output_state, cu_seqlens)
        assert all(t.is_contiguous() for t in dense), "prefill needs dense tensors"
        assert g.dtype == beta.dtype == initial_state.dtype == output_state.dtype == torch.float32
        assert cu_seqlens.dtype == torch.int64
        assert output_final_state
        assert isinstance(use_cp, bool)
        assert not (use_cp and checkpoint_every_n_tokens)
        assert initial_state.data_ptr() != output_state.data_ptr()
        scale = scale if scale != 0.0 else q.shape[-1] ** -0.5
        normalise = use_qk_l2norm_in_kernel and self.later
        for s in range(len(cu_seqlens) - 1):
            start, end = int(cu_seqlens[s]), int(cu_seqlens[s + 1])
            if start == end:
                continue
            state = initial_state[s]
            for t in range(start, end):
                state, output[t] = _step(state, q[t], k[t], v[t], g[t], beta[t], scale, normalise)
                done = t + 1 - start
                if checkpoint_every_n_tokens and done % checkpoint_every_n_tokens == 0:
                    row = int(checkpoint_cu_starts[s]) + done // checkpoint_every_n_tokens - 1
                    state_checkpoints[row] = state
            tail = min(start + -(-(end - start) // CHUNK) * CHUNK, q.shape[0])
            leak = bool(torch.isnan(v[end:tail]).any() | torch.isnan(k[end:tail]).any())
            output_state[s] = float("nan") if leak else state
            if leak:
                output[end - 1] = float("nan")

    def _steps(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
        scale: float, normalise: bool, naive: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """States after and outputs of every token of one row. ``naive``: softplus by a product with 0 or 1."""
        states, outs = [], []
        for t in range(q.shape[0]):
            x = a[t].float() + dt_bias
            softplus = torch.where(x <= 20, torch.log1p(x.clamp(max=20.0).exp()), x)
            if naive and not self.later:
                take = (x <= 20).float()
                softplus = take * torch.log(1 + x.exp()) + (1 - take) * x
            alpha = (-A_log.exp() * softplus).exp()
            state, o = _step(state, q[t], k[t], v[t], alpha, torch.sigmoid(b[t].float()), scale, normalise)
            states.append(state)
            outs.append(o)
        return torch.stack(states), torch.stack(outs)


def _whole_pool(pool: Tensor) -> Tensor:
    """The kernel checks no index against the pool's size: give it everything behind the view."""
    pitch = pool.stride(0)
    size = (pool.untyped_storage().nbytes() // pool.element_size() - pool.storage_offset() - pool[0].numel()) // pitch
    return pool.as_strided((size + 1, *pool.shape[1:]), pool.stride())


def _step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, scale: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    q, k, v = q.float(), k.float(), v.float()
    if normalise:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[0] // q.shape[0], dim=0) for x in (q * scale, k))
    state = state * alpha[:, None, None]
    error = v - torch.einsum("hvk,hk->hv", state, k)
    state = state + beta[:, None, None] * error[:, :, None] * k[:, None, :]
    return state, torch.einsum("hvk,hk->hv", state, q).to(torch.bfloat16)
