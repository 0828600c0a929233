"""The fused finalize by our own kernels over memory that peers of one host share, without multicast."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qwen35.adapters.triton.finalize_launch import Cut, Rows, Tuning, launch
from qwen35.adapters.triton.finalize_mailboxes import Mailboxes, local_mailboxes, sizes, symmetric_mailboxes
from qwen35.adapters.triton.kernels.finalize_common import BUFFERS
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import ClosedError, RankTimeoutError, UnsupportedError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import DeviceFacts, FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import (
    WEIGHT_DTYPES,
    check_all_reduce,
    check_finalize,
    handoff_tensors,
    signature_support,
    token_support,
    torch_dtype,
)
from qwen35.ports.finalize_fusion import NormAndResidual

NAME = "triton"

#: Rows of bfloat16 start on 16-byte accesses.
_WIDTH_MULTIPLE = 8

#: Reads of a mailbox a second, roughly (0.5 us each on an H200): turns a time-out into a number of reads.
_READS_A_SECOND = 2_000_000

_MOST_READS = 2**31 - 1


class TritonFinalizeFusion:
    """One launch for up to about a thousand tokens; deterministic, alike to the bit on every rank.

    ``checked`` makes an eager call wait for its result and raise ``RankTimeoutError``, naming the ranks, where
    one has not come within ``timeout_s``; otherwise a call waits for as long as it takes.
    """

    def __init__(
        self, facts: DeviceFacts, *, checked: bool = False, timeout_s: float = 30.0, tuning: Tuning | None = None
    ) -> None:
        self._facts, self._tuning = facts, tuning or Tuning()
        self._spin_limit = min(_MOST_READS, max(1, int(timeout_s * _READS_A_SECOND))) if checked else 0
        self.capabilities = FusionCapabilities(device_types=frozenset({"cuda"}), one_host=True)

    def supports(self, signature: WorkspaceSignature) -> Support:
        reasons = list(signature_support(self.capabilities, signature).reasons)
        if signature.hidden % _WIDTH_MULTIPLE:
            reasons.append(f"hidden requires a multiple of {_WIDTH_MULTIPLE}, got {signature.hidden}")
        if signature.tp_size > 1:
            reasons += self._facts.no_symmetric_memory
        return Support.of(*reasons)

    def prepare(self, signature: WorkspaceSignature) -> TritonWorkspace:
        support = self.supports(signature)
        if not support:
            raise UnsupportedError(f"{NAME} workspace", support.reasons)
        cut = Cut(signature, self._facts.multiprocessors, self._tuning)
        of = sizes(signature, self._tuning.wire, BUFFERS)
        with torch.cuda.device(signature.device):
            mail = local_mailboxes(signature, of)[0] if signature.tp_size == 1 else symmetric_mailboxes(signature, of)
            workspace = TritonWorkspace(cut, mail, self._spin_limit)
            workspace.warm_up()
        return workspace

    def close(self) -> None:
        """Holds nothing."""


class TritonWorkspace:
    """Mailboxes and the launches that use them."""

    adapter = NAME

    def __init__(self, cut: Cut, mail: Mailboxes, spin_limit: int) -> None:
        self.signature = cut.signature
        self._cut, self._spin_limit = cut, spin_limit
        self._mail: Mailboxes | None = mail
        self._rows = mail.rows
        self.addresses = tuple(t.data_ptr() for t in (*mail.peers, *mail.outboxes, mail.epochs))

    def supports(self, m: int) -> Support:
        return token_support(self.signature, m, self._mail is None)

    def finalize(
        self, handoff: FinalizeHandoff, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        self._check_usable()
        check_finalize(self.signature, handoff, residual, gamma, out)
        routed, weights, indices, shared = handoff_tensors(handoff)
        out = out or _outputs(residual)
        for part in self._parts(handoff.m):
            self._launch(Rows(
                source=routed, weights=weights[part], indices=indices[part], gamma=gamma, residual=residual[part],
                shared=None if shared is None else shared[part], norm=out.norm[part], out_residual=out.residual[part],
            ))  # fmt: skip
        return out

    def all_reduce(
        self, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        self._check_usable()
        check_all_reduce(self.signature, local, residual, gamma, out)
        out = out or _outputs(residual)
        for part in self._parts(local.shape[0]):
            self._launch(Rows(
                source=local[part], residual=residual[part], gamma=gamma, norm=out.norm[part],
                out_residual=out.residual[part],
            ))  # fmt: skip
        return out

    def destroy(self) -> None:
        self._mail = None

    def warm_up(self) -> None:
        """Compile and run every kernel that calls of 1..max_m can reach, on all ranks alike.

        Ranks compile at their own pace, so the time-out counts from the first call after this.
        """
        checked = self._spin_limit
        for spin_limit in (0, _MOST_READS) if checked else (0,):
            self._spin_limit = spin_limit
            self._run_every_kernel()
        torch.cuda.synchronize(self.signature.device)
        self._spin_limit = checked

    def _run_every_kernel(self) -> None:
        signature = self.signature
        gamma = torch.ones(signature.hidden, dtype=torch_dtype(signature.dtype), device=signature.device)
        for m in self._telling_sizes():
            zeros = gamma.new_zeros(m, signature.hidden)
            dropped = torch.full((m, signature.top_k), -1, dtype=torch.int32, device=signature.device)
            for dtype in WEIGHT_DTYPES:
                handoff = FinalizeHandoff(
                    routed_output=zeros, expert_weights=torch.zeros_like(dropped, dtype=dtype), m=m,
                    permuted_indices=dropped, gated_shared_output=zeros if signature.shared_expert else None,
                )  # fmt: skip
                self.finalize(handoff, zeros, gamma)
            self.all_reduce(zeros, zeros, gamma)

    def _telling_sizes(self) -> list[int]:
        """One m for each kernel: the largest launch of each number of splits, and of each kind."""
        by_kernel: dict[tuple[bool, int], int] = {}
        for m in range(1, self._rows + 1):
            one_shot = self._cut.tuning.one_shot(m, self.signature.tp_size)
            by_kernel[one_shot, self._cut.splits(m) if one_shot else 1] = m
        return sorted(by_kernel.values())

    def _parts(self, m: int) -> list[slice]:
        count = math.ceil(m / self._rows)
        return [slice(i * self._rows, min((i + 1) * self._rows, m)) for i in range(count)]

    def _check_usable(self) -> None:
        if self._mail is None:
            raise ClosedError("the fusion workspace is destroyed; prepare a new one")

    def _launch(self, rows: Rows) -> None:
        mail, signature = self._mail, self.signature
        assert mail is not None
        m = rows.residual.shape[0]
        one_shot = self._cut.tuning.one_shot(m, signature.tp_size)
        with torch.cuda.device(signature.device):
            # Nobody reads what a replay finds missing, so a captured launch waits like an unchecked one.
            spin_limit = 0 if torch.cuda.is_current_stream_capturing() else self._spin_limit
            launch(self._cut, mail, rows, signature.rank, one_shot=one_shot, spin_limit=spin_limit)
            if spin_limit:
                self._raise_for_missing(mail)

    def _raise_for_missing(self, mail: Mailboxes) -> None:
        """Wait for the launch; where ranks were late the mailboxes are out of step, so the workspace is done with."""
        late = mail.missing.nonzero()[:, 0].tolist()
        if late:
            self.destroy()
            raise RankTimeoutError("the fused finalize timed out", late)


def _outputs(residual: Tensor) -> NormAndResidual:
    return NormAndResidual(norm=torch.empty_like(residual), residual=torch.empty_like(residual))
