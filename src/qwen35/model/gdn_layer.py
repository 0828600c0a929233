"""The Gated DeltaNet token mixer, on the two ports."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen35.domain.capabilities import Phase
from qwen35.model.batch import Batch
from qwen35.model.config import TextConfig
from qwen35.model.mlp import projection
from qwen35.model.norm import GatedRMSNorm
from qwen35.model.pools import GdnPool
from qwen35.ports.conv_calls import ConvDecodeCall, ConvExtendCall
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.gdn_calls import DecodeCall, ExtendCall, RawGates
from qwen35.ports.short_convolution import ShortConvolution


class GdnLayer(nn.Module):
    """Projections, short convolution, gated delta rule, gated norm, output projection.

    The convolution and the rule come from the ports; q, k and v stay views of the convolution's output.
    """

    def __init__(self, config: TextConfig, rule: GatedDeltaRule, convolution: ShortConvolution) -> None:
        super().__init__()
        g, hidden = config.gdn, config.hidden
        self.geometry, self.rule, self.convolution = g, rule, convolution
        value = g.value_heads * g.value_width
        self.in_proj_qkv = projection(hidden, g.conv_channels)
        self.in_proj_z = projection(hidden, value)
        self.in_proj_b = projection(hidden, g.value_heads)
        self.in_proj_a = projection(hidden, g.value_heads)
        # Holds the weight under its checkpoint name; the port convolves.
        self.conv1d = nn.Conv1d(
            g.conv_channels, g.conv_channels, config.conv_width, groups=g.conv_channels, bias=False
        ).requires_grad_(False)
        self.A_log = nn.Parameter(torch.empty(g.value_heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(g.value_heads), requires_grad=False)
        self.norm = GatedRMSNorm(g.value_width, config.eps)
        self.out_proj = projection(value, hidden)

    def forward(self, x: Tensor, batch: Batch, pool: GdnPool) -> Tensor:
        """[T, hidden] for x [T, hidden]. Mutates the batch's slots of ``pool``."""
        g = self.geometry
        mixed = self._convolve(self.in_proj_qkv.forward(x), batch, pool)
        key = g.key_heads * g.key_width
        q, k, v = torch.split(mixed, [key, key, g.value_heads * g.value_width], dim=-1)
        gates = RawGates(
            a=self.in_proj_a.forward(x), b=self.in_proj_b.forward(x), A_log=self.A_log, dt_bias=self.dt_bias
        )
        out = self._recur(
            q.view(-1, g.key_heads, g.key_width), k.view(-1, g.key_heads, g.key_width),
            v.view(-1, g.value_heads, g.value_width), gates, batch, pool,
        )  # fmt: skip
        z = self.in_proj_z.forward(x).view_as(out)
        return self.out_proj.forward(self.norm.forward(out, z).flatten(1))

    def _convolve(self, x: Tensor, batch: Batch, pool: GdnPool) -> Tensor:
        weight = self.conv1d.weight.squeeze(1)
        if batch.phase is Phase.DECODE:
            return self.convolution.decode(ConvDecodeCall(x=x, weight=weight, windows=pool.windows, slots=batch.slots))
        return self.convolution.extend(
            ConvExtendCall(
                x=x, weight=weight, windows=pool.windows, slots=batch.slots, cu_seqlens=batch.cu_seqlens,
                seq_lens_host=batch.lengths, fresh=batch.fresh,
            )
        )  # fmt: skip

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, gates: RawGates, batch: Batch, pool: GdnPool) -> Tensor:
        if batch.phase is Phase.DECODE:
            return self.rule.decode(DecodeCall(q=q, k=k, v=v, gates=gates, states=pool.states, slots=batch.slots))
        call = ExtendCall(
            q=q, k=k, v=v, gates=gates, states=pool.states, slots=batch.slots, cu_seqlens=batch.cu_seqlens,
            seq_lens_host=batch.lengths, fresh=batch.fresh,
        )  # fmt: skip
        return self.rule.extend(call).out
