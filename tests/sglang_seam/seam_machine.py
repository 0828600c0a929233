"""A GDN backend of the installed SGLang on the CPU.

Its own classes, with its convolution and gating kernels, which need a GPU, in plain torch. Sizes differ in every
dimension, so that a transposed one cannot pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seams import installed_release, release_seam
from qwen35.adapters.sglang.seams.release import Place, Release
from qwen35.container import Container
from qwen35.settings import load_settings

H, HV, K, V, WIDTH = 2, 4, 8, 6, 4
KEYS, VALUES = H * K, HV * V
CHANNELS = 2 * KEYS + VALUES
PLACE = Place(gpu=0, tensor_rank=0)


def installed_seam() -> Release:
    return release_seam(installed_release() or "")


def start(container: Container | None = None, **settings: Any) -> sglang_plugin.Running:
    """The plugin in this process, as a scheduler would start it, on the CPU."""
    known = load_settings(None, device="cpu", **settings)
    return sglang_plugin.start(known, installed_seam(), PLACE, container or sglang_plugin.make_container(known, PLACE))


def plain_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """What SGLang's gating kernel computes: log decay, and beta rounded to b's dtype."""
    g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return g[None], torch.sigmoid(b.float()).to(b.dtype).float()[None]


def plain_convolution(x: Tensor, *_: Any, **links: Any) -> Tensor:
    """No convolution at all; of SGLang's, only the parents that it derives from a draft tree's links."""
    parents = links.get("retrieve_parent_token")
    if parents is not None:
        parents.fill_(12345)
        for row in range(parents.shape[0]):
            for node in range(parents.shape[1]):
                child = int(links["retrieve_next_token"][row, node])
                while child >= 0:
                    parents[row, child] = node
                    child = int(links["retrieve_next_sibling"][row, child])
    return x


class Machine:
    """One layer's pool (layer 1 of 2), its RadixLinearAttention and a GDNAttnBackend over them.

    ``strided`` makes a page-major pool: a slot's layers lie together, so a layer's slots are apart. ``pool``: SGLang's
    own pools of these sizes, instead of ones made here.
    """

    def __init__(self, *, slots: int = 8, draft: int = 0, strided: bool = False, dtype: torch.dtype = torch.float32,
                 family: str = "qwen3_5_moe_text", pool: Any = None) -> None:  # fmt: skip
        from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
        from sglang.srt.layers.attention.linear.utils import LinearAttnBackends, LinearAttnKernelBackend
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

        pool = pools(slots, draft, strided) if pool is None else pool
        self.cache, self.draft, self.dtype = pool.mamba_pool.mamba_cache, draft, dtype
        triton = LinearAttnKernelBackend.TRITON
        runner = SimpleNamespace(
            server_args=SimpleNamespace(enable_mis=False), device="cpu", is_draft_worker=False, req_to_token_pool=pool,
            token_to_kv_pool=None, dtype=dtype,
            linear_attn_backends=LinearAttnBackends(decode=triton, prefill=triton, verify=triton),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type=family)),
        )  # fmt: skip
        self.backend = GDNAttnBackend(runner)
        self.A_log, self.dt_bias = torch.randn(HV), torch.randn(HV)
        self.layer = RadixLinearAttention(
            layer_id=1, num_q_heads=H, num_k_heads=H, num_v_heads=HV, head_q_dim=K, head_k_dim=K, head_v_dim=V,
            conv_weights=torch.zeros(CHANNELS, WIDTH), A_log=self.A_log, dt_bias=self.dt_bias,
        )  # fmt: skip

    @property
    def states(self) -> Tensor:
        """The layer's pool [N, HV, V, K]."""
        return self.cache.temporal[1]

    @property
    def intermediates(self) -> Tensor:
        """The layer's intermediate states [N + 1, draft, HV, V, K]."""
        return self.cache.intermediate_ssm[1]

    @property
    def dispatcher(self) -> Any:
        return self.backend.kernel_dispatcher

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """mixed_qkv [count, CHANNELS], a and b [count, HV]."""
        packed, a, b = (torch.randn(count, n).to(self.dtype) for n in (CHANNELS, HV, HV))
        return packed, a, b

    def metadata(self, slots: list[int], offsets: list[int], **more: Any) -> Any:
        """SGLang's ForwardMetadata for these sequences, given to the backend."""
        from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata

        metadata = ForwardMetadata(
            query_start_loc=torch.tensor(offsets, dtype=torch.int32),
            mamba_cache_indices=torch.tensor(slots, dtype=torch.int32), **more,
        )  # fmt: skip
        metadata.conv_block_table = None  # 0.5.23 sets it with the metadata of a batch
        self.backend.forward_metadata = metadata
        return metadata

    def batch(self, mode: str, lengths: list[int], *, padding: int = 0) -> Any:
        """What the backend reads of a ForwardBatch; ``padding`` physical rows follow the real ones."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        total, zeros = sum(lengths), torch.zeros(len(lengths), dtype=torch.int32)
        return SimpleNamespace(
            forward_mode=ForwardMode[mode], batch_size=len(lengths), mamba_track_mask=None, extend_seq_lens_cpu=lengths,
            extend_prefix_lens=zeros, req_pool_indices=torch.arange(len(lengths)),
            out_cache_loc=torch.arange(total + padding),
            global_num_token_non_padded_cpu=total if padding else None,
            spec_info=SimpleNamespace(draft_token_num=lengths[0], ragged_verify_layout=None),
        )  # fmt: skip


def pools(slots: int, draft: int, strided: bool) -> Any:
    """What the backend reads of a request pool, over MambaPool's caches of random states."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = (slots, 2, HV, V, K) if strided else (2, slots, HV, V, K)
    temporal = torch.randn(shape)
    temporal = temporal.transpose(0, 1) if strided else temporal
    conv = [torch.zeros(2, slots, CHANNELS, WIDTH - 1)]
    if draft:
        cache: Any = MambaPool.SpeculativeState(
            conv=conv, temporal=temporal, intermediate_ssm=torch.full((2, slots + 1, draft, HV, V, K), torch.nan),
            intermediate_conv_window=[torch.zeros(2, slots + 1, draft, CHANNELS, WIDTH - 1)],
        )  # fmt: skip
    else:
        cache = MambaPool.State(conv=conv, temporal=temporal)
    return SimpleNamespace(
        size=slots, mamba_pool=SimpleNamespace(mamba_cache=cache, size=slots), mamba2_layer_cache=cache.at_layer_idx,
        mamba_map={1: 1},
    )  # fmt: skip


def split(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [..., H, K] and v [..., HV, V] of a packed projection, copied."""
    q, k, v = (x.clone() for x in packed.split([KEYS, KEYS, VALUES], dim=-1))
    lead = packed.shape[:-1]
    return q.view(*lead, H, K), k.view(*lead, H, K), v.view(*lead, HV, V)


def close(got: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    """Relative Frobenius error in float64 under ``bound``; a NaN fails."""
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error <= bound, f"relative error {error:.3g} over {bound:.3g}"


@contextmanager
def plugin_off_again() -> Iterator[None]:
    """Whatever the body installs is off afterwards."""
    try:
        yield
    finally:
        sglang_plugin.uninstall()
        assert seam.installed() == ()
