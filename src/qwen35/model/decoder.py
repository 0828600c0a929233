"""One layer: a token mixer, then a dense MLP or a mixture of experts, each behind a residual add and a norm."""

from __future__ import annotations

from torch import Tensor, nn

from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_policy import LayerPlan
from qwen35.model.attention import Attention
from qwen35.model.batch import Batch
from qwen35.model.boundary import Boundaries, Step, Unfinished
from qwen35.model.config import LayerType, TextConfig
from qwen35.model.gdn_layer import GdnLayer
from qwen35.model.mlp import GatedMlp
from qwen35.model.moe import MoeBlock
from qwen35.model.norm import RMSNorm
from qwen35.model.pools import GdnPool, KvPool
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.short_convolution import ShortConvolution


class DecoderLayer(nn.Module):
    """Takes a normed input and the residual, and leaves the block's output unadded: the model adds and norms it
    with the next layer's norm, so that the end of a mixture and that norm stand side by side. ``config`` holds
    the sizes of this rank."""

    def __init__(
        self, config: TextConfig, index: int, rule: GatedDeltaRule, convolution: ShortConvolution,
        boundaries: Boundaries,
    ) -> None:  # fmt: skip
        super().__init__()
        self.boundaries = boundaries
        self.sparse, self.last = config.is_moe(index), index == config.layers - 1
        if config.layer_types[index] is LayerType.GDN:
            self.linear_attn = GdnLayer(config, rule, convolution)
        else:
            self.self_attn = Attention(config)
        self.mlp = _block(config, index)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(
        self, normed: Tensor, residual: Tensor, batch: Batch, pool: GdnPool | KvPool, cosine: Tensor, sine: Tensor,
        step: Step,
    ) -> tuple[Unfinished, Tensor]:  # fmt: skip
        """(block output, residual [T, hidden]). Mutates the batch's slots of ``pool``."""
        if isinstance(pool, GdnPool):
            mixed = self.linear_attn.forward(normed, batch, pool)
        else:
            mixed = self.self_attn.forward(normed, batch, pool, cosine, sine)
        ends = self.boundaries
        normed, residual = ends.add_and_norm(
            ends.after_mixer(mixed, step), residual, self.post_attention_layernorm, step
        )
        plan = step.plan(sparse=self.sparse, last=self.last)
        return ends.after_mlp(self._mlp(normed, plan), plan), residual

    def _mlp(self, x: Tensor, plan: LayerPlan) -> Tensor | FinalizeHandoff:
        if plan.defer and isinstance(self.mlp, MoeBlock):
            return self.mlp.deferred(x)
        return self.mlp.forward(x)


def _block(config: TextConfig, index: int) -> GatedMlp | MoeBlock:
    if config.moe is not None and config.is_moe(index):
        return MoeBlock(config.hidden, config.moe)
    assert config.intermediate is not None
    return GatedMlp(config.hidden, config.intermediate)
