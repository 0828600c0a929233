"""The service of the fused finalize: one prepared workspace, two calls, and the layer boundary that uses them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import (
    AgreementError,
    ClosedError,
    ConfigurationError,
    ContractError,
    CreationError,
    HandoffError,
    NotPreparedError,
    Qwen35Error,
    UnavailableError,
    UnsupportedError,
)
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import DeviceFacts, FusionCapabilities
from qwen35.domain.finalize_policy import Decision
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import check_addition, check_all_reduce, check_finalize
from qwen35.ports.finalize_fusion import FinalizeFusion, FusionWorkspace, NormAndResidual
from qwen35.services.counters import Counters
from qwen35.services.devices import capturing
from qwen35.services.finalize_agreement import PROCESS_AGREEMENTS, Agreement, Agreements, together
from qwen35.services.finalize_choice import PORT, FusionChoice, choose_fusion
from qwen35.services.finalize_facts import device_facts
from qwen35.services.finalize_registry import NOT_CREATED, WorkspaceRegistry, usable
from qwen35.services.registry import AdapterRegistry

#: The setting that switches fusion off: ``prepare`` then makes nothing and no layer is eligible.
OFF = "off"

_MULTIPLEXED = (
    "the fused finalize cannot be used with multiplexed prefill and decode streams: they would share one mutable "
    "workspace; set finalize = 'off' or do not multiplex"
)


def gemma_gamma(checkpoint_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Gamma of a Gemma-style norm, for ``weight_bias`` 0: the checkpoint's weight plus one, added in float32."""
    return (checkpoint_weight.float() + 1.0).to(dtype)


class FinalizeService:
    """Serves every layer of a model. Nothing works before ``prepare``.

    One workspace cannot take two calls at once: they are serialised, those of other services of this process too.
    """

    def __init__(
        self, adapters: AdapterRegistry, requested: str, workspaces: WorkspaceRegistry, counters: Counters,
        checked: bool = False, agreements: Agreements = PROCESS_AGREEMENTS,
        facts: Callable[[str], DeviceFacts] = device_facts,
    ) -> None:  # fmt: skip
        if requested != OFF and requested != "auto":
            adapters.entry(PORT, requested)  # an unknown name fails when the container is built
        self._adapters, self._requested, self._workspaces = adapters, requested, workspaces
        self._counters, self._checked = counters, checked
        self._agreements, self._facts = agreements, facts
        self._workspace: FusionWorkspace | None = None
        self._agreement: Agreement | None = None
        self.choice: FusionChoice | None = None

    @property
    def enabled(self) -> bool:
        """Whether the settings ask for fusion at all."""
        return self._requested != OFF

    @property
    def is_prepared(self) -> bool:
        return self._workspace is not None

    @property
    def max_m(self) -> int:
        """The most tokens of a call: the workspace's, which may be more than was asked, or fewer where its adapter
        serves no more; 0 before ``prepare``."""
        return 0 if self._workspace is None else self._workspace.signature.max_m

    @property
    def standing_max_m(self) -> int | None:
        """The most tokens of the workspace that lives in this process already, whoever prepared it; None: none does."""
        live = self._workspaces.live
        return None if live is None else live.signature.max_m

    @property
    def workspace(self) -> FusionWorkspace:
        """The prepared workspace; raises ``NotPreparedError``."""
        if self._workspace is None:
            raise NotPreparedError("m is not supported: the fusion service has no workspace; call prepare first")
        return self._workspace

    def prepare(self, signature: WorkspaceSignature, *, multiplexed_streams: bool = False) -> None:
        """Have a workspace that covers ``signature``. Every rank of its group calls this together.

        Where the adapter serves fewer tokens than asked for (``FusionCapabilities.most_tokens``) the workspace is made
        for those: ``max_m`` says for how many. A second call that the first one covers does nothing. Where fusion is
        off no workspace is made, but the other ranks are told. Raises ``ConfigurationError`` where prefill and decode
        run on multiplexed streams, which the other ranks learn too, and what ``WorkspaceRegistry.obtain`` raises;
        ``AgreementError`` where it is off on some ranks only.
        """
        agreement = self._agreements.of(signature.group, signature.tp_size)
        if not self.enabled:
            self._workspaces.decline(signature, agreement, OFF)
            return
        against = ConfigurationError(_MULTIPLEXED) if multiplexed_streams else None

        def create(asked: WorkspaceSignature) -> FusionWorkspace:
            facts = together(agreement, NOT_CREATED, partial(self._facts, asked.device))
            self.choice = chosen = self._choose(asked, facts, agreement)
            adapter: FinalizeFusion = self._adapters.adapter(PORT, chosen.name)
            return adapter.prepare(adapter.capabilities.within(asked))

        self._workspace = self._workspaces.obtain(
            signature, agreement, create, self._requested, against, self._checked, holder=self
        )
        self._agreement = agreement

    def _choose(self, asked: WorkspaceSignature, facts: DeviceFacts, agreement: Agreement) -> FusionChoice:
        """The ranks' choice. Raises ``CreationError`` where there is none: all of them know why, by rank, already."""
        try:
            return choose_fusion(self._adapters, self._requested, asked, facts, agreement)
        except UnavailableError as exc:
            raise CreationError(NOT_CREATED, exc.reasons) from exc

    def supports(self, m: int) -> Support:
        """Whether a call of ``m`` tokens would be served. False before ``prepare``, never an error."""
        if self._workspace is None:
            return Support.of("fusion requires a prepared workspace")
        return self._workspace.supports(m)

    def finalize(
        self, handoff: FinalizeHandoff, residual: Tensor, gamma: Tensor, *,
        post_residual_addition: Tensor | None = None, out: NormAndResidual | None = None,
    ) -> NormAndResidual:  # fmt: skip
        """Finalize, sum over ranks, add the residual, norm. See ``FusionWorkspace.finalize``.

        ``post_residual_addition`` [m, D], of the residual's dtype and device, is added to it first, so both results
        see it.
        """

        def check() -> tuple[str, ...]:
            workspace = self.workspace
            _check_handoff(handoff)
            check_finalize(workspace.signature, handoff, residual, gamma, out, values=True)
            check_addition(workspace.signature, handoff.m, post_residual_addition)
            can: FusionCapabilities = self._adapters.adapter(PORT, workspace.adapter).capabilities
            return (*workspace.supports(handoff.m).reasons, *can.against(handoff))

        self._agree_on_call("finalize", _tokens_of(handoff), check)
        workspace = self.workspace
        _check_handoff(handoff)
        if post_residual_addition is not None:
            # What is added to is checked before it is: the workspace sees the sum only.
            check_finalize(workspace.signature, handoff, residual, gamma, out)
            check_addition(workspace.signature, handoff.m, post_residual_addition)
        total = residual if post_residual_addition is None else residual + post_residual_addition
        return self._serve("finalize", lambda: workspace.finalize(handoff, total, gamma, out))

    def all_reduce(
        self, local: Tensor, residual: Tensor, gamma: Tensor, *, out: NormAndResidual | None = None,
        against: tuple[str, ...] = (),
    ) -> NormAndResidual:  # fmt: skip
        """Sum over ranks, add the residual, norm. See ``FusionWorkspace.all_reduce``.

        ``against`` is what the caller has against fusing this call: reasons for an ``UnsupportedError``, in checked
        mode on every rank where one has any. There an error that all ranks see is each one's own, so that all may go
        on another way; of one that some ranks see, the cause is the ``AgreementError`` that the other ranks raise.
        """

        def check() -> tuple[str, ...]:
            workspace = self.workspace
            check_all_reduce(workspace.signature, local, residual, gamma, out)
            return (*against, *workspace.supports(len(local)).reasons)

        self._agree_on_call("all-reduce", len(local) if isinstance(local, Tensor) and local.dim() else 0, check)
        workspace = self.workspace
        if against:
            raise UnsupportedError("fused all-reduce", against)
        return self._serve("all-reduce", lambda: workspace.all_reduce(local, residual, gamma, out))

    def consume(
        self, handoff: FinalizeHandoff, residual: Tensor | None, gamma: Tensor | None, decision: Decision, *,
        post_residual_addition: Tensor | None = None,
    ) -> NormAndResidual:  # fmt: skip
        """The norm that meets a handoff, a layer's input norm or the final one.

        Raises ``HandoffError`` where it is none, ``decision`` is against it, or the residual or the Gemma-style gamma
        is missing: a handoff has no other way on.
        """
        refusal = _refusal(handoff, decision, residual, gamma)
        if refusal is None:
            assert residual is not None
            assert gamma is not None
            return self.finalize(handoff, residual, gamma, post_residual_addition=post_residual_addition)
        self._agree_on_call("finalize", _tokens_of(handoff), partial(_raise, refusal))
        raise refusal

    def close(self) -> None:
        """Let go of the workspace, which ends with its last service; a later call raises ``NotPreparedError``.
        Idempotent."""
        self._workspaces.leave(self)
        self._workspace = None  # in checked mode the others hear of a later call

    def _agree_on_call(self, call: str, m: int, check: Callable[[], tuple[str, ...]]) -> None:
        """In checked mode, before anything is launched: an error that one rank sees becomes one on all.

        ``check`` raises where the call breaks the contract, and returns what the adapter has against a legal one: with
        that every rank refuses alike (``UnsupportedError``), so that all may take the same other way. An own error
        that not every rank has, or not in the same call, is raised with an ``AgreementError`` as its cause. Whatever
        it raises the others hear.
        """
        if not self._checked or self._agreement is None or capturing():
            return
        error: Exception | None = None
        refused: tuple[str, ...] = ()
        try:
            if self._workspace is not None and not usable(self._workspace):
                raise ClosedError("the fusion workspace is destroyed; prepare a new one")
            refused = check()
        except Exception as exc:  # noqa: BLE001 - arguments may be anything; unheard, it leaves the others waiting
            error = exc
        said: list[_Said] = self._agreement.exchange(_Said(call, m, _kind(error), _text(error), refused))
        reasons = [f"rank {rank}: {one.error}" for rank, one in enumerate(said) if one.kind is not None]
        if len({(one.call, one.m) for one in said}) > 1:
            reasons += [f"rank {rank} calls {one.call} with m = {one.m}" for rank, one in enumerate(said)]
        if error is not None and len({(one.call, one.m, one.kind) for one in said}) == 1:
            raise error
        if reasons:
            disagreement = AgreementError(f"{call} was not launched", reasons)
            if error is not None:
                raise error from disagreement
            raise disagreement
        against = [f"rank {rank}: {reason}" for rank, one in enumerate(said) for reason in one.refused]
        if against:
            raise UnsupportedError(f"{self.workspace.adapter} {call}", against)

    def _serve(self, call: str, launch: Callable[[], NormAndResidual]) -> NormAndResidual:
        mode = "captured" if capturing() else "eager"
        with self._workspaces.order.turn(self.workspace.signature.device):
            result = launch()
        self._counters.add("calls", port=PORT, phase=call, adapter=self.workspace.adapter, mode=mode)
        return result


class _Said(NamedTuple):
    """What a rank tells the others of a call before it is launched."""

    call: str
    m: int
    kind: str | None
    error: str
    refused: tuple[str, ...]


def _kind(error: Exception | None) -> str | None:
    """The same for errors of which a caller makes the same."""
    if error is None:
        return None
    return ContractError.__name__ if isinstance(error, ContractError) else type(error).__name__


def _text(error: Exception | None) -> str:
    """What the others hear: of an error that is not ours its type too, without which its text may say nothing."""
    if error is None:
        return ""
    return str(error) if isinstance(error, Qwen35Error) else f"{type(error).__name__}: {error}"


def _tokens_of(handoff: object) -> int:
    """``m`` for the other ranks, 0 where there is none: only a plain number is sent."""
    m: object = handoff.m if isinstance(handoff, FinalizeHandoff) else 0
    return m if type(m) is int else 0


def _check_handoff(handoff: object) -> None:
    if not isinstance(handoff, FinalizeHandoff):
        raise _no_handoff(handoff)


def _no_handoff(came: object) -> HandoffError:
    return HandoffError(f"finalize requires a FinalizeHandoff, got {type(came).__name__}")


def _refusal(handoff: object, decision: object, residual: object, gamma: object) -> HandoffError | None:
    """Why a handoff cannot be consumed, if so."""
    if not isinstance(handoff, FinalizeHandoff):
        return _no_handoff(handoff)
    if not isinstance(decision, Decision):
        return HandoffError(f"a finalize handoff requires a Decision, got {type(decision).__name__}")
    if not decision.eligible:
        return HandoffError(f"a finalize handoff came on an ineligible path: {'; '.join(decision.reasons)}")
    if residual is None:
        return HandoffError("a finalize handoff requires a residual, got None")
    if gamma is None:
        return HandoffError("a finalize handoff requires a norm with a Gemma-style weight, got none")
    return None


def _raise(error: HandoffError) -> NoReturn:
    raise error
