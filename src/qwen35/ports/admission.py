"""Checks a call once for each layout: the second call of the same shapes, strides and dtypes costs a look-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import ContractError, UnsupportedError
from qwen35.ports._layout import LayoutCheck, layout_check
from qwen35.ports.conv_calls import ConvCommitCall, ConvDecodeCall, ConvExtendCall, ConvVerifyCall
from qwen35.ports.conv_checks import (
    check_conv_commit,
    check_conv_decode,
    check_conv_extend,
    check_conv_verify,
)
from qwen35.ports.gdn_calls import CheckpointPlan, CommitCall, DecodeCall, ExtendCall, LogGates, VerifyCall
from qwen35.ports.gdn_checks import check_commit, check_decode, check_extend, check_verify
from qwen35.ports.support import phase_of

#: The check of each kind of call; with ``values=True`` it also reads what lies on the device.
CHECKS: Mapping[type, Callable[..., None]] = {
    DecodeCall: check_decode, ExtendCall: check_extend, VerifyCall: check_verify, CommitCall: check_commit,
    ConvDecodeCall: check_conv_decode, ConvExtendCall: check_conv_extend, ConvVerifyCall: check_conv_verify,
    ConvCommitCall: check_conv_commit,
}  # fmt: skip


def check_call(call: object, values: bool = False) -> None:
    """The check of whichever kind of call this is. Raises ``ContractError``, for what is no call at all too."""
    phase_of(call)
    CHECKS[type(call)](call, values=values)


#: Layouts kept before the cache starts anew; engines use a few hundred batch sizes.
MAX_LAYOUTS = 4096


@runtime_checkable
class DecodesKnown(Protocol):
    """What an adapter may offer besides its port: a short way for the decode that comes again and again."""

    def decode_known(self, call: DecodeCall) -> Tensor | None:
        """``decode`` where a call of this very layout was admitted before and every address and row is as aligned as
        ``capabilities.byte_alignment`` asks; else None, nothing written.

        Raises ``CaptureError`` and ``UnsupportedError`` where ``decode`` would."""


class Admission:
    """What an adapter runs first in every call: the contract's check, then its own ``supports``.

    Raises ``ContractError`` or ``UnsupportedError`` before anything is written. On a device, a decode, verify or commit
    whose layout was admitted before is admitted by a look-up. Extends seldom come again, but a model's layers make the
    same one in turn: it is admitted where it looks like the one before, lengths on the host and checkpoints too. Calls
    whose index values the host can see (CPU tensors) are checked each time. ``supports`` may depend on nothing but
    layouts, dtypes, devices, ``scale`` and a checkpoint plan's numbers. ``cover`` then makes sure that a plan covers
    the call, or raises; plans may only widen. ``settle`` makes what calls of one layout share, which each of them gets
    back.
    """

    def __init__(
        self, what: str, supports: Callable[[Any], Support], cover: Callable[[Any], None] = lambda _: None,
        settle: Callable[[Any], Any] = lambda _: None,
    ) -> None:  # fmt: skip
        self._what, self._supports, self._cover, self._settle = what, supports, cover, settle
        self._known: dict[tuple[object, ...], _Known] = {}
        self._latest: dict[type, _Known] = {}

    def __call__(self, call: Any, kind: type) -> Any:
        """Admit ``call``, which must be of the ``kind`` that the method takes, or raise."""
        if type(call) is not kind:
            raise ContractError(f"a call for {self._what} requires a {kind.__name__}, got {type(call).__name__}")
        latest = self._latest.get(kind)
        if latest is not None and latest.recall(call):
            return latest.settled
        try:
            seen = kind in _NAMES and not _pool(call).is_cpu
            layout = _layout(call) if seen and kind in _TENSORS else None
            known = None if layout is None else self._known.get(layout)
        except (AttributeError, TypeError):  # something is no tensor, or no number: the check names it
            CHECKS[kind](call)
            raise
        if known is not None:
            known.compare_with(call)
            self._latest[kind] = known
            return known.settled
        CHECKS[kind](call)
        support = self._supports(call)
        if not support:
            raise UnsupportedError(f"{kind.__name__} for {self._what}", support.reasons)
        self._cover(call)
        settled = self._settle(call)
        if seen:
            self._latest[kind] = known = _Known(call, settled)
            if layout is not None:
                if len(self._known) >= MAX_LAYOUTS:
                    self._known.clear()
                self._known[layout] = known
        return settled


class _Known:
    """One layout that was admitted, and what was ``settled`` about it."""

    __slots__ = ("_missing", "_present", "_same", "_setting", "_value", "settled")

    def __init__(self, call: Any, settled: Any) -> None:
        kind, self.settled = type(call), settled
        names = _NAMES[kind]
        self._missing = tuple(name for name in names if getattr(call, name) is None)
        present = [_INSIDE.get(name, name) for name in names if name not in self._missing]
        if kind in _GATED:
            present += _LOG_NAMES if isinstance(call.gates, LogGates) else _RAW_NAMES
        self._present: Callable[[Any], tuple[Tensor, ...]] = attrgetter(*present)
        self._setting = _SETTING[kind]
        self._value = self._setting(call)
        self.compare_with(call)

    def compare_with(self, call: Any) -> None:
        """Recall by ``call``, whose layout is the same, from now on: the comparison hangs on the autograd mode."""
        self._same: LayoutCheck = layout_check(self._present(call))

    def recall(self, call: Any) -> bool:
        """Whether ``call`` certainly has this layout."""
        try:
            tensors = self._present(call)
        except AttributeError:  # gates of the other kind, or something that the check has to name
            return False
        for name in self._missing:
            if getattr(call, name) is not None:
                return False
        return self._same(*tensors) and bool(self._setting(call) == self._value)


def _exactly(*values: object) -> tuple[object, ...]:
    """Tells 1 from 1.0 and from True, which compare equal. Types come first: where they differ, values are not asked,
    which may be tensors, and on a device."""
    return tuple(map(type, values)), values


def _gated(call: Any) -> tuple[object, ...]:
    return type(call.gates), _exactly(call.scale)


def _gated_extend(call: ExtendCall) -> tuple[object, ...]:
    """Lengths that are no tuple or list, and a plan that is none, are never equal to what was admitted."""
    lengths, plan = call.seq_lens_host, call.checkpoints
    known = _exactly(*lengths) if isinstance(lengths, tuple | list) else lengths is None
    numbers = _exactly(plan.every, plan.count) if isinstance(plan, CheckpointPlan) else None
    return type(plan), _gated(call), known, numbers


#: The tensors of a kind of call that is admitted by its layout, those that may be missing last.
_NAMES: Mapping[type, tuple[str, ...]] = {
    DecodeCall: ("q", "k", "v", "states", "slots", "write_slots", "out"),
    ExtendCall: ("q", "k", "v", "states", "slots", "cu_seqlens", "fresh", "write_slots", "checkpoints", "out"),
    VerifyCall: ("q", "k", "v", "states", "slots", "intermediates", "rows", "parents", "out"),
    CommitCall: ("states", "slots", "intermediates", "last", "rows"),
    ConvDecodeCall: ("x", "weight", "windows", "slots", "bias", "write_slots", "out"),
}
#: What is no tensor itself, and where its tensor is.
_INSIDE: Mapping[str, str] = {"checkpoints": "checkpoints.starts"}
#: What else tells one of them from another: what the host knows, a word, and for commit nothing.
_SETTING: Mapping[type, Callable[[Any], object]] = {
    DecodeCall: _gated, ExtendCall: _gated_extend, VerifyCall: _gated, CommitCall: attrgetter("__class__"),
    ConvDecodeCall: attrgetter("activation"),
}  # fmt: skip
_GATED = (DecodeCall, ExtendCall, VerifyCall)
_RAW_NAMES = ("gates.a", "gates.b", "gates.A_log", "gates.dt_bias")
_LOG_NAMES = ("gates.g", "gates.beta")
#: Of the kinds that are looked up.
_TENSORS: Mapping[type, Callable[[Any], tuple[Tensor | None, ...]]] = {
    kind: attrgetter(*names) for kind, names in _NAMES.items() if kind is not ExtendCall
}
_RAW, _LOG = attrgetter(*_RAW_NAMES), attrgetter(*_LOG_NAMES)


def _pool(call: Any) -> Tensor:
    """The pool tells where a call's tensors are."""
    pool: Tensor = call.windows if type(call) is ConvDecodeCall else call.states
    return pool


def _layout(call: Any) -> tuple[object, ...]:
    """Everything that the checks of a call on a device look at."""
    kind = type(call)
    tensors = _TENSORS[kind](call)
    key: list[object] = [kind, _SETTING[kind](call)]
    if kind in _GATED:
        tensors += _LOG(call) if isinstance(call.gates, LogGates) else _RAW(call)
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        else:
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tuple(key)
