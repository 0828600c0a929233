"""From capabilities to an answer for one call or plan: the reasons that every adapter shares."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch

from qwen35.domain.capabilities import Capabilities, GateKind, Phase, Support
from qwen35.domain.errors import ConfigurationError, ContractError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.conv_calls import ConvCommitCall, ConvDecodeCall, ConvExtendCall, ConvPlan, ConvVerifyCall
from qwen35.ports.gdn_calls import CommitCall, DecodeCall, ExtendCall, GdnPlan, LogGates, VerifyCall
from qwen35.ports.gdn_checks import call_geometry

_GdnCall = DecodeCall | ExtendCall | VerifyCall | CommitCall
_ConvCall = ConvDecodeCall | ConvExtendCall | ConvVerifyCall | ConvCommitCall

PHASE_OF: dict[type, Phase] = {
    DecodeCall: Phase.DECODE, ExtendCall: Phase.EXTEND, VerifyCall: Phase.VERIFY, CommitCall: Phase.COMMIT,
    ConvDecodeCall: Phase.DECODE, ConvExtendCall: Phase.EXTEND, ConvVerifyCall: Phase.VERIFY,
    ConvCommitCall: Phase.COMMIT,
}  # fmt: skip


def phase_of(call: object) -> Phase:
    """The phase of a call object. Raises ``ContractError`` for what is none."""
    phase = PHASE_OF.get(type(call))
    if phase is None:
        known = ", ".join(kind.__name__ for kind in PHASE_OF)
        raise ContractError(f"call must be one of {known}, got {type(call).__name__}")
    return phase


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def requires(what: str, allowed: Set[object] | None, got: object, verb: str = "requires") -> str | None:
    """ "X requires Y, got Z" where ``got`` is not allowed; None allows everything."""
    if allowed is None or got in allowed:
        return None
    return f"{what} {verb} {' or '.join(sorted(map(str, allowed)))}, got {got}"


def _answer(reasons: Iterable[str | None]) -> Support:
    return Support.of(*(r for r in reasons if r is not None))


def check_plan(plan: GdnPlan | ConvPlan, expected: type) -> None:
    """Raise ``ConfigurationError`` where ``plan`` is not of the ``expected`` kind, or a field is no plan's: a negative
    size, a device by name, no geometry."""
    if not isinstance(plan, expected):
        raise ConfigurationError(f"prepare requires a {expected.__name__}, got {type(plan).__name__}")
    sizes = {"max_batch": (plan.max_batch, 0), "max_tokens": (plan.max_tokens, 0), "max_draft": (plan.max_draft, 0)}
    if isinstance(plan, ConvPlan):
        sizes |= {"channels": (plan.channels, 1), "width": (plan.width, 2)}
        state = ("window_dtype", plan.window_dtype)
    else:
        state = ("state_dtype", plan.state_dtype)
        if not isinstance(plan.geometry, GdnGeometry):
            raise ConfigurationError(f"GdnPlan.geometry must be a GdnGeometry, got {plan.geometry!r}")
        if plan.null_slot is not None:
            sizes["null_slot"] = (plan.null_slot, 0)
        if not isinstance(plan.may_pad, bool):
            raise ConfigurationError(f"GdnPlan.may_pad must be a bool, got {plan.may_pad!r}")
    kind = type(plan).__name__
    for name, (value, least) in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(f"{kind}.{name} must be an int >= {least}, got {value!r}")
    if not isinstance(plan.device, torch.device):
        raise ConfigurationError(f"{kind}.device must be a torch.device, got {plan.device!r}")
    for name, dtype in (state, ("token_dtype", plan.token_dtype)):
        if not isinstance(dtype, torch.dtype):
            raise ConfigurationError(f"{kind}.{name} must be a torch.dtype, got {dtype!r}")


def plan_support(can: Capabilities, plan: GdnPlan) -> Support:
    """Whether an adapter with capabilities ``can`` can serve ``plan``. Raises what ``check_plan`` raises."""
    check_plan(plan, GdnPlan)
    g = plan.geometry
    return _answer((
        requires("device", can.device_types, plan.device.type),
        requires("state dtype", can.state_dtypes, dtype_name(plan.state_dtype)),
        requires("token dtype", can.token_dtypes, dtype_name(plan.token_dtype)),
        requires("key width", can.key_widths, g.key_width),
        requires("value width", can.value_widths, g.value_width),
        requires("head ratio", can.head_ratios, g.head_ratio),
        "verify is not offered" if plan.max_draft and Phase.VERIFY not in can.phases else None,
    ))  # fmt: skip


def call_support(can: Capabilities, call: _GdnCall) -> Support:
    """Whether an adapter with capabilities ``can`` can honour ``call``, with every reason against it."""
    phase = phase_of(call)
    reasons: list[str | None] = [
        None if phase in can.phases else f"{phase} is not offered",
        requires("device", can.device_types, call.states.device.type),
        requires("state dtype", can.state_dtypes, dtype_name(call.states.dtype)),
    ]
    if not isinstance(call, CommitCall):
        g = call_geometry(call)
        kind = GateKind.LOG if isinstance(call.gates, LogGates) else GateKind.RAW
        reasons += [
            requires("token dtype", can.token_dtypes, dtype_name(call.q.dtype)),
            requires(f"{phase} gates", can.gates_of(phase), kind, "require"),
            requires("key width", can.key_widths, g.key_width),
            requires("value width", can.value_widths, g.value_width),
            requires("head ratio", can.head_ratios, g.head_ratio),
        ]
    if isinstance(call, VerifyCall) and call.parents is not None and not can.trees:
        reasons.append("verify requires a chain, got a tree (parents)")
    if isinstance(call, ExtendCall) and call.checkpoints is not None:
        every = call.checkpoints.every
        if not can.checkpoints:
            reasons.append("checkpoints are not offered")
        elif every % can.checkpoint_multiple:
            reasons.append(f"checkpoints require a multiple of {can.checkpoint_multiple} tokens, got {every}")
    return _answer(reasons)


def conv_plan_support(can: Capabilities, plan: ConvPlan) -> Support:
    """Whether an adapter with capabilities ``can`` can serve ``plan``. Raises what ``check_plan`` raises."""
    check_plan(plan, ConvPlan)
    return _answer((
        requires("device", can.device_types, plan.device.type),
        requires("window dtype", can.state_dtypes, dtype_name(plan.window_dtype)),
        requires("token dtype", can.token_dtypes, dtype_name(plan.token_dtype)),
        requires("convolution width", can.conv_widths, plan.width),
    ))  # fmt: skip


def conv_call_support(can: Capabilities, call: _ConvCall) -> Support:
    """Whether an adapter with capabilities ``can`` can honour ``call``, with every reason against it."""
    phase = phase_of(call)
    reasons: list[str | None] = [
        None if phase in can.phases else f"{phase} is not offered",
        requires("device", can.device_types, call.windows.device.type),
        requires("window dtype", can.state_dtypes, dtype_name(call.windows.dtype)),
        requires("convolution width", can.conv_widths, call.windows.shape[-1] + 1),
    ]
    if not isinstance(call, ConvCommitCall):
        reasons.append(requires("token dtype", can.token_dtypes, dtype_name(call.x.dtype)))
    if isinstance(call, ConvVerifyCall) and call.parents is not None and not can.trees:
        reasons.append("verify requires a chain, got a tree (parents)")
    return _answer(reasons)
