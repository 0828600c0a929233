"""The Triton short convolution against the plain-torch one in float64, on the CPU under the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conv_problems import NAN, C, ConvProblem, copied, fresh_seed, refused, same_bits
from qwen35.adapters.reference.short_convolution import ReferenceShortConvolution
from qwen35.adapters.triton.short_convolution import TritonShortConvolution
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import CaptureError, ClosedError, ShapeError, UnsupportedError
from qwen35.ports.short_convolution import (
    ConvCall,
    ConvCommitCall,
    ConvDecodeCall,
    ConvExtendCall,
    ConvPlan,
    ConvVerifyCall,
    ShortConvolution,
)
from qwen35.ports.support import PHASE_OF, dtype_name
from qwen35.testing import relative_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: Tokens, windows, weights: what engines use, and mixtures that the contract allows.
DTYPES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, F32), (F16, BF16, BF16), (F32, BF16, BF16)]
on_every_dtype = pytest.mark.parametrize(("token", "window", "weights"), DTYPES)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def adapter() -> TritonShortConvolution:
    return TritonShortConvolution()


@pytest.fixture
def seed() -> int:
    return fresh_seed()


def run(adapter: ShortConvolution, call: ConvCall) -> Tensor | None:
    match call:
        case ConvDecodeCall():
            return adapter.decode(call)
        case ConvExtendCall():
            return adapter.extend(call)
        case ConvVerifyCall():
            return adapter.verify(call)
        case ConvCommitCall():
            return adapter.commit(call)


def assert_agrees(adapter: TritonShortConvolution, call: C, seed: int) -> None:
    """Outputs within the stated bound of the float64 oracle's; pools, gaps and intermediates bit for bit."""
    mine, oracle = copied(call), copied(call, "cpu")
    if not isinstance(oracle, ConvCommitCall):
        # The oracle answers in float64, so that its own rounding is no part of the error.
        oracle = replace(oracle, out=None, x=oracle.x.double())
    out, expected = run(adapter, mine), run(ReferenceShortConvolution(torch.float64), oracle)
    for name in ("windows", "intermediates"):
        if name == "windows" or isinstance(call, ConvVerifyCall | ConvCommitCall):
            got, want = (getattr(c, name) for c in (mine, oracle))
            assert same_bits(got, want), f"seed {seed}: {name} differ"
            assert got._base is not None
            assert same_bits(got._base, want._base), f"seed {seed}: the gap between {name} was written"
    if out is None or expected is None:
        return
    assert not isinstance(mine, ConvCommitCall)
    assert out is mine.out
    precision = adapter.capabilities.precision[PHASE_OF[type(call)]]
    bound = precision.bound(dtype_name(out.dtype), dtype_name(call.windows.dtype))
    error = relative_error(out, expected)
    assert error <= bound.output, f"seed {seed}: error {error:.2e} over {bound.output:.2e}"


def test_it_implements_the_port(adapter: TritonShortConvolution) -> None:
    assert isinstance(adapter, ShortConvolution)


@on_every_dtype
def test_decode(
    adapter: TritonShortConvolution, seed: int, device: str,
    token: torch.dtype, window: torch.dtype, weights: torch.dtype,
) -> None:  # fmt: skip
    drawn = ConvProblem(seed=seed, device=device, token=token, window=window, weights=weights, channels=130)
    assert_agrees(adapter, drawn.decode([3, -1, 8, 0]), seed)
    assert_agrees(adapter, drawn.decode([3, -1, 8, 0], write_slots=[4, 5, -1, 0]), seed)


@on_every_dtype
def test_extend(
    adapter: TritonShortConvolution, seed: int, device: str,
    token: torch.dtype, window: torch.dtype, weights: torch.dtype,
) -> None:  # fmt: skip
    drawn = ConvProblem(seed=seed, device=device, token=token, window=window, weights=weights)
    lengths, fresh = [1, 0, 17, 3, 33, 16, 2], [False, False, True, False, False, False, True]
    assert_agrees(adapter, drawn.extend([3, 1, 0, 8, 5, -1, 2], lengths, fresh), seed)
    assert_agrees(adapter, drawn.extend([3, 1, 8], [0, 18, 5], write_slots=[6, -1, 0]), seed)


@on_every_dtype
def test_verify(
    adapter: TritonShortConvolution, seed: int, device: str,
    token: torch.dtype, window: torch.dtype, weights: torch.dtype,
) -> None:  # fmt: skip
    drawn = ConvProblem(seed=seed, device=device, token=token, window=window, weights=weights)
    assert_agrees(adapter, drawn.verify([3, -1, 7], 5), seed)
    tree = [[-1, 0, 0, 1, -1, 3], [-1, -1, 1, 2, 3, 0]]
    assert_agrees(adapter, drawn.verify([3, 7], 6, rows=[2, 0], parents=tree), seed)


@pytest.mark.parametrize("window", [BF16, F32])
@pytest.mark.parametrize("channels", [24, 16])
def test_commit(adapter: TritonShortConvolution, seed: int, device: str, window: torch.dtype, channels: int) -> None:
    drawn = ConvProblem(seed=seed, device=device, window=window, channels=channels)
    assert_agrees(adapter, drawn.commit([3, -1, 7, 0], [2, 1, -1, 0]), seed)
    assert_agrees(adapter, drawn.commit([3, -1, 7, 0], [2, 1, 0, -1], rows=[4, 0, 1, 2]), seed)


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize(("bias", "activation"), [(True, None), (False, "silu")])
def test_every_width_bias_and_activation(
    adapter: TritonShortConvolution, seed: int, device: str, width: int, bias: bool, activation: str | None
) -> None:
    drawn = ConvProblem(seed=seed, device=device, width=width, bias=bias, activation=activation)  # type: ignore[arg-type]
    assert_agrees(adapter, drawn.decode([1, 2]), seed)
    assert_agrees(adapter, drawn.extend([1, 2, 4], [width, 20, 1], [True, False, False]), seed)
    assert_agrees(adapter, drawn.verify([1, 2], 9), seed)


def test_64_bit_indices(adapter: TritonShortConvolution, seed: int, device: str) -> None:
    drawn = ConvProblem(seed=seed, device=device, index=torch.int64)
    assert_agrees(adapter, drawn.decode([3, -1, 8], write_slots=[-1, 2, 8]), seed)
    assert_agrees(adapter, drawn.extend([3, -1, 8], [4, 2, 19], write_slots=[2, 4, -1]), seed)
    assert_agrees(adapter, drawn.verify([3, -1], 3, rows=[2, 0], parents=[[-1, 0, 0], [-1, -1, 1]]), seed)
    assert_agrees(adapter, drawn.commit([3, -1, 7], [2, 1, -1], rows=[3, 0, 1]), seed)


def test_mixed_indices(adapter: TritonShortConvolution, seed: int, device: str) -> None:
    call = ConvProblem(seed=seed, device=device).extend([3, -1, 8], [4, 2, 19], write_slots=[2, 4, -1])
    assert_agrees(adapter, replace(call, cu_seqlens=call.cu_seqlens.long()), seed)
    assert_agrees(adapter, replace(call, slots=call.slots.long()), seed)


@pytest.mark.parametrize("channels", [16, 272])
def test_aligned_rows_take_the_same_values(
    adapter: TritonShortConvolution, seed: int, device: str, channels: int
) -> None:
    """A dense call is moved 16 bytes at a time, a view of a projection is not."""
    view = ConvProblem(seed=seed, device=device, token=BF16, channels=channels).extend([1, 2], [19, 4])
    dense = replace(copied(view), x=view.x.contiguous(), out=None)
    assert same_bits(adapter.extend(dense), adapter.extend(view)), f"seed {seed}"
    assert same_bits(dense.windows, view.windows), f"seed {seed}"
    assert_agrees(adapter, replace(dense, out=torch.full_like(dense.x, NAN)), seed)


def test_permuted_sequences_give_permuted_bits(adapter: TritonShortConvolution, seed: int, device: str) -> None:
    lengths, slots, order = [5, 33, 2, 0], [4, 1, 7, 2], [2, 0, 3, 1]
    call = ConvProblem(seed=seed, device=device, token=BF16).extend(slots, lengths)
    pieces = call.x.split(lengths)
    offsets = [0, *torch.tensor(lengths)[order].cumsum(0).tolist()]
    permuted = replace(
        copied(call), x=torch.cat([pieces[i] for i in order]), slots=call.slots[order], out=None,
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
    )  # fmt: skip
    outs = adapter.extend(call).split(lengths)
    assert same_bits(adapter.extend(permuted), torch.cat([outs[i] for i in order])), f"seed {seed}"
    assert same_bits(permuted.windows, call.windows), f"seed {seed}"


@pytest.mark.case("C24")
@pytest.mark.parametrize("parts", [[23, 15], [1, 20, 17], [2, 36], [1] * 38])
def test_one_extend_is_the_extends_of_its_parts(
    adapter: TritonShortConvolution, seed: int, device: str, parts: list[int]
) -> None:
    """Decode stands for parts of one token. The window's dtype is the tokens', so that no part rounds anew."""
    whole = ConvProblem(seed=seed, device=device).extend([4], [38])
    windows, outs = copied(whole).windows, []
    shared = {"weight": whole.weight, "bias": whole.bias, "slots": whole.slots, "windows": windows}
    for x in whole.x.split(parts):
        if len(x) == 1:
            outs.append(adapter.decode(ConvDecodeCall(x=x, **shared)))
        else:
            offsets = torch.tensor([0, len(x)], dtype=torch.int32, device=device)
            outs.append(adapter.extend(ConvExtendCall(x=x, cu_seqlens=offsets, **shared)))
    bound = adapter.capabilities.precision[Phase.EXTEND].bound("float32", "float32")
    assert relative_error(torch.cat(outs), adapter.extend(whole)) < bound.output, f"seed {seed}"
    assert same_bits(windows, whole.windows), f"seed {seed}"


@pytest.mark.case("C27")
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_after_commit_the_window_is_that_of_the_accepted_tokens(
    adapter: TritonShortConvolution, seed: int, device: str, accepted: int
) -> None:
    verify = ConvProblem(seed=seed, device=device, token=BF16, window=BF16).verify([-1, 4], 3, rows=[0, 2])
    before = verify.windows.clone()
    adapter.verify(verify)
    adapter.commit(
        ConvCommitCall(
            windows=verify.windows, slots=verify.slots, intermediates=verify.intermediates, rows=verify.rows,
            last=torch.tensor([0, accepted - 1], dtype=torch.int32, device=device),
        )
    )  # fmt: skip
    expected = before.clone()
    expected[4] = torch.cat([before[4], verify.x[1, :accepted].T], dim=1)[:, accepted:]
    assert same_bits(verify.windows, expected), f"seed {seed}"


def test_outputs_are_made_where_none_are_given(adapter: TritonShortConvolution, seed: int, device: str) -> None:
    drawn = ConvProblem(seed=seed, device=device)
    for call in (drawn.decode([1, -1]), drawn.extend([1, -1], [3, 2]), drawn.verify([1, -1], 2)):
        given = run(adapter, copied(call))
        made = run(adapter, replace(call, out=None))
        assert made is not None
        assert given is not None
        assert made.is_contiguous()
        assert same_bits(made, given), f"seed {seed}"


def test_empty_batches_are_legal(adapter: TritonShortConvolution, seed: int, device: str) -> None:
    drawn = ConvProblem(seed=seed, device=device)
    calls: list[ConvCall] = [
        drawn.decode([]), drawn.extend([], []), drawn.extend([1, 2], [0, 0]), drawn.verify([], 3),
        replace(drawn.commit([1], [0]), slots=drawn.indices([]), last=drawn.indices([])),
    ]  # fmt: skip
    for call in calls:
        before = call.windows.clone()
        run(adapter, call)
        assert same_bits(call.windows, before), f"seed {seed}"


def plan(device: str, **changes: object) -> ConvPlan:
    made = ConvPlan(
        channels=24, width=4, window_dtype=F32, device=torch.device(device), max_batch=4, max_tokens=64, max_draft=3
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_prepare_then_serve(adapter: TritonShortConvolution, seed: int, device: str) -> None:
    adapter.prepare(plan(device))
    assert adapter.refresh_parameters() == 0
    assert_agrees(adapter, ConvProblem(seed=seed, device=device, token=BF16).decode([2]), seed)


def test_what_cannot_be_honoured_is_refused_before_writing(
    adapter: TritonShortConvolution, seed: int, device: str
) -> None:
    wide = ConvProblem(seed=seed, device=device, width=9).decode([1])
    assert adapter.supports(wide).reasons == refused(adapter.decode, wide)
    assert "convolution width requires 2 or 3" in refused(adapter.decode, wide)[0]
    double = ConvProblem(seed=seed, device=device, token=torch.float64, window=torch.float64).extend([1], [2])
    assert len(refused(adapter.extend, double)) == 2
    with pytest.raises(UnsupportedError, match="convolution width"):
        adapter.prepare(plan(device, width=9))
    short = ConvProblem(seed=seed, device=device).verify([1], 3)
    with pytest.raises(ShapeError, match="intermediates"):
        adapter.verify(replace(short, intermediates=short.intermediates[:, :2]))
    for call in (wide, double, short):
        assert call.out is not None
        assert call.out.isnan().all(), f"seed {seed}"


def test_a_closed_one_refuses(adapter: TritonShortConvolution, seed: int, device: str) -> None:
    adapter.close()
    adapter.close()
    with pytest.raises(ClosedError):
        adapter.decode(ConvProblem(seed=seed, device=device).decode([1]))
    with pytest.raises(ClosedError):
        adapter.prepare(plan(device))


def four_phases(drawn: ConvProblem) -> list[ConvCall]:
    """A decode, extend, verify and commit, all of one shape of binary."""
    return [
        drawn.decode([3, -1, 8], write_slots=[4, 5, -1]),
        drawn.extend([3, -1, 8], [5, 2, 40], fresh=[False, False, True]),
        drawn.verify([3, -1], 3, parents=[[-1, 0, 0], [-1, -1, -1]]),
        drawn.commit([3, -1], [2, 1]),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_replay_sees_new_values_at_the_captured_addresses(
    adapter: TritonShortConvolution, seed: int, index: torch.dtype
) -> None:
    drawn = ConvProblem(seed=seed, device="cuda", token=BF16, window=BF16, weights=BF16, index=index)
    adapter.prepare(plan("cuda", window_dtype=BF16))
    for call in four_phases(drawn):
        eager, graph = copied(call), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(adapter, call)
        for each in (call, eager):
            each.slots.copy_(call.slots if each is eager else call.slots.roll(1))
        if not isinstance(call, ConvCommitCall) and not isinstance(eager, ConvCommitCall):
            eager.x.copy_(call.x.copy_(drawn.normal(*call.x.shape, dtype=BF16)))
        graph.replay()
        expected = run(adapter, eager)
        assert same_bits(call.windows, eager.windows), f"seed {seed}: {type(call).__name__}"
        if out is not None and expected is not None:
            assert same_bits(out, expected), f"seed {seed}: {type(call).__name__}"


@pytest.mark.gpu
def test_what_was_not_compiled_is_refused_inside_capture(adapter: TritonShortConvolution, seed: int) -> None:
    call = ConvProblem(seed=seed, device="cuda").decode([1])
    before = call.windows.clone()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(CaptureError, match="decode"):
            adapter.decode(call)
        with pytest.raises(CaptureError, match="prepare"):
            adapter.prepare(plan("cuda"))
    assert same_bits(call.windows, before), f"seed {seed}"


@pytest.mark.gpu
def test_a_pool_past_2_to_31_elements(adapter: TritonShortConvolution, seed: int) -> None:
    drawn = ConvProblem(seed=seed, device="cuda", token=BF16, window=BF16, weights=BF16, channels=8192)
    slot = 2**31 // (8192 * 3) + 2
    windows = torch.zeros(slot + 1, 8192, 3, dtype=BF16, device="cuda")
    windows[slot] = drawn.normal(8192, 3, dtype=BF16)
    small = replace(drawn.decode([0]), windows=windows[slot:].clone())
    far = replace(copied(small), windows=windows, slots=drawn.indices([slot]))
    assert same_bits(adapter.decode(far), adapter.decode(small)), f"seed {seed}"
    assert same_bits(windows[slot], small.windows[0]), f"seed {seed}"
    assert not windows[:slot].any(), f"seed {seed}"


@pytest.mark.gpu
def test_batches_past_65535_rows(adapter: TritonShortConvolution, seed: int) -> None:
    drawn = ConvProblem(seed=seed, device="cuda", token=BF16, window=BF16, weights=BF16, channels=16, pool=70_000)
    rows = 70_000
    call = drawn.decode(list(range(rows)))
    lengths = drawn.extend(list(range(rows)), [1] * rows)
    lengths = replace(lengths, x=call.x, windows=call.windows.clone(), weight=call.weight, bias=call.bias)
    assert same_bits(adapter.decode(call), adapter.extend(lengths)), f"seed {seed}"
    assert same_bits(call.windows, lengths.windows), f"seed {seed}"
