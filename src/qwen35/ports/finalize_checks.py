"""Checks of the fused finalize's calls, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import ContractError, DeviceError, DtypeError, LayoutError, ValueRangeError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports import _checks as check
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.ports.support import requires

#: Bytes of one vector access: token matrices must start on such an address.
MATRIX_ALIGNMENT = 16

#: Router weights come as the router computed them or as the experts' kernel rounded them.
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)


def torch_dtype(name: str) -> torch.dtype:
    """``torch.bfloat16`` for "bfloat16"."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def signature_support(can: FusionCapabilities, signature: WorkspaceSignature) -> Support:
    """Whether an adapter with capabilities ``can`` could serve ``signature``, with every reason against it."""
    found = (
        requires("device", can.device_types, signature.device_type),
        requires("dtype", can.dtypes, signature.dtype),
        requires("tensor parallel size", can.tp_sizes, signature.tp_size),
    )
    return Support.of(*(reason for reason in found if reason is not None))


def token_support(signature: WorkspaceSignature, m: int, destroyed: bool) -> Support:
    """Whether a workspace of ``signature`` takes ``m`` tokens."""
    if destroyed:
        return Support.of("the workspace is destroyed")
    return Support.of() if 1 <= m <= signature.max_m else Support.of(f"m requires 1..{signature.max_m}, got {m}")


def handoff_tensors(handoff: FinalizeHandoff) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Routed output, weights, indices and gated shared output as torch tensors; raises ``DtypeError``."""
    shared = handoff.gated_shared_output
    return (
        _tensor("routed_output", handoff.routed_output),
        _tensor("expert_weights", handoff.expert_weights),
        _tensor("permuted_indices", handoff.permuted_indices),
        None if shared is None else _tensor("gated_shared_output", shared),
    )


def check_finalize(
    signature: WorkspaceSignature, handoff: FinalizeHandoff, residual: Tensor, gamma: Tensor,
    out: NormAndResidual | None = None, values: bool = False,
) -> None:  # fmt: skip
    """Raise a ``ContractError`` where the call does not meet the contract.

    In this order: m, that the handoff's parts are tensors, the widths of routed output, weights and indices, their
    dtypes, the shared output, the residual, gamma, ``out``; then contiguity and alignment. ``values`` reads the indices
    too.
    """
    _tokens(signature, handoff.m)
    routed, weights, indices, shared = handoff_tensors(handoff)
    handoff.check_routed(hidden=signature.hidden, top_k=signature.top_k)
    own = torch_dtype(signature.dtype)
    check.dtype("routed_output", routed, (own,))
    check.dtype("expert_weights", weights, WEIGHT_DTYPES)
    check.dtype("permuted_indices", indices, (torch.int32,))
    handoff.check_shared(hidden=signature.hidden, shared_expert=signature.shared_expert)
    matrices = [("routed_output", routed)]
    if shared is not None:
        check.dtype("gated_shared_output", shared, (own,))
        matrices.append(("gated_shared_output", shared))
    matrices += _norm_operands(signature, handoff.m, residual, gamma, out)
    for name, small in (("expert_weights", weights), ("permuted_indices", indices)):
        _dense(name, small, small.element_size(), signature)
    for name, matrix in matrices:
        _dense(name, matrix, MATRIX_ALIGNMENT, signature)
    _apart(out, [("expert_weights", weights), ("permuted_indices", indices), *matrices])
    if values:
        check_indices(indices, routed.shape[0])


def check_all_reduce(
    signature: WorkspaceSignature, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
) -> None:
    """Raise a ``ContractError`` where the call does not meet the contract."""
    check.rank("local", local, 2, "[m, D]")
    m = local.shape[0]
    _tokens(signature, m)
    check.shape("local", local, (m, signature.hidden), "[m, D]")
    check.dtype("local", local, (torch_dtype(signature.dtype),))
    matrices = [("local", local), *_norm_operands(signature, m, residual, gamma, out)]
    for name, matrix in matrices:
        _dense(name, matrix, MATRIX_ALIGNMENT, signature)
    _apart(out, matrices)


def check_addition(signature: WorkspaceSignature, m: int, addition: Tensor | None) -> None:
    """Raise a ``ContractError`` where ``addition`` is neither None nor like a residual of ``m`` rows."""
    if addition is None:
        return
    name = "post_residual_addition"
    check.shape(name, addition, (m, signature.hidden), "[m, D], like the residual,")
    check.dtype(name, addition, (torch_dtype(signature.dtype),))
    _dense(name, addition, addition.element_size(), signature)


def check_indices(indices: Tensor, rows: int) -> None:
    """Every index is -1 or a row of the routed output. Reads the values."""
    check.in_range("permuted_indices", indices, -1, rows, "-1 or a row of routed_output")


def _tokens(signature: WorkspaceSignature, m: object) -> None:
    if not isinstance(m, int) or isinstance(m, bool):
        raise ContractError(f"m must be an int, got {type(m).__name__}")
    if not 1 <= m <= signature.max_m:
        raise ValueRangeError(f"m must be in 1..{signature.max_m} (the workspace's max_m), got {m}")


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def _norm_operands(
    signature: WorkspaceSignature, m: int, residual: Tensor, gamma: Tensor, out: NormAndResidual | None
) -> list[tuple[str, Tensor]]:
    own, shape = torch_dtype(signature.dtype), (m, signature.hidden)
    check.shape("residual", residual, shape, "[m, D]")
    check.dtype("residual", residual, (own,))
    check.shape("gamma", gamma, (signature.hidden,), "[D]")
    check.dtype("gamma", gamma, (own,))
    named = [("residual", residual), ("gamma", gamma)]
    if out is not None:
        if not isinstance(out, NormAndResidual):
            raise ContractError(f"out must be a NormAndResidual or None, got {type(out).__name__}")
        named += [("out.norm", out.norm), ("out.residual", out.residual)]
        for name, buffer in named[2:]:
            check.shape(name, buffer, shape, "[m, D]")
            check.dtype(name, buffer, (own,))
    return named


def _dense(name: str, tensor: Tensor, alignment: int, signature: WorkspaceSignature) -> None:
    if str(tensor.device) != signature.device:
        raise DeviceError(f"{name} must be on the workspace's {signature.device}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise LayoutError(f"{name} must be contiguous, got strides {tensor.stride()}; call .contiguous() on it")
    if tensor.numel() and tensor.data_ptr() % alignment:
        raise LayoutError(
            f"{name} must start at a multiple of {alignment} bytes, got {tensor.data_ptr() % alignment} past one; "
            "call .clone() on it"
        )


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _apart(out: NormAndResidual | None, named: list[tuple[str, Tensor]]) -> None:
    """The two outputs overlap neither each other nor an input: several programs read a row that one writes."""
    if out is None:
        return
    spans = [(name, *_span(t)) for name, t in named if t.numel()]
    for name, low, high in spans:
        if not name.startswith("out."):
            continue
        for other, begin, end in spans:
            if other != name and low < end and begin < high:
                raise LayoutError(f"{name} must not overlap {other}")
