"""The plain-torch short convolution against torch's own convolution and the published model's functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conv_problems import ConvProblem, copied, fresh_seed, same_bits
from qwen35.adapters.reference.short_convolution import ReferenceShortConvolution
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ClosedError, ShapeError, UnsupportedError, ValueRangeError
from qwen35.ports.short_convolution import ConvCommitCall, ConvDecodeCall, ConvExtendCall, ConvPlan, ShortConvolution
from qwen35.testing import relative_error

EXACT = torch.finfo(torch.float64).eps * 64


@pytest.fixture
def seed() -> int:
    return fresh_seed()


@pytest.fixture
def oracle() -> ReferenceShortConvolution:
    return ReferenceShortConvolution(torch.float64)


def problem(seed: int, **options: object) -> ConvProblem:
    doubles = {"token": torch.float64, "window": torch.float64, "weights": torch.float64}
    return ConvProblem(seed=seed, **{**doubles, **options})


def torch_convolution(call: ConvDecodeCall | ConvExtendCall, window: Tensor, tokens: Tensor) -> Tensor:
    """torch.nn.functional.conv1d of one sequence, tokens [L, C]."""
    line = torch.cat([window, tokens.T], dim=1)[None]
    y = torch.nn.functional.conv1d(line, call.weight[:, None], call.bias, groups=tokens.shape[1])[0].T
    return torch.nn.functional.silu(y) if call.activation else y


def test_it_implements_the_port(oracle: ReferenceShortConvolution) -> None:
    assert isinstance(oracle, ShortConvolution)


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_extend_is_torchs_convolution(
    oracle: ReferenceShortConvolution, seed: int, width: int, bias: bool, activation: str | None
) -> None:
    call = problem(seed, width=width, bias=bias, activation=activation).extend([3, 0, 5], [1, 6, 11])
    before = copied(call)
    out = oracle.extend(call)
    assert out is call.out
    for slot, start, end in ((3, 0, 1), (0, 1, 7), (5, 7, 18)):
        window, tokens = before.windows[slot], before.x[start:end]
        assert relative_error(out[start:end], torch_convolution(call, window, tokens)) < EXACT, f"seed {seed}"
        kept = torch.cat([window, tokens.T], dim=1)[:, end - start :]
        assert same_bits(call.windows[slot], kept), f"seed {seed}"


def test_decode_is_the_published_models_update(oracle: ReferenceShortConvolution, seed: int) -> None:
    published = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    call = problem(seed, bias=False).decode([4, 1, 2])
    state = call.windows[[4, 1, 2]]
    expected = published.torch_causal_conv1d_update(call.x[:, :, None], state, call.weight)[:, :, 0]
    assert relative_error(oracle.decode(call), expected) < EXACT, f"seed {seed}"
    assert same_bits(call.windows[[4, 1, 2]], state), f"seed {seed}"


def test_extend_after_cached_tokens_is_the_published_models(oracle: ReferenceShortConvolution, seed: int) -> None:
    published = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    call = problem(seed).extend([2], [5])
    state = call.windows[[2]]
    expected = published.torch_causal_conv1d_update(call.x.T[None], state, call.weight, call.bias)[0].T
    assert relative_error(oracle.extend(call), expected) < EXACT, f"seed {seed}"
    assert same_bits(call.windows[[2]], state), f"seed {seed}"


@pytest.mark.case("C30")
def test_two_tokens_shift_a_window_of_three(oracle: ReferenceShortConvolution) -> None:
    windows = torch.tensor([[[1.0, 2.0, 3.0]]])
    call = ConvExtendCall(
        x=torch.tensor([[4.0], [5.0]]), weight=torch.tensor([[1000.0, 100.0, 10.0, 1.0]]), windows=windows,
        slots=torch.tensor([0]), cu_seqlens=torch.tensor([0, 2]), activation=None,
    )  # fmt: skip
    assert oracle.extend(call).tolist() == [[1234.0], [2345.0]]
    assert windows.tolist() == [[[3.0, 4.0, 5.0]]]


def test_padding_gives_zeros_and_writes_nothing(oracle: ReferenceShortConvolution, seed: int) -> None:
    drawn = problem(seed)
    for call in (drawn.decode([-1, 2, -1]), drawn.extend([-1, 2, -1], [2, 0, 3])):
        before = call.windows.clone()
        out = oracle.decode(call) if isinstance(call, ConvDecodeCall) else oracle.extend(call)
        assert not out[[0, -1]].any(), f"seed {seed}"
        assert same_bits(call.windows[[0, 1, 3, 8]], before[[0, 1, 3, 8]]), f"seed {seed}"


def test_an_empty_sequence_leaves_its_window_even_if_fresh(oracle: ReferenceShortConvolution, seed: int) -> None:
    call = problem(seed).extend([1, 2], [0, 3], fresh=[True, False], write_slots=[4, 2])
    before = call.windows.clone()
    oracle.extend(call)
    assert same_bits(call.windows[[1, 4]], before[[1, 4]]), f"seed {seed}"


def test_a_fresh_sequence_ignores_the_nan_in_its_slot(oracle: ReferenceShortConvolution, seed: int) -> None:
    call = problem(seed).extend([1, 2], [2, 3], fresh=[True, False])
    assert call.windows[1].isnan().all()
    out = oracle.extend(call)
    expected = torch_convolution(call, torch.zeros_like(call.windows[1]), call.x[:2])
    assert relative_error(out[:2], expected) < EXACT, f"seed {seed}"
    assert call.windows[1].isfinite().all(), f"seed {seed}"


def test_write_slots_redirect(oracle: ReferenceShortConvolution, seed: int) -> None:
    call = problem(seed).decode([1, 2, 3], write_slots=[4, 2, -1])
    before = copied(call)
    out = oracle.decode(call)
    for row, (read, write) in enumerate(((1, 4), (2, 2), (3, None))):
        expected = torch_convolution(call, before.windows[read], call.x[row : row + 1])
        assert relative_error(out[row : row + 1], expected) < EXACT, f"seed {seed}"
        if write is not None:
            assert same_bits(call.windows[write][:, -1], call.x[row]), f"seed {seed}"
    assert same_bits(call.windows[[1, 3]], before.windows[[1, 3]]), f"seed {seed}"


@pytest.mark.parametrize("parents", [None, [[-1, 0, 0, 1, -1], [-1, -1, 1, 2, 3]]])
def test_a_node_is_the_end_of_its_path(
    oracle: ReferenceShortConvolution, seed: int, parents: list[list[int]] | None
) -> None:
    drawn = problem(seed)
    call = drawn.verify([3, 6], 5, rows=[2, 0], parents=parents)
    before = call.windows.clone()
    out = oracle.verify(call)
    assert same_bits(call.windows, before), f"seed {seed}"
    for i, slot in enumerate((3, 6)):
        for node in range(5):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = at - 1 if parents is None else parents[i][at]
            tokens = call.x[i, path]
            expected = torch_convolution(call, before[slot], tokens)[-1]
            assert relative_error(out[i, node], expected) < EXACT, f"seed {seed} row {i} node {node}"
            kept = torch.cat([before[slot], tokens.T], dim=1)[:, len(path) :]
            assert same_bits(call.intermediates[(2, 0)[i], node], kept), f"seed {seed} row {i} node {node}"
    assert call.intermediates[1].isnan().all(), f"seed {seed}"
    assert call.intermediates[:, 5].isnan().all(), f"seed {seed}"


@pytest.mark.case("C27")
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_after_commit_decode_follows_the_accepted_tokens(
    oracle: ReferenceShortConvolution, seed: int, accepted: int
) -> None:
    drawn = problem(seed)
    verify, follow = drawn.verify([4], 3), drawn.decode([4])
    windows, slots = verify.windows, verify.slots
    extend = ConvExtendCall(
        x=torch.cat([verify.x[0, :accepted], follow.x]), weight=verify.weight, bias=verify.bias, slots=slots,
        windows=windows.clone(), cu_seqlens=torch.tensor([0, accepted + 1]),
    )  # fmt: skip
    oracle.verify(verify)
    last = torch.tensor([accepted - 1])
    oracle.commit(ConvCommitCall(windows=windows, slots=slots, intermediates=verify.intermediates, last=last))
    got = oracle.decode(replace(follow, windows=windows, weight=verify.weight, bias=verify.bias))
    assert relative_error(got[0], oracle.extend(extend)[-1]) < EXACT, f"seed {seed}"
    assert same_bits(windows[4], extend.windows[4]), f"seed {seed}"


def test_float32_keeps_its_bound(oracle: ReferenceShortConvolution, seed: int) -> None:
    single = ReferenceShortConvolution(torch.float32)
    bound = single.capabilities.precision[Phase.EXTEND].bound("bfloat16", "bfloat16")
    bf16 = dict.fromkeys(("token", "window", "weights"), torch.bfloat16)
    call = problem(seed, **bf16).extend([0, 1], [3, 40])
    exact = copied(call)
    exact = replace(exact, x=exact.x.double(), out=None)
    assert relative_error(single.extend(call), oracle.extend(exact)) < bound.output, f"seed {seed}"


def test_empty_batches_are_legal(oracle: ReferenceShortConvolution, seed: int) -> None:
    drawn = problem(seed)
    assert oracle.decode(drawn.decode([])).shape == (0, 24)
    assert oracle.extend(drawn.extend([], [])).shape == (0, 24)
    assert oracle.verify(drawn.verify([], 3)).shape == (0, 3, 24)


def test_bad_calls_are_refused_before_anything_is_written(oracle: ReferenceShortConvolution, seed: int) -> None:
    call = problem(seed).decode([1, 2])
    assert call.out is not None
    with pytest.raises(ShapeError, match="weight"):
        oracle.decode(replace(call, weight=call.weight[:-1]))
    with pytest.raises(ValueRangeError, match="slots"):
        oracle.decode(replace(call, slots=call.slots + 7))
    assert call.out.isnan().all(), f"seed {seed}"


def test_another_device_is_unsupported_with_the_reason(seed: int) -> None:
    gpu = ReferenceShortConvolution(torch.float64, "cuda")
    call = problem(seed).decode([1])
    assert gpu.supports(call).reasons == ("device requires cuda, got cpu",)
    with pytest.raises(UnsupportedError, match="device requires cuda"):
        gpu.decode(call)
    plan = ConvPlan(
        channels=24, width=4, window_dtype=torch.float64, token_dtype=torch.float64, device=torch.device("cpu"),
        max_batch=2, max_tokens=8,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="device requires cuda"):
        gpu.prepare(plan)


def test_a_closed_one_refuses(oracle: ReferenceShortConvolution, seed: int) -> None:
    oracle.close()
    oracle.close()
    with pytest.raises(ClosedError):
        oracle.decode(problem(seed).decode([1]))
