"""What a workspace holds beside FlashInfer's own. Made first: peers have FlashInfer's open once it is there, and it
would stay so where this rank then had no memory for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.adapters._kernels.expert_sum import ExpertSum
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import WEIGHT_DTYPES, torch_dtype


class KeptIndices:
    """Indices in which a choice of weight zero is -1, in a buffer that stays where it is.

    FlashInfer's routes disagree about one that is live: some multiply it, and show a NaN in its row.
    """

    def __init__(self, signature: WorkspaceSignature) -> None:
        choices = (signature.max_m, signature.top_k)
        with torch.inference_mode(False):  # or no call outside that mode could write them
            self._indices = torch.empty(choices, dtype=torch.int32, device=signature.device)
            self._unweighted = torch.empty(choices, dtype=torch.bool, device=signature.device)

    def __call__(self, weights: Tensor, indices: Tensor) -> Tensor:
        """Of ``weights`` and ``indices`` [m, top_k]; both stay as they are."""
        m = indices.shape[0]
        kept, unweighted = self._indices[:m], self._unweighted[:m]
        torch.eq(weights, 0, out=unweighted)
        kept.copy_(indices)
        return kept.masked_fill_(unweighted, -1)


class ExpertShare:
    """This rank's share of a finalize by ``expert_sum``, in a buffer that stays where it is."""

    def __init__(self, signature: WorkspaceSignature, expert_sum: ExpertSum) -> None:
        self._signature, self._expert_sum = signature, expert_sum
        with torch.inference_mode(False):  # or no call outside that mode could write it
            self._share = torch.empty(
                signature.max_m, signature.hidden, dtype=torch_dtype(signature.dtype), device=signature.device
            )

    def __call__(self, routed: Tensor, weights: Tensor, indices: Tensor, shared: Tensor | None) -> Tensor:
        """The share [m, D], valid until the next call."""
        share = self._share[: indices.shape[0]]
        self._expert_sum(routed, weights, indices, shared, share)
        return share

    def warm_up(self) -> None:
        """Launch once what calls of each dtype of weights launch, so that none of them compiles anything.

        The signature says whether there is a shared expert; nothing else that calls bring tells kernels apart.
        """
        signature, source = self._signature, torch.zeros_like(self._share[:1])
        dropped = torch.full((1, signature.top_k), -1, dtype=torch.int32, device=source.device)
        for dtype in WEIGHT_DTYPES:
            self(source, torch.zeros_like(dropped, dtype=dtype), dropped, source if signature.shared_expert else None)
