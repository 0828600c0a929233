"""Requests in flight on one model: extend them with tokens, decode them one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen35.domain.errors import ValueRangeError
from qwen35.model.model import Model
from qwen35.model.pools import is_list


class Session:
    """Up to ``slots`` requests of up to ``max_length`` tokens each, on ``model``.

    ``open`` begins a request and returns its slot, ``extend`` gives requests any number of tokens (a prompt whole
    or in chunks), ``decode`` one token each, ``close`` ends one. A forward pass that fails after it began leaves
    the slots it named in an undefined state: close them.
    """

    def __init__(self, model: Model, *, slots: int, max_length: int, state_dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.pools = model.pools(slots=slots, max_length=max_length, state_dtype=state_dtype)

    def open(self) -> int:
        """Begin a request; returns its slot. Raises ``ValueRangeError`` where all are taken."""
        return self.pools.open()

    def close(self, slot: int) -> None:
        """End the request in ``slot``."""
        self.pools.close(slot)

    def length(self, slot: int) -> int:
        """Tokens that the request in ``slot`` has been given."""
        return self.pools.length(slot)

    def extend(self, slots: Sequence[int], chunks: Sequence[Sequence[int]], every_token: bool = False) -> Tensor:
        """Give ``chunks[i]`` to the request in ``slots[i]``, all in one packed pass.

        Returns float32 logits after each chunk [S, vocabulary] or, with ``every_token``, after each token
        [T, vocabulary]. Raises ``ValueRangeError`` for an empty chunk, a token id outside the vocabulary, or a
        request that would outgrow ``max_length``, before anything is written.
        """
        if not is_list(chunks):
            raise ValueRangeError(f"chunks must be a list with the token ids for each slot, got {chunks!r}")
        for i, chunk in enumerate(chunks):
            check_token_ids(f"chunks[{i}]", chunk, self.model.config.vocabulary)
        batch = self.pools.extend_batch(slots, [len(chunk) for chunk in chunks])
        tokens = torch.tensor([token for chunk in chunks for token in chunk], dtype=torch.int64)
        return self.model.forward(tokens, batch, self.pools, "all" if every_token else "last")

    def decode(self, slots: Sequence[int], tokens: Sequence[int] | Tensor) -> Tensor:
        """Give one token to each request; returns float32 logits [B, vocabulary].

        ``tokens`` [B] int64 may be a tensor on the model's device. Raises as ``extend`` does, and for a request
        that has no tokens yet.
        """
        batch = self.pools.decode_batch(slots)
        if not isinstance(tokens, Tensor):
            check_token_ids("tokens", tokens, self.model.config.vocabulary)
            tokens = torch.tensor(tokens, dtype=torch.int64)
        return self.model.forward(tokens, batch, self.pools)


def check_token_ids(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raise ``ValueRangeError`` where ``tokens`` is no list, is empty or holds what is no token id."""
    if not is_list(tokens):
        raise ValueRangeError(f"{name} must be a list of token ids, got {tokens!r}")
    if not len(tokens):
        raise ValueRangeError(f"{name} must hold at least one token, got none")
    for i, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueRangeError(f"{name}[{i}] must be a token id in 0..{vocabulary - 1}, got {token!r}")
