"""Checks a call once for each layout: the second call of the same shapes, strides and dtypes costs a look-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.conv_calls import ConvCommitCall, ConvDecodeCall, ConvExtendCall, ConvVerifyCall
from qwen35.ports.conv_checks import (
    check_conv_commit,
    check_conv_decode,
    check_conv_extend,
    check_conv_verify,
)
from qwen35.ports.gdn_calls import CommitCall, DecodeCall, ExtendCall, LogGates, VerifyCall
from qwen35.ports.gdn_checks import check_commit, check_decode, check_extend, check_verify

#: The check of each kind of call; with ``values=True`` it also reads what lies on the device.
CHECKS: Mapping[type, Callable[..., None]] = {
    DecodeCall: check_decode, ExtendCall: check_extend, VerifyCall: check_verify, CommitCall: check_commit,
    ConvDecodeCall: check_conv_decode, ConvExtendCall: check_conv_extend, ConvVerifyCall: check_conv_verify,
    ConvCommitCall: check_conv_commit,
}  # fmt: skip

#: Layouts kept before the cache starts anew; engines use a few hundred batch sizes.
MAX_LAYOUTS = 4096


@runtime_checkable
class DecodesKnown(Protocol):
    """What an adapter may offer besides its port: a short way for the decode that comes again and again."""

    def decode_known(self, call: DecodeCall) -> Tensor | None:
        """``decode`` where a call of this very layout was admitted before and every address and row is as aligned as
        ``capabilities.byte_alignment`` asks; else None, nothing written and nothing raised."""


class Admission:
    """What an adapter runs first in every call: the contract's check, then its own ``supports``.

    Raises ``ContractError`` or ``UnsupportedError`` before anything is written. On a device, a decode, verify or commit
    whose layout was admitted before is admitted by a look-up; extends, and calls whose index values the host can see
    (CPU tensors), are checked each time. ``supports`` may depend on nothing but layouts, dtypes, devices and ``scale``.
    ``cover`` then makes sure that a plan covers the call, or raises; plans may only widen.
    """

    def __init__(
        self, what: str, supports: Callable[[Any], Support], cover: Callable[[Any], None] = lambda _: None
    ) -> None:
        self._what, self._supports, self._cover = what, supports, cover
        self._known: set[tuple[object, ...]] = set()

    def __call__(self, call: Any) -> None:
        """Admit ``call``, or raise."""
        try:
            layout = _layout(call)
        except AttributeError:  # something is no tensor: the check names it
            CHECKS[type(call)](call)
            raise
        if layout is not None and layout in self._known:
            return
        CHECKS[type(call)](call)
        support = self._supports(call)
        if not support:
            raise UnsupportedError(f"{type(call).__name__} for {self._what}", support.reasons)
        self._cover(call)
        if layout is not None:
            if len(self._known) >= MAX_LAYOUTS:
                self._known.clear()
            self._known.add(layout)


#: The tensors of a kind of call that is admitted by its layout, those that may be missing last.
_TENSORS: Mapping[type, Callable[[Any], tuple[Tensor | None, ...]]] = {
    DecodeCall: attrgetter("q", "k", "v", "states", "slots", "write_slots", "out"),
    VerifyCall: attrgetter("q", "k", "v", "states", "slots", "intermediates", "rows", "parents", "out"),
    CommitCall: attrgetter("states", "slots", "intermediates", "last", "rows"),
    ConvDecodeCall: attrgetter("x", "weight", "windows", "slots", "bias", "write_slots", "out"),
}
_RAW, _LOG = attrgetter("a", "b", "A_log", "dt_bias"), attrgetter("g", "beta")


def _layout(call: Any) -> tuple[object, ...] | None:
    """Everything that the checks look at, or None where values have to be looked at too."""
    kind = type(call)
    if kind not in _TENSORS or (call.windows if kind is ConvDecodeCall else call.states).is_cpu:
        return None
    tensors = _TENSORS[kind](call)
    key: list[object] = [kind]
    if kind is ConvDecodeCall:
        key.append(call.activation)
    elif kind is not CommitCall:
        key.append(call.scale)
        tensors += _LOG(call.gates) if isinstance(call.gates, LogGates) else _RAW(call.gates)
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        else:
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tuple(key)
