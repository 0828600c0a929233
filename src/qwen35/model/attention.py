"""Full attention: grouped queries, normalised q and k, partial rotary, and an output gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from qwen35.domain.capabilities import Phase
from qwen35.model.batch import Batch
from qwen35.model.config import TextConfig
from qwen35.model.mlp import projection
from qwen35.model.norm import RMSNorm
from qwen35.model.pools import KvPool
from qwen35.model.rotary import rotate


class Attention(nn.Module):
    """Causal attention over a request's own tokens, earlier ones read from the pool.

    A head of q_proj's output holds the query and then the gate; ``sigmoid(gate)`` multiplies the attention's
    output before o_proj.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        hidden, width, bias = config.hidden, config.head_width, config.attention_bias
        self.heads, self.kv_heads, self.width = config.attention_heads, config.kv_heads, width
        self.q_proj = projection(hidden, 2 * self.heads * width, bias)
        self.k_proj = projection(hidden, self.kv_heads * width, bias)
        self.v_proj = projection(hidden, self.kv_heads * width, bias)
        self.o_proj = projection(self.heads * width, hidden, bias)
        self.q_norm = RMSNorm(width, config.eps)
        self.k_norm = RMSNorm(width, config.eps)

    def forward(self, x: Tensor, batch: Batch, pool: KvPool, cosine: Tensor, sine: Tensor) -> Tensor:
        """[T, hidden] for x [T, hidden]. Writes the batch's tokens into ``pool``."""
        q, gate = self.q_proj.forward(x).view(-1, self.heads, 2 * self.width).chunk(2, dim=-1)
        k = self.k_proj.forward(x).view(-1, self.kv_heads, self.width)
        v = self.v_proj.forward(x).view(-1, self.kv_heads, self.width)
        q = rotate(self.q_norm.forward(q), cosine, sine)
        at = (batch.token_slots, batch.positions)
        pool.keys[at] = rotate(self.k_norm.forward(k), cosine, sine)
        pool.values[at] = v
        out = _decode(q, pool, batch) if batch.phase is Phase.DECODE else _extend(q, pool, batch)
        return self.o_proj.forward((out * gate.sigmoid()).flatten(1))


def _extend(q: Tensor, pool: KvPool, batch: Batch) -> Tensor:
    """Each request by itself: its new tokens see everything up to themselves."""
    outputs = []
    requests = zip(torch.split(q, list(batch.lengths)), batch.rows, batch.starts, strict=True)
    for query, row, start in requests:
        end = start + query.shape[0]
        visible = None
        if query.shape[0] > 1:
            visible = _column(start, end, q.device) >= _column(0, end, q.device).T
        outputs.append(_attend(query[None], pool.keys[row, None, :end], pool.values[row, None, :end], visible)[0])
    return torch.cat(outputs)


def _column(start: int, end: int, device: torch.device) -> Tensor:
    """Positions start..end-1 as a column [n, 1]."""
    return torch.arange(start, end, device=device)[:, None]


def _decode(q: Tensor, pool: KvPool, batch: Batch) -> Tensor:
    """All requests at once, padded to the longest."""
    longest = max(batch.starts) + 1
    visible = torch.arange(longest, device=q.device) <= batch.positions[:, None]
    # What lies past a request's end is an earlier holder's and may be NaN, which a mask would let through.
    hidden = ~visible[..., None, None]
    keys = pool.keys[batch.token_slots, :longest].masked_fill_(hidden, 0)
    values = pool.values[batch.token_slots, :longest].masked_fill_(hidden, 0)
    return _attend(q[:, None], keys, values, visible[:, None, None])[:, 0]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """[B, n, heads, width] for q of that shape, k and v [B, m, KV heads, width], and a mask over [n, m]."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible, enable_gqa=True
    )
    return out.transpose(1, 2)
