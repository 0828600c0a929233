"""The Triton row operations against the plain-torch ones, bit for bit where they only move data."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from qwen35.ports.gdn_calls import CommitCall, Gates, LogGates, RawGates
from torch_rows import TorchRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else [pytest.mark.interpreter]


@pytest.fixture
def seed() -> int:
    return random.randrange(2**31)


@pytest.fixture
def rows():
    from qwen35.adapters._kernels.rows import triton_rows

    return triton_rows()


def randn(source: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=source).to(dtype).to(DEVICE)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def pages(source: torch.Generator, *shape: int, gap: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, ...] dense but for ``gap`` elements between slots, NaN in the gaps."""
    rest = torch.Size(shape[1:]).numel()
    base = torch.full((shape[0], rest + gap), float("nan"), dtype=dtype, device=DEVICE)
    base[:, :rest] = randn(source, shape[0], rest, dtype=dtype)
    return base[:, :rest].unflatten(1, shape[1:])


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Equal bits, or one unit of bfloat16 apart where Triton's interpreter cuts off what a GPU rounds."""
    if got.dtype == torch.bfloat16 and DEVICE == "cpu":
        assert torch.allclose(got.float(), want.float(), rtol=2.0**-7, atol=0.0, equal_nan=True), what
    else:
        assert torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8)), what


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("writes", [False, True])
def test_index_replaces_padding_and_limits_gate_inputs(rows, seed: int, dtype: torch.dtype, writes: bool) -> None:
    source = torch.Generator().manual_seed(seed)
    slots, targets = ints(3, -1, 0, 2, dtype=dtype), ints(5, 4, -1, -1, dtype=dtype)
    wide = randn(source, 4, 2, 9) * 100
    a, dt_bias = wide[:, :, :3].to(torch.bfloat16), randn(source, 3)
    made = []
    for ops in (rows, TorchRows()):
        read, write = (torch.full((4,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
        clamped = torch.full((4, 2, 3), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        ops.index(
            slots, targets if writes else None, read, write, read_padding=7, write_padding=8, a=a, dt_bias=dt_bias,
            clamped=clamped, limit=85.0,
        )  # fmt: skip
        made.append((read, write, clamped))
    for got, want, what in zip(*made, ("read", "write", "clamped"), strict=True):
        same(got, want, f"{what}: {got.tolist()} instead of {want.tolist()}, seed {seed}")
    assert made[0][0].tolist() == [3, 7, 0, 2]
    assert made[0][1].tolist() == ([5, 8, 8, 8] if writes else [3, 8, 0, 2])


def test_zero_rows_zeroes_padded_rows_of_a_strided_output_only(rows, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    base = randn(source, 3, 2, 3, 20, dtype=torch.bfloat16)
    want = base.clone()
    rows.zero_rows(base[..., :16], ints(1, -1, 0))
    want[1, :, :, :16] = 0
    same(base, want, f"only row 1's 16 columns are zeroed, seed {seed}")


@pytest.mark.case("C7")
def test_zero_ranges_zeroes_the_rows_of_padded_sequences(rows, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x = randn(source, 9, 3, 7)
    want = x.clone()
    rows.zero_ranges(x, ints(0, 0, 5, 5, 9, dtype=torch.int64), ints(-1, 2, -1, -1))
    want[5:] = 0
    same(x, want, f"rows 5 to 8 only, seed {seed}")


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.case("C4")
def test_gather_gives_zero_for_padded_and_fresh_rows_whatever_the_slot_holds(
    rows, seed: int, pool_dtype: torch.dtype, fresh: bool
) -> None:
    source = torch.Generator().manual_seed(seed)
    states = pages(source, 4, 2, 3, 5, gap=6, dtype=pool_dtype)
    states[3] = float("nan")
    flags = torch.tensor([False, True, False], device=DEVICE) if fresh else None
    slots = ints(0, 3 if fresh else 2, -1)
    out = torch.full((3, 2, 3, 5), float("nan"), device=DEVICE)
    rows.gather_states(states, slots, flags, out)
    want = torch.full_like(out, float("nan"))
    TorchRows().gather_states(states, slots, flags, want)
    same(out, want, f"seed {seed}")
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.case("C7")
def test_scatter_writes_live_rows_with_tokens_only(rows, seed: int, pool_dtype: torch.dtype, writes: bool) -> None:
    source = torch.Generator().manual_seed(seed)
    states = pages(source, 5, 2, 3, 5, gap=6, dtype=pool_dtype)
    want = states.clone()
    new = randn(source, 4, 2, 3, 5)
    slots, targets, offsets = ints(0, 3, -1, 2), ints(4, -1, 1, 2), ints(0, 2, 2, 6, 9)
    rows.scatter_states(new, states, slots, targets if writes else None, offsets)
    TorchRows().scatter_states(new, want, slots, targets if writes else None, offsets)
    same(states, want, f"seed {seed}")


@pytest.mark.parametrize("given", [False, True])
def test_scatter_nodes_and_commit_skip_padding(rows, seed: int, given: bool) -> None:
    source = torch.Generator().manual_seed(seed)
    nodes = randn(source, 3, 2, 2, 3, 5)
    intermediates = pages(source, 4, 3, 2, 3, 5, gap=4)
    states = pages(source, 5, 2, 3, 5, gap=6, dtype=torch.bfloat16)
    want_nodes, want_states = intermediates.clone(), states.clone()
    slots, targets, last = ints(4, -1, 0), ints(3, 3, 1) if given else None, ints(1, 1, -1)
    rows.scatter_nodes(nodes, intermediates, slots, targets)
    TorchRows().scatter_nodes(nodes, want_nodes, slots, targets)
    same(intermediates.contiguous(), want_nodes.contiguous(), f"nodes, seed {seed}")
    rows.commit(CommitCall(states=states, slots=slots, intermediates=intermediates, last=last, rows=targets))
    TorchRows().commit(
        CommitCall(states=want_states, slots=slots, intermediates=want_nodes, last=last, rows=targets)
    )
    same(states.contiguous(), want_states.contiguous(), f"states, seed {seed}")


@pytest.mark.parametrize("kind", ["raw", "log"])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.case("C20")
@pytest.mark.case("C22")
@pytest.mark.row("D16")
def test_prefill_inputs_normalise_make_gates_and_drop_padded_tokens(
    rows, seed: int, kind: str, linear: bool, padded: bool
) -> None:
    source = torch.Generator().manual_seed(seed)
    tokens, heads, value_heads, width, value_width = 37, 2, 3, 16, 24
    packed = randn(source, tokens, 2 * heads * width + value_heads * value_width + 5, dtype=torch.bfloat16)
    q = packed[:, : heads * width].unflatten(1, (heads, width))
    k = packed[:, heads * width : 2 * heads * width].unflatten(1, (heads, width))
    v = packed[:, 2 * heads * width : -5].unflatten(1, (value_heads, value_width))
    ba = randn(source, tokens, 2 * value_heads, dtype=torch.bfloat16)
    gates: Gates
    if kind == "raw":
        ba[0, 0], ba[1, value_heads] = 0.5, 60.0
        ba[2, value_heads:] = -18.0  # softplus of about 1e-8, where log(1 + u) in float32 is 0
        gates = RawGates(
            a=ba[:, value_heads:], b=ba[:, :value_heads], A_log=randn(source, value_heads),
            dt_bias=randn(source, value_heads, dtype=torch.bfloat16),
        )  # fmt: skip
    else:
        gates = LogGates(g=-randn(source, tokens, value_heads).abs(), beta=randn(source, tokens, value_heads).sigmoid())
    offsets = ints(0, 0, 5, 5, 21, 37)
    slots = ints(3, 1, -1, -1, 2) if padded else None
    if padded:
        packed[5:21] = float("nan")
    made = []
    for ops in (rows, TorchRows()):
        nan = [torch.full(s, float("nan"), dtype=torch.bfloat16, device=DEVICE) for s in (q.shape, k.shape, v.shape)]
        decay, beta = (torch.full((tokens, value_heads), float("nan"), device=DEVICE) for _ in range(2))
        cu = torch.full((6,), -7, dtype=torch.int64, device=DEVICE)
        ops.prefill_inputs(
            q, k, gates, offsets, q_out=nan[0], k_out=nan[1], decay=decay, beta=beta, cu_out=cu, v=v, v_out=nan[2],
            linear=linear, slots=slots,
        )  # fmt: skip
        made.append((*nan, decay, beta, cu))
    got, want = made
    for i, name in enumerate(("q", "k", "v")):
        assert torch.allclose(got[i].float(), want[i].float(), rtol=2.0**-7, atol=1e-6), f"{name}, seed {seed}"
    # Float32 logs and exponentials: a few units in the last place, on a decay that itself may be tiny.
    assert torch.allclose(got[3], want[3], rtol=2e-5, atol=1e-9), f"decay, seed {seed}"
    assert torch.allclose(got[4], want[4], rtol=1e-6, atol=0), f"beta, seed {seed}"
    assert got[5].tolist() == offsets.tolist()
    if kind == "raw" and not padded:
        assert float(got[4][0, 0]) == pytest.approx(0.62245935, abs=1e-6), "beta is not rounded to bfloat16"
