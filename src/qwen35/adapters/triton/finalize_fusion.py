"""The fused finalize by our own kernels over memory that peers of one host share, without multicast."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qwen35.adapters.triton.finalize_launch import Cut, Rows, Tuning, launch
from qwen35.adapters.triton.finalize_mailboxes import (
    Mailboxes,
    PeerMemory,
    against_backend,
    chosen_backend,
    local_mailboxes,
    sizes,
    symmetric_mailboxes,
)
from qwen35.adapters.triton.finalize_warm_up import WarmUp
from qwen35.adapters.triton.kernels.finalize_common import BUFFERS
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import ClosedError, RankTimeoutError, UnsupportedError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import DeviceFacts, FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import (
    check_all_reduce,
    check_finalize,
    handoff_tensors,
    signature_support,
    token_support,
)
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.services.devices import capturing, on
from qwen35.services.finalize_agreement import PROCESS_AGREEMENTS, Agreement, Agreements, together

NAME = "triton"

#: Rows of bfloat16 start on 16-byte accesses.
_WIDTH_MULTIPLE = 8

#: Reads of a mailbox a second, roughly (0.5 us each on an H200): turns a time-out into a number of reads.
_READS_A_SECOND = 2_000_000

_MOST_READS = 2**31 - 1

#: How long ``prepare`` waits for a rank that has said that it is ready.
_ROLL_CALL_S = 30.0


class TritonFinalizeFusion:
    """One launch for up to about a thousand tokens; deterministic, alike to the bit on every rank.

    ``checked`` makes an eager call wait for its result and raise ``RankTimeoutError``, naming the ranks, where
    one has not come within ``timeout_s``; otherwise a call waits for as long as it takes.
    """

    def __init__(
        self, facts: DeviceFacts, *, checked: bool = False, timeout_s: float = 30.0, tuning: Tuning | None = None,
        agreements: Agreements = PROCESS_AGREEMENTS, backend_of: Callable[[str], str | None] = chosen_backend,
    ) -> None:  # fmt: skip
        self._backend_of = backend_of
        self._facts, self._tuning, self._agreements = facts, tuning or Tuning(), agreements
        self._spin_limit = _reads(timeout_s) if checked else 0
        self.capabilities = FusionCapabilities(device_types=frozenset({"cuda"}), one_host=True)

    def supports(self, signature: WorkspaceSignature) -> Support:
        reasons = list(signature_support(self.capabilities, signature).reasons)
        if signature.hidden % _WIDTH_MULTIPLE:
            reasons.append(f"hidden requires a multiple of {_WIDTH_MULTIPLE}, got {signature.hidden}")
        if signature.tp_size > 1:
            reasons += self._facts.no_symmetric_memory
            if not reasons:  # asked of a CUDA device only
                reasons += against_backend(self._backend_of(signature.device))
        return Support.of(*reasons)

    def prepare(self, signature: WorkspaceSignature) -> TritonWorkspace:
        support = self.supports(signature)
        if not support:
            raise UnsupportedError(f"{NAME} workspace", support.reasons)
        cut = Cut(signature, self._facts.multiprocessors, self._tuning)
        agreement = self._agreements.of(signature.group, signature.tp_size)
        return make_workspace(cut, agreement, self._spin_limit)

    def close(self) -> None:
        """Holds nothing."""


def make_workspace(
    cut: Cut, agreement: Agreement, spin_limit: int, *, memory: PeerMemory | None = None,
    roll_call_limit: int | None = None,
) -> TritonWorkspace:  # fmt: skip
    """A workspace on every rank of ``agreement``, or on none; all call this together.

    What a rank does alone (memory, compilation) comes first and its outcome is told before anybody waits for a peer;
    then memory is shared, which is agreed on too; then each kind of launch runs once, for at most ``roll_call_limit``
    reads of a mailbox. Raises ``CreationError`` alike on all ranks where one failed, naming it; one that stays away
    from the launches is named by those that waited.
    """
    signature = cut.signature
    of = sizes(signature, cut.tuning.wire, BUFFERS)
    warm_up = WarmUp(cut, of.rows, checked=spin_limit > 0)
    with on(torch.device(signature.device)):
        if signature.tp_size == 1:
            mail = local_mailboxes(signature, of)[0]
            warm_up.alone(mail)
        else:
            mail = symmetric_mailboxes(signature, of, agreement=agreement, memory=memory, alone=warm_up.alone)
        workspace = TritonWorkspace(cut, mail, spin_limit)
        limit = _reads(_ROLL_CALL_S) if roll_call_limit is None else roll_call_limit
        for rows in warm_up.roll_call:
            # One at a time: who went on to the next would be late there itself, waiting for one that is missing here.
            together(agreement, f"{NAME} workspace", partial(workspace.run, rows, limit))
    return workspace


class TritonWorkspace:
    """Mailboxes and the launches that use them."""

    adapter = NAME

    def __init__(self, cut: Cut, mail: Mailboxes, spin_limit: int) -> None:
        self.signature, self._device = cut.signature, torch.device(cut.signature.device)
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
            self.run(Rows(
                source=routed, weights=weights[part], indices=indices[part], gamma=gamma, residual=residual[part],
                shared=None if shared is None else shared[part], norm=out.norm[part], out_residual=out.residual[part],
            ), self._spin_limit)  # fmt: skip
        return out

    def all_reduce(
        self, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        self._check_usable()
        check_all_reduce(self.signature, local, residual, gamma, out)
        out = out or _outputs(residual)
        for part in self._parts(local.shape[0]):
            self.run(Rows(
                source=local[part], residual=residual[part], gamma=gamma, norm=out.norm[part],
                out_residual=out.residual[part],
            ), self._spin_limit)  # fmt: skip
        return out

    def destroy(self) -> None:
        self._mail = None

    def _parts(self, m: int) -> list[slice]:
        count = math.ceil(m / self._rows)
        return [slice(i * self._rows, min((i + 1) * self._rows, m)) for i in range(count)]

    def _check_usable(self) -> None:
        if self._mail is None:
            raise ClosedError("the fusion workspace is destroyed; prepare a new one")

    def run(self, rows: Rows, spin_limit: int) -> None:
        """One launch. Where ``spin_limit`` is positive it waits for the result, and no rank longer than so many reads
        of a mailbox: raises ``RankTimeoutError`` naming those that were late."""
        mail, cut = self._mail, self._cut
        assert mail is not None
        one_shot = cut.one_shot(rows.residual.shape[0])
        with on(self._device):
            # Nobody reads what a replay finds missing, so a captured launch waits like an unchecked one.
            limit = 0 if capturing(self._device) else spin_limit
            launch(cut, mail, rows, cut.signature.rank, one_shot=one_shot, spin_limit=limit)
            if limit:
                self._raise_for_missing(mail)

    def _raise_for_missing(self, mail: Mailboxes) -> None:
        """Wait for the launch; where ranks were late the mailboxes are out of step, so the workspace is done with."""
        late = mail.missing.nonzero()[:, 0].tolist()
        if late:
            self.destroy()
            raise RankTimeoutError("the fused finalize timed out", late)


def _reads(seconds: float) -> int:
    return min(_MOST_READS, max(1, int(seconds * _READS_A_SECOND)))


def _outputs(residual: Tensor) -> NormAndResidual:
    return NormAndResidual(norm=torch.empty_like(residual), residual=torch.empty_like(residual))
