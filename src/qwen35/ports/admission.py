"""Checks a call once for each layout: the second call of the same shapes, strides and dtypes costs a look-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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


def _of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _maybe(tensor: Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else _of(tensor)


def _layout(call: Any) -> tuple[object, ...] | None:
    """Everything that the checks look at, or None where values have to be looked at too."""
    kind = type(call)
    if kind is DecodeCall or kind is VerifyCall:
        if call.states.is_cpu:
            return None
        gates = call.gates
        pair = (gates.g, gates.beta) if isinstance(gates, LogGates) else (gates.a, gates.b, gates.A_log, gates.dt_bias)
        rest = (
            (_maybe(call.write_slots),) if kind is DecodeCall
            else (_of(call.intermediates), _maybe(call.rows), _maybe(call.parents))
        )  # fmt: skip
        return (
            kind, _of(call.q), _of(call.k), _of(call.v), *map(_of, pair), _of(call.states), _of(call.slots), *rest,
            call.scale, _maybe(call.out),
        )  # fmt: skip
    if kind is CommitCall and not call.states.is_cpu:
        return kind, _of(call.states), _of(call.slots), _of(call.intermediates), _of(call.last), _maybe(call.rows)
    if kind is ConvDecodeCall and not call.windows.is_cpu:
        return (
            kind, _of(call.x), _of(call.weight), _maybe(call.bias), _of(call.windows), _of(call.slots),
            _maybe(call.write_slots), call.activation, _maybe(call.out),
        )  # fmt: skip
    return None
