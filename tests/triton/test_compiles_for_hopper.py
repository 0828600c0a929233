"""What a machine without a GPU can show: kernels compile for Hopper and fit its shared memory, grids fit its axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from without_device import (
    HEADS,
    HOPPER_SHARED_BYTES,
    KEY_HEADS,
    HopperWithoutDevice,
    in_place_of_the_driver,
    pool,
    tokens,
)

from qwen35.adapters.triton.kernels import (
    conv_commit,
    conv_decode,
    conv_extend,
    conv_verify,
    gdn_config,
    gdn_decode,
    gdn_extend,
    gdn_extend_launch,
    gdn_verify,
)
from qwen35.adapters.triton.kernels.gdn_launch import dot_dtype
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    CommitCall,
    DecodeCall,
    ExtendCall,
    LogGates,
    RawGates,
    VerifyCall,
)
from qwen35.ports.short_convolution import ConvCommitCall, ConvDecodeCall, ConvExtendCall, ConvVerifyCall
from qwen35.services.scratch import empty_aligned

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")

#: Programs along axes 1 and 2 of a grid (the same table).
MOST_ACROSS = 65_535


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[HopperWithoutDevice]:
    kernels = (
        gdn_decode.decode_kernel, gdn_verify.verify_kernel, gdn_verify.commit_kernel, gdn_extend.chunk_kernel,
        gdn_extend.scan_kernel, conv_decode.conv_decode_kernel, conv_extend.conv_extend_kernel,
        conv_verify.conv_verify_kernel, conv_commit.conv_commit_kernel,
    )  # fmt: skip
    with in_place_of_the_driver(monkeypatch, HopperWithoutDevice(), *kernels) as one:
        yield one


def room_for(launch: gdn_extend_launch.ExtendLaunch) -> torch.Tensor:
    return empty_aligned((launch.scratch_bytes,), torch.uint8, torch.device("cpu"), 256)


BOTH = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("states", [HEADS, 1 << 20])
@pytest.mark.parametrize("state_dtype", BOTH)
def test_decode_compiles(hopper: HopperWithoutDevice, state_dtype: torch.dtype, states: int) -> None:
    call = DecodeCall(**tokens(128, 128, torch.bfloat16, 1), **pool(128, 128, state_dtype))
    config = gdn_config.decode_config(128, 128, state_dtype.itemsize, states)
    gdn_decode.launch_decode(call, torch.empty_like(call.v), config)
    assert hopper.loaded == ["decode_kernel"]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_a_decode_that_comes_again_is_launched_with_the_same_arguments(
    hopper: HopperWithoutDevice, raw: bool, writes: bool
) -> None:
    """Triton looks for the kernel once; where an address is another multiple of 16 or none, it looks again."""
    call = DecodeCall(**tokens(128, 128, torch.bfloat16, 1), **pool(128, 128, torch.float32), scale=0.25)
    if not raw:
        call = replace(call, gates=LogGates(g=torch.zeros(1, HEADS), beta=torch.zeros(1, HEADS)))
    if writes:
        call = replace(call, write_slots=torch.zeros(1, dtype=torch.int32))
    off = replace(call, q=torch.zeros(KEY_HEADS * 128 + 4, dtype=torch.bfloat16)[4:].view(call.q.shape))
    out = torch.empty_like(call.v)
    launch = gdn_decode.DecodeLaunch(call, gdn_config.decode_config(128, 128, 4, HEADS), (HEADS * 128, 128))
    for made in (off, call, call, off, replace(call, k=call.k.clone()), off):
        launch(made, out)
    assert hopper.loaded == ["decode_kernel"] * 2
    assert [function for function, _ in hopper.launched] == [1, 2, 2, 1, 2, 1]
    (_, first), (_, again) = hopper.launched[1:3]
    assert len(first) == len(again)
    assert [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in first] == list(again)
    named = dict(zip(gdn_decode.decode_kernel.arg_names, again, strict=True))
    config = gdn_config.decode_config(128, 128, 4, HEADS)
    expected = {
        "scale": 0.25, "q_row": KEY_HEADS * 128, "q_head": 128, "v_row": HEADS * 128, "gate_row": HEADS,
        "out_row": HEADS * 128, "out_head": 128, "slot_stride": HEADS * 128 * 128, "HV": HEADS,
        "RATIO": HEADS // KEY_HEADS, "K": 128, "V": 128, "INNER": config.inner, "PIECES": 128 // config.inner,
        "BLOCK_V": config.block_v, "RAW": raw, "STREAM": config.stream,
    }  # fmt: skip
    assert {name: named[name] for name in expected} == expected
    for name, tensor in (("q", call.q), ("states", call.states), ("out", out), ("write_slots", call.write_slots)):
        assert named[name] == (None if tensor is None else tensor.data_ptr())


@pytest.mark.parametrize("tree", [False, True])
def test_verify_and_commit_compile(hopper: HopperWithoutDevice, tree: bool) -> None:
    at = pool(128, 128, torch.float32)
    kept = torch.zeros(1, 2, HEADS, 128, 128)
    parents = torch.zeros(1, 2, dtype=torch.int64) if tree else None
    call = VerifyCall(**tokens(128, 128, torch.bfloat16, 1, 2), **at, intermediates=kept, parents=parents)
    gdn_verify.launch_verify(call, torch.empty_like(call.v), gdn_config.verify_config(128, 128, 4))
    gdn_verify.launch_commit(CommitCall(**at, intermediates=kept, last=at["slots"]))
    assert hopper.loaded == ["verify_kernel", "commit_kernel"]


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "sequences", "checkpoints"),
    [
        (torch.bfloat16, 128, 128, 1, False), (torch.bfloat16, 128, 128, 512, True), (torch.bfloat16, 32, 16, 1, False),
        (torch.bfloat16, 256, 128, 1, False), (torch.float32, 32, 16, 1, False),
    ],
)  # fmt: skip
def test_extend_compiles(
    hopper: HopperWithoutDevice, dtype: torch.dtype, width: int, value_width: int, sequences: int, checkpoints: bool
) -> None:
    starts = torch.zeros(2, dtype=torch.int64)
    call = ExtendCall(
        **tokens(width, value_width, dtype, 64), **pool(width, value_width, torch.float32),
        cu_seqlens=torch.tensor([0, 64], dtype=torch.int32),
        checkpoints=CheckpointPlan(every=64, starts=starts, count=1) if checkpoints else None,
    )  # fmt: skip
    dot = dot_dtype(dtype, interpreted=False)
    config = gdn_config.extend_config(sequences, HEADS, width, value_width, dot.itemsize, HOPPER_SHARED_BYTES)
    launch = gdn_extend_launch.ExtendLaunch(call, config, dot, (HEADS * value_width, value_width))
    kept = torch.zeros_like(call.states) if checkpoints else None
    launch(call, torch.empty_like(call.v), kept, room_for(launch))
    assert hopper.loaded == ["chunk_kernel", "scan_kernel"]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_an_extend_that_comes_again_is_launched_with_the_same_arguments(
    hopper: HopperWithoutDevice, raw: bool, more: bool
) -> None:
    """``more``: write slots, fresh flags and checkpoints too. For an address that is no multiple of 16 Triton looks
    again."""
    call = ExtendCall(
        **tokens(128, 128, torch.bfloat16, 64), **pool(128, 128, torch.float32), scale=0.25,
        cu_seqlens=torch.tensor([0, 64], dtype=torch.int32),
    )  # fmt: skip
    wide = torch.zeros(64, 2 * HEADS, dtype=torch.bfloat16 if raw else torch.float32)[:, :HEADS]
    gates = replace(call.gates, b=wide) if raw else LogGates(g=torch.zeros(64, HEADS), beta=wide)
    call = replace(call, k=call.k.clone(), gates=gates)
    if more:
        plan = CheckpointPlan(every=64, starts=torch.tensor([0, 1]), count=1)
        call = replace(call, write_slots=call.slots.clone(), fresh=torch.zeros(1, dtype=torch.bool), checkpoints=plan)
    off = replace(call, q=torch.zeros(call.q.numel() + 4, dtype=torch.bfloat16)[4:].view(call.q.shape))
    out, kept = torch.empty_like(call.v), torch.zeros_like(call.states) if more else None
    config = gdn_config.extend_config(1, HEADS, 128, 128, 2, HOPPER_SHARED_BYTES)
    launch = gdn_extend_launch.ExtendLaunch(call, config, torch.bfloat16, (HEADS * 128, 128))
    room = room_for(launch)
    for made in (call, call, off, replace(call, v=call.v.clone())):
        launch(made, out, kept, room)
    assert hopper.loaded == ["chunk_kernel", "scan_kernel"] * 2
    assert [function for function, _ in hopper.launched] == [1, 2, 1, 2, 3, 4, 1, 2]
    firsts, again = ([arguments for _, arguments in hopper.launched[at : at + 2]] for at in (0, 2))
    for first, same in zip(firsts, again, strict=True):
        assert [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in first] == list(same)
    kernels = gdn_extend.chunk_kernel, gdn_extend.scan_kernel
    chunks, scan = (dict(zip(kernel.arg_names, by, strict=True)) for kernel, by in zip(kernels, again, strict=True))
    both = {"q_row": KEY_HEADS * 128, "k_head": 128, "tokens": 64, "HV": HEADS, "RATIO": HEADS // KEY_HEADS, "K": 128}
    expected = both | {"scale": 0.25, "sequences": 1, "gate_row": HEADS, "beta_row": 2 * HEADS, "RAW": raw}
    assert {name: chunks[name] for name in expected} == expected
    expected = both | {"v_row": HEADS * 128, "out_row": HEADS * 128, "out_head": 128, "V": 128, "every": 64}
    expected |= {"slot_stride": HEADS * 128 * 128, "BLOCK_V": config.block_v}
    assert {name: scan[name] for name in expected} == expected
    tensors = {
        "q": call.q, "k": call.k, "v": call.v, "states": call.states, "slots": call.slots, "fresh": call.fresh,
        "cu_seqlens": call.cu_seqlens, "write_slots": call.write_slots, "out": out, "checkpoints": kept,
        "starts": call.checkpoints.starts if call.checkpoints else None, "inverse": room,
    }  # fmt: skip
    for name, tensor in tensors.items():
        assert scan[name] == (None if tensor is None else tensor.data_ptr()), name
    for name in ("q", "k", "slots", "cu_seqlens", "inverse"):
        assert chunks[name] == tensors[name].data_ptr(), name
    assert chunks["beta"] == wide.data_ptr()


@pytest.mark.parametrize(("name", "again"), [("q", 0), ("k", 0), ("v", 1), ("states", 1), ("out", 1), ("kept", 1)])
def test_an_extend_is_looked_up_where_one_address_is_no_multiple_of_16(
    hopper: HopperWithoutDevice, name: str, again: int
) -> None:
    """``again``: the kernels, of the two, that do not read it and are launched as they were."""

    def off(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.numel() + 2, dtype=like.dtype)[2:].view(like.shape)

    call = ExtendCall(
        **tokens(128, 128, torch.bfloat16, 64), **pool(128, 128, torch.float32),
        cu_seqlens=torch.tensor([0, 64], dtype=torch.int32),
        checkpoints=CheckpointPlan(every=64, starts=torch.tensor([0, 1]), count=1),
    )  # fmt: skip
    config = gdn_config.extend_config(1, HEADS, 128, 128, 2, HOPPER_SHARED_BYTES)
    launch = gdn_extend_launch.ExtendLaunch(call, config, torch.bfloat16, (HEADS * 128, 128))
    room, written = room_for(launch), {"out": torch.empty_like(call.v), "kept": torch.zeros_like(call.states)}
    launch(call, written["out"], written["kept"], room)
    if name in written:
        written[name] = off(written[name])
    else:
        call = replace(call, **{name: off(getattr(call, name))})
    launch(call, written["out"], written["kept"], room)
    functions = [function for function, _ in hopper.launched]
    assert functions[:2] == [1, 2]
    assert [function in (1, 2) for function in functions[2:]] == [again == 1, False]


@pytest.mark.parametrize("sequences", [1, 512])
@pytest.mark.parametrize("width", [16, 128, 192, 256])
def test_hopper_never_walks_two_byte_operands_without_pipelining(width: int, sequences: int) -> None:
    """ptxas 12.8 of Triton 3.6 and 3.7 leaves operand addresses of such a loop undefined (docs/upstream.md)."""
    for value_width in (16, 128, 256):
        config = gdn_config.extend_config(sequences, HEADS, width, value_width, 2, HOPPER_SHARED_BYTES)
        assert config.scan_stages >= 2, (width, value_width, sequences)


#: Case C8: with a program for every row and head along axis 1 or 2, there would be 65,536.
ROWS, MANY_HEADS, MANY_KEY_HEADS, WIDTH = 2048, 32, 16, 128


def many(*leading: int) -> dict[str, Any]:
    """Tokens of 2,048 rows over one slot."""
    gates = torch.zeros(*leading, MANY_HEADS)
    parameter = torch.zeros(MANY_HEADS)
    keys = torch.zeros(*leading, MANY_KEY_HEADS, WIDTH, dtype=torch.bfloat16)
    return {
        "q": keys, "k": keys, "v": torch.zeros(*leading, MANY_HEADS, WIDTH, dtype=torch.bfloat16),
        "gates": RawGates(a=gates, b=gates, A_log=parameter, dt_bias=parameter),
        "states": torch.zeros(1, MANY_HEADS, WIDTH, WIDTH), "slots": torch.zeros(ROWS, dtype=torch.int32),
    }  # fmt: skip


def fits(grids: dict[str, tuple[int, int, int]], expected: dict[str, int]) -> None:
    """``expected``: programs along axis 0, by kernel."""
    assert {name: grid[0] for name, grid in grids.items()} == expected
    assert all(axis <= MOST_ACROSS for _, *across in grids.values() for axis in across), grids


@pytest.mark.case("C8")
def test_gdn_grids_of_2048_rows_exist(hopper: HopperWithoutDevice) -> None:
    call = DecodeCall(**many(ROWS))
    gdn_decode.launch_decode(call, torch.empty_like(call.v), gdn_config.decode_config(WIDTH, WIDTH, 4, HEADS))
    draft = VerifyCall(**many(ROWS, 2), intermediates=call.states[:, None].expand(ROWS, 2, -1, -1, -1))
    gdn_verify.launch_verify(draft, torch.empty_like(draft.v), gdn_config.verify_config(WIDTH, WIDTH, 4))
    gdn_verify.launch_commit(
        CommitCall(states=call.states, slots=call.slots, intermediates=draft.intermediates, last=call.slots)
    )
    extend = ExtendCall(**many(ROWS), cu_seqlens=torch.arange(ROWS + 1, dtype=torch.int32))
    config = gdn_config.extend_config(ROWS, MANY_HEADS, WIDTH, WIDTH, 2, HOPPER_SHARED_BYTES)
    launch = gdn_extend_launch.ExtendLaunch(extend, config, torch.bfloat16, (MANY_HEADS * WIDTH, WIDTH))
    launch(extend, torch.empty_like(extend.v), None, room_for(launch))
    fits(
        hopper.grids,
        {
            "decode_kernel": 2_097_152,  # 2048 rows, 32 heads, 32 blocks of 4 state rows
            "verify_kernel": 1_048_576,  # 16 blocks of 8
            "commit_kernel": 262_144,  # 2048 rows, 524,288 elements in blocks of 4096
            "chunk_kernel": 66_560,  # 2048 / 64 + 2048 chunk numbers, 32 heads
            "scan_kernel": 131_072,  # 2048 sequences, 32 heads, 2 blocks of 64 state rows
        },
    )


@pytest.mark.case("C8")
def test_conv_grids_of_2048_rows_exist(hopper: HopperWithoutDevice) -> None:
    channels, taps = (2 * MANY_KEY_HEADS + MANY_HEADS) * WIDTH, 4
    x = torch.zeros(ROWS, channels, dtype=torch.bfloat16)
    draft = torch.zeros(ROWS, 4, channels, dtype=torch.bfloat16)
    windows = torch.zeros(1, channels, taps - 1, dtype=torch.bfloat16)
    kept = windows[:, None].expand(ROWS, 4, -1, -1)
    at: dict[str, Any] = {"windows": windows, "slots": torch.zeros(ROWS, dtype=torch.int32)}
    by = {**at, "weight": torch.zeros(channels, taps, dtype=torch.bfloat16)}
    conv_decode.launch(ConvDecodeCall(x=x, **by), torch.empty_like(x))
    offsets = torch.arange(ROWS + 1, dtype=torch.int32)
    conv_extend.launch(ConvExtendCall(x=x, **by, cu_seqlens=offsets), torch.empty_like(x))
    conv_verify.launch(ConvVerifyCall(x=draft, **by, intermediates=kept), torch.empty_like(draft))
    conv_commit.launch(ConvCommitCall(**at, intermediates=kept, last=at["slots"]))
    fits(
        hopper.grids,
        {
            "conv_decode_kernel": 2048,
            "conv_extend_kernel": 2176,  # 2048 / 16 + 2048 blocks of tokens
            "conv_verify_kernel": 8192,  # 2048 rows of 4 nodes
            "conv_commit_kernel": 2048,
        },
    )
    # 8192 channels by 128 and by 256, 24,576 elements of a window by 1024
    across = {name: grid[1] for name, grid in hopper.grids.items()}
    assert sorted(across.values()) == [24, 32, 64, 64]
