"""The laws of the fused finalize, for any implementation of the port.

Every rank of a group runs a law together, with the same ``FinalizeKit`` but its own rank; a broken law raises
``AssertionError``. Inputs are fresh and random from a seed that the message shows; outputs are poisoned with NaN.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qwen35.domain.errors import ClosedError, DtypeError, LayoutError, ShapeError, ValueRangeError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.ports.finalize_checks import handoff_tensors
from qwen35.ports.finalize_fusion import FusionWorkspace, NormAndResidual
from qwen35.services.finalize_agreement import Agreement
from qwen35.testing.finalize_cases import NAN, FinalizeCase


@dataclass(frozen=True, slots=True)
class FinalizeKit:
    """A workspace under test on this rank, what its adapter promises, and how ranks compare notes.

    ``weight_dtypes`` are those that the adapter takes.
    """

    workspace: FusionWorkspace
    capabilities: FusionCapabilities
    agreement: Agreement
    weight_dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def case(self, seed: int, m: int, **changes: Any) -> FinalizeCase:
        """A case of this workspace's geometry."""
        s = self.workspace.signature
        base = FinalizeCase(
            seed=seed, m=m, top_k=s.top_k, hidden=s.hidden, tp_size=s.tp_size, shared=s.shared_expert, dtype=s.dtype,
            device=s.device, weight_dtype=self.weight_dtypes[seed % len(self.weight_dtypes)],
        )  # fmt: skip
        return replace(base, **changes)

    @property
    def rank(self) -> int:
        return self.workspace.signature.rank

    def finalize(self, case: FinalizeCase, handoff: FinalizeHandoff | None = None) -> NormAndResidual:
        """The call of ``case`` into poisoned outputs, which must come back as the very objects."""
        residual = case.residual()
        out = poisoned(residual)
        got = self.workspace.finalize(handoff or case.handoff(self.rank), residual, case.gamma(), out)
        assert got.norm is out.norm, f"{case}: the given norm buffer was not returned"
        assert got.residual is out.residual, f"{case}: the given residual buffer was not returned"
        return got

    def assert_near(self, got: NormAndResidual, oracle: tuple[Tensor, Tensor], what: object) -> None:
        """Both results are within the adapter's bound of the oracle."""
        bound = self.capabilities.bound(self.workspace.signature.dtype)
        for name, value, want in (("norm", got.norm, oracle[0]), ("residual", got.residual, oracle[1])):
            assert bool(value.isfinite().all()), f"{what}: {name} is not finite"
            error = float((value.double() - want).norm() / want.norm())
            assert error <= bound, f"{what}: {name} is off by {error:.2e}, bound {bound:.2e}"

    def assert_alike(self, got: NormAndResidual, what: object) -> None:
        """Every rank holds the same bits, but for the sign of zero."""
        digests = self.agreement.exchange(digest(got))
        assert len(set(digests)) == 1, f"{what}: ranks differ in bits"


def poisoned(like: Tensor) -> NormAndResidual:
    """Output buffers full of NaN."""
    return NormAndResidual(norm=torch.full_like(like, NAN), residual=torch.full_like(like, NAN))


def digest(got: NormAndResidual) -> str:
    """The bits of both results, with -0.0 taken for 0.0."""
    both = torch.stack((got.norm, got.residual)).float().cpu() + 0.0
    return hashlib.sha256(both.numpy().tobytes()).hexdigest()


def sizes_of(kit: FinalizeKit) -> list[int]:
    """Sizes that cross the usual boundaries of kernels, up to the workspace's most."""
    most = kit.workspace.signature.max_m
    return sorted({m for m in (1, 2, 7, 8, 16, 23, 24, 33, 64, 65, 66, 129, 300, most) if m <= most})


def equals_the_oracle(kit: FinalizeKit, seed: int) -> None:
    """Values, for every telling size, with dropped and zero-weight choices, padding and NaN."""
    s = kit.workspace.signature
    for i, m in enumerate(sizes_of(kit)):
        case = kit.case(seed + i, m)
        got = kit.finalize(case)
        kit.assert_near(got, case.finalize_oracle(s.eps, s.weight_bias), case)
        kit.assert_alike(got, case)


def all_reduce_equals_the_oracle(kit: FinalizeKit, seed: int) -> None:
    """Values of the second pattern, on the same workspace."""
    s = kit.workspace.signature
    for i, m in enumerate(sizes_of(kit)):
        case = kit.case(seed + i, m)
        residual = case.residual()
        got = kit.workspace.all_reduce(case.local(kit.rank), residual, case.gamma(), poisoned(residual))
        kit.assert_near(got, case.all_reduce_oracle(s.eps, s.weight_bias), case)
        kit.assert_alike(got, case)


def dropped_and_weightless_terms_add_nothing(kit: FinalizeKit, seed: int) -> None:
    """-1 with a NaN weight, and weight zero on a NaN row: alone, together, and for every choice of every row."""
    s = kit.workspace.signature
    m = min(24, s.max_m)
    for i, (dropped, zeroed) in enumerate(((1.0, 0.0), (0.0, 1.0), (0.5, 0.5))):
        for rows in sorted({m, max(1, m - 1)}):
            case = kit.case(seed + i, rows, dropped=dropped, zeroed=zeroed)
            got = kit.finalize(case)
            kit.assert_near(got, case.finalize_oracle(s.eps, s.weight_bias), case)
            kit.assert_alike(got, case)


def unreferenced_rows_never_matter(kit: FinalizeKit, seed: int) -> None:
    """Filling them with NaN, or with numbers, changes no bit."""
    case = kit.case(seed, min(9, kit.workspace.signature.max_m), padding=11)
    handoff = case.handoff(kit.rank)
    routed, _, indices, _ = handoff_tensors(handoff)
    named = indices[indices >= 0].long()
    digests = []
    for filler in (NAN, 3.0):
        other = torch.full_like(routed, filler)
        other[named] = routed[named]
        digests.append(digest(kit.finalize(case, replace(handoff, routed_output=other))))
    assert digests[0] == digests[1], f"{case}: rows that no index names changed the result"


def inputs_stay_as_they_are(kit: FinalizeKit, seed: int) -> None:
    """No input tensor is written, by either call."""
    case = kit.case(seed, min(5, kit.workspace.signature.max_m))
    handoff, residual, gamma, local = case.handoff(kit.rank), case.residual(), case.gamma(), case.local(kit.rank)
    inputs = [t for t in (*handoff_tensors(handoff), residual, gamma, local) if t is not None]
    before = [t.clone().view(torch.uint8) for t in inputs]
    kit.workspace.finalize(handoff, residual, gamma)
    kit.workspace.all_reduce(local, residual, gamma)
    for tensor, kept in zip(inputs, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), kept), f"{case}: an input of shape {list(tensor.shape)} changed"


def negative_zero_is_a_value(kit: FinalizeKit, seed: int) -> None:
    """Single -0.0 and whole rows of it neither hang nor alter the result."""
    m = min(6, kit.workspace.signature.max_m)
    case = kit.case(seed, m)
    local = case.local(kit.rank)
    local[0] = -0.0
    local[-1, ::3] = -0.0
    residual = case.residual()
    got = kit.workspace.all_reduce(local, residual, case.gamma(), poisoned(residual))
    if m > 1:
        assert bool((got.residual[0] == residual[0]).all()), f"{case}: a row of -0.0 changed the residual"
    kit.assert_alike(got, case)


def calls_back_to_back_do_not_mix(kit: FinalizeKit, seed: int) -> None:
    """Sizes and patterns in quick succession, nothing waited for in between, each result its own."""
    s = kit.workspace.signature
    draw = torch.Generator().manual_seed(seed)
    sizes = [*torch.randint(1, s.max_m + 1, (12,), generator=draw).tolist(), 1, s.max_m, 1]
    cases = [kit.case(seed + i, m) for i, m in enumerate(sizes)]
    inputs = [(c.handoff(kit.rank), c.local(kit.rank), c.residual(), c.gamma()) for c in cases]
    results = []
    for handoff, local, residual, gamma in inputs:
        results.append(kit.workspace.finalize(handoff, residual, gamma))
        results.append(kit.workspace.all_reduce(local, residual, gamma))
    for i, case in enumerate(cases):
        kit.assert_near(results[2 * i], case.finalize_oracle(s.eps, s.weight_bias), case)
        kit.assert_near(results[2 * i + 1], case.all_reduce_oracle(s.eps, s.weight_bias), case)
        kit.assert_alike(results[2 * i], case)


def bad_calls_are_refused_before_anything_happens(kit: FinalizeKit, seed: int) -> None:
    """Each by its own error, on every rank, with outputs untouched; a good call then still works."""
    case = kit.case(seed, min(4, kit.workspace.signature.max_m))
    for what, error, call in _bad_calls(kit, case):
        out = poisoned(case.residual())
        assert raises(error, partial(call, out)), f"{what} was accepted"
        assert bool(out.norm.isnan().all() & out.residual.isnan().all()), f"{what}: outputs were written"
    equals_the_oracle(kit, seed)


def raises(error: type[Exception], call: Callable[[], object]) -> bool:
    """Whether ``call`` raises ``error``; another exception passes through."""
    try:
        call()
    except error:
        return True
    return False


def _bad_calls(
    kit: FinalizeKit, case: FinalizeCase
) -> list[tuple[str, type[Exception], Callable[[NormAndResidual], object]]]:
    w, s = kit.workspace, kit.workspace.signature
    handoff, residual, gamma, local = case.handoff(kit.rank), case.residual(), case.gamma(), case.local(kit.rank)
    routed, weights, indices, shared = handoff_tensors(handoff)
    other = torch.float32 if residual.dtype == torch.bfloat16 else torch.bfloat16

    def finalize(**changes: Any) -> Callable[[NormAndResidual], object]:
        bad = replace(handoff, **changes)
        return lambda out: w.finalize(bad, residual, gamma, out)

    def reduce(x: Tensor, r: Tensor = residual, g: Tensor = gamma) -> Callable[[NormAndResidual], object]:
        return lambda out: w.all_reduce(x, r, g, out)

    def crooked(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)

    def strided(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]

    large = torch.zeros(s.max_m + 1, s.hidden, dtype=residual.dtype, device=residual.device)
    calls: list[tuple[str, type[Exception], Callable[[NormAndResidual], object]]] = [
        ("m = 0", ValueRangeError, reduce(local[:0], residual[:0])),
        ("m beyond the workspace", ValueRangeError, reduce(large, large)),
        ("a handoff of m = 0", ValueRangeError, finalize(m=0)),
        ("a handoff of m beyond the workspace", ValueRangeError, finalize(m=s.max_m + 1)),
        ("routed output of another width", ShapeError, finalize(routed_output=routed[:, :-8])),
        ("weights of another top_k", ShapeError, finalize(expert_weights=weights[:, :-1])),
        ("indices of another m", ShapeError, finalize(permuted_indices=indices[:-1])),
        ("int64 indices", DtypeError, finalize(permuted_indices=indices.long())),
        ("float16 weights", DtypeError, finalize(expert_weights=weights.half())),
        ("routed output of another dtype", DtypeError, finalize(routed_output=routed.to(other))),
        ("a local share of another width", ShapeError, reduce(local[:, :-8])),
        ("a residual of another m", ShapeError, reduce(local, large[: case.m + 1])),
        ("a residual of another dtype", DtypeError, reduce(local, residual.to(other))),
        ("a gamma of another dtype", DtypeError, reduce(local, g=gamma.to(other))),
        ("a gamma of another width", ShapeError, reduce(local, g=gamma[:-1])),
        ("a misaligned local share", LayoutError, reduce(crooked(local))),
        ("a strided local share", LayoutError, reduce(strided(local))),
        ("a misaligned routed output", LayoutError, finalize(routed_output=crooked(routed))),
        ("strided weights", LayoutError, finalize(expert_weights=strided(weights))),
        ("outputs on top of the residual", LayoutError,
         lambda _: w.all_reduce(local, residual, gamma, NormAndResidual(norm=residual, residual=residual.clone()))),
    ]  # fmt: skip
    if shared is not None:
        calls += [
            ("no shared output", ShapeError, finalize(gated_shared_output=None)),
            ("a shared output of another m", ShapeError, finalize(gated_shared_output=shared[:-1])),
            ("a strided shared output", LayoutError, finalize(gated_shared_output=strided(shared))),
            ("a misaligned shared output", LayoutError, finalize(gated_shared_output=crooked(shared))),
        ]
    return calls


def replays_see_new_values(kit: FinalizeKit, seed: int) -> None:
    """Three replays of one graph, three inputs: three results, each right, at addresses that never change."""
    s = kit.workspace.signature
    addresses = kit.workspace.addresses
    for i, m in enumerate(sizes_of(kit)):
        cases = [kit.case(seed + 10 * i + j, m, weight_dtype="bfloat16", dropped=0.1) for j in range(3)]
        handoff, residual, gamma = cases[0].handoff(kit.rank), cases[0].residual(), cases[0].gamma()
        held = [t for t in (*handoff_tensors(handoff), residual, gamma) if t is not None]
        out = poisoned(residual)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kit.workspace.finalize(handoff, residual, gamma, out)
        for case in cases:
            fresh = (*handoff_tensors(case.handoff(kit.rank)), case.residual(), case.gamma())
            for place, value in zip(held, (t for t in fresh if t is not None), strict=True):
                place.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            kit.assert_near(out, case.finalize_oracle(s.eps, s.weight_bias), case)
            kit.assert_alike(out, case)
    assert kit.workspace.addresses == addresses, "addresses of the workspace changed"


def destroyed_means_closed(kit: FinalizeKit, seed: int) -> None:
    """``destroy`` twice is ``destroy`` once; afterwards nothing is supported and a call raises. Run it last."""
    case = kit.case(seed, 1)
    assert kit.workspace.supports(1)
    assert not kit.workspace.supports(0)
    assert not kit.workspace.supports(-1)
    assert not kit.workspace.supports(kit.workspace.signature.max_m + 1)
    kit.workspace.destroy()
    kit.workspace.destroy()
    assert not any(kit.workspace.supports(m) for m in (0, 1, kit.workspace.signature.max_m))
    w, residual, gamma = kit.workspace, case.residual(), case.gamma()
    for call in (
        lambda: w.all_reduce(case.local(kit.rank), residual, gamma),
        lambda: w.finalize(case.handoff(kit.rank), residual, gamma),
    ):
        assert raises(ClosedError, call), "a destroyed workspace took a call"


Law = Callable[[FinalizeKit, int], None]

#: In the order in which they are run; each leaves the workspace usable.
LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        equals_the_oracle, all_reduce_equals_the_oracle, dropped_and_weightless_terms_add_nothing,
        unreferenced_rows_never_matter, inputs_stay_as_they_are, negative_zero_is_a_value,
        calls_back_to_back_do_not_mix, bad_calls_are_refused_before_anything_happens,
    )
}  # fmt: skip

#: Only where CUDA graphs are.
CAPTURE_LAWS: dict[str, Law] = {replays_see_new_values.__name__: replays_see_new_values}

#: Ends the workspace.
LAST_LAW: Law = destroyed_means_closed
