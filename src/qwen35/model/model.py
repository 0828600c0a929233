"""The whole text model: embedding, layers, final norm, output projection."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from qwen35.domain.errors import DtypeError, ShapeError, ValueRangeError
from qwen35.domain.finalize_signature import TokenBounds
from qwen35.model.batch import Batch
from qwen35.model.boundary import Boundaries, Step
from qwen35.model.config import TextConfig
from qwen35.model.decoder import DecoderLayer
from qwen35.model.mlp import projection
from qwen35.model.norm import RMSNorm
from qwen35.model.parallel import TensorParallel
from qwen35.model.pools import Pools
from qwen35.model.rotary import Rotary
from qwen35.model.sharding import shard_config
from qwen35.model.tokenizer import Tokenizer
from qwen35.ports.conv_calls import ConvPlan
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.gdn_calls import GdnPlan
from qwen35.ports.short_convolution import ShortConvolution
from qwen35.services.finalize_fusion import FinalizeService

ALONE = TensorParallel()


class Model(nn.Module):
    """A Qwen3.5 text model on the kernels it is given. ``load_model`` makes one.

    ``config`` says what it is; ``tokenizer`` is None where the checkpoint has none. Parameters carry the
    checkpoint's names without its prefix. With ``tensor_parallel`` ranks each holds its share of the heads, widths
    and vocabulary (``rank_config``), and every rank makes the same calls together; ``finalize`` may then fuse the
    sums over ranks with the norms after them. Raises ``ConfigurationError`` for sizes that do not divide.
    """

    def __init__(
        self, config: TextConfig, *, gated_delta_rule: GatedDeltaRule, short_convolution: ShortConvolution,
        finalize: FinalizeService | None = None, tensor_parallel: TensorParallel = ALONE,
        tokenizer: Tokenizer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.tokenizer, self.tensor_parallel = config, tokenizer, tensor_parallel
        self.rank_config = own = shard_config(config, tensor_parallel.size)
        self.gated_delta_rule, self.short_convolution = gated_delta_rule, short_convolution
        self._boundaries = Boundaries(config, tensor_parallel, finalize)
        # Drawing its initial weights on the meta device would load torch's compiler, whose first load keeps the frames
        # that lead to it, and with them this model, until the garbage collector comes by.
        weight = torch.empty(own.vocabulary, config.hidden)
        self.embed_tokens: nn.Embedding = nn.Embedding.from_pretrained(weight)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(
            DecoderLayer(own, i, gated_delta_rule, short_convolution, self._boundaries) for i in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = None if config.tied else projection(config.hidden, own.vocabulary)
        self.rotary = Rotary(config.rotary_width, config.rope_theta)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self.embed_tokens.weight.dtype

    @property
    def latest_step(self) -> Step | None:
        """What the fusion policy said of the latest forward pass; None before the first."""
        return self._boundaries.latest

    def pools(self, *, slots: int, max_length: int, state_dtype: torch.dtype = torch.float32) -> Pools:
        """Zeroed pools for ``slots`` requests of up to ``max_length`` tokens, on the model's device."""
        return Pools(
            self.rank_config, slots=slots, max_length=max_length, device=self.device, dtype=self.dtype,
            state_dtype=state_dtype,
        )  # fmt: skip

    def prepare(self, *, max_batch: int, max_tokens: int, state_dtype: torch.dtype = torch.float32) -> None:
        """Let the kernels plan for batches of up to these sizes; tensor-parallel ranks call this together.

        The first call decides up to how many tokens a step may end in the fused finalize, whose workspace never grows:
        of a larger step, planned by a later call, the sums over ranks are not fused. Raises ``UnsupportedError`` where
        one cannot, ``WorkspaceError`` where the fused finalize has no workspace.
        """
        self.gated_delta_rule.prepare(
            GdnPlan(
                geometry=self.rank_config.gdn, state_dtype=state_dtype, device=self.device, max_batch=max_batch,
                max_tokens=max_tokens, token_dtype=self.dtype, may_pad=False,
            )
        )  # fmt: skip
        self.short_convolution.prepare(
            ConvPlan(
                channels=self.rank_config.gdn.conv_channels, width=self.config.conv_width, window_dtype=self.dtype,
                device=self.device, max_batch=max_batch, max_tokens=max_tokens, token_dtype=self.dtype,
            )
        )  # fmt: skip
        norms = [norm for layer in self._layers() for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        bounds = TokenBounds(moe_tokens=max_tokens, running_requests=max_batch)
        self._boundaries.prepare([*norms, self.norm], self.dtype, self.device, bounds)

    @torch.no_grad()
    def forward(self, tokens: Tensor, batch: Batch, pools: Pools, logits_of: Literal["last", "all"] = "last") -> Tensor:
        """Logits in float32: [S, vocabulary] after each request's last token, or [T, vocabulary] after every one.

        ``tokens`` [T] int64, packed as ``batch`` says. Mutates ``pools``: the batch's slots hold its tokens
        afterwards. Raises ``ShapeError``, ``DtypeError`` or, for tokens on the host, ``ValueRangeError`` before
        anything is written.
        """
        self._check(tokens, batch)
        tokens = tokens.to(self.device)
        residual = self._embedded(tokens)
        cosine, sine = self.rotary.forward(batch.positions)
        ends, layers = self._boundaries, self._layers()
        step = ends.step(batch)
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        normed = layers[0].input_layernorm.forward(residual)
        for layer, pool, next_norm in zip(layers, pools.layers, norms, strict=True):
            output, residual = layer.forward(normed, residual, batch, pool, cosine, sine, step)
            normed, residual = ends.add_and_norm(output, residual, next_norm, step)
        pools.advance(batch)
        if logits_of == "last":
            normed = normed[batch.ends]
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = self.tensor_parallel.gather(linear(normed, head.weight))
        return logits[:, : self.config.vocabulary].float()

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[T, hidden]; a rank looks up the tokens of its part of the vocabulary, the others' rows are zero there."""
        if not self.tensor_parallel.divided:
            return embedding(tokens, self.embed_tokens.weight)
        own = tokens - self.tensor_parallel.rank * self.rank_config.vocabulary
        elsewhere = (own < 0) | (own >= self.rank_config.vocabulary)
        rows = embedding(own.masked_fill(elsewhere, 0), self.embed_tokens.weight)
        return self.tensor_parallel.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def _check(self, tokens: Tensor, batch: Batch) -> None:
        if tokens.shape != (batch.tokens,):
            raise ShapeError(f"tokens must be [T] = [{batch.tokens}], got {list(tokens.shape)}")
        if tokens.dtype != torch.int64:
            raise DtypeError(f"tokens must be int64, got {tokens.dtype}")
        if tokens.device.type == "cpu":
            outside = (tokens < 0) | (tokens >= self.config.vocabulary)
            if bool(outside.any()):
                at = int(outside.nonzero()[0])
                raise ValueRangeError(f"tokens[{at}] must be in 0..{self.config.vocabulary - 1}, got {int(tokens[at])}")
