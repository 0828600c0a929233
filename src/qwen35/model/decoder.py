"""One layer: a token mixer, then a dense MLP or a mixture of experts, each behind a residual add and a norm."""

from __future__ import annotations

from torch import Tensor, nn

from qwen35.model.attention import Attention
from qwen35.model.batch import Batch
from qwen35.model.config import LayerType, TextConfig
from qwen35.model.gdn_layer import GdnLayer
from qwen35.model.mlp import GatedMlp
from qwen35.model.moe import MoeBlock
from qwen35.model.norm import RMSNorm, add_and_norm
from qwen35.model.pools import GdnPool, KvPool
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.short_convolution import ShortConvolution


class DecoderLayer(nn.Module):
    """Takes a normed input and the residual, and leaves the block's output unadded: the model adds and norms it
    with the next layer's norm, so that the end of a mixture and that norm stand side by side."""

    def __init__(
        self, config: TextConfig, index: int, rule: GatedDeltaRule, convolution: ShortConvolution
    ) -> None:
        super().__init__()
        if config.layer_types[index] is LayerType.GDN:
            self.linear_attn = GdnLayer(config, rule, convolution)
        else:
            self.self_attn = Attention(config)
        self.mlp = _block(config, index)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(
        self, normed: Tensor, residual: Tensor, batch: Batch, pool: GdnPool | KvPool, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(block output, residual), both [T, hidden]. Mutates the batch's slots of ``pool``."""
        if isinstance(pool, GdnPool):
            mixed = self.linear_attn.forward(normed, batch, pool)
        else:
            mixed = self.self_attn.forward(normed, batch, pool, cosine, sine)
        normed, residual = add_and_norm(mixed, residual, self.post_attention_layernorm)
        return self.mlp.forward(normed), residual


def _block(config: TextConfig, index: int) -> GatedMlp | MoeBlock:
    if config.moe is not None and config.is_moe(index):
        return MoeBlock(config.hidden, config.moe)
    assert config.intermediate is not None
    return GatedMlp(config.hidden, config.intermediate)
