"""What decode waits for before it asks for the state, read in the machine code that ptxas makes for Hopper.

The launch is bound by memory; what else is loaded is small and comes from a cache. Where a wait for it stands before
the state's loads, 256 rows took 2 percent longer on an H200 (benchmarks/results/decode_variants.json).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from without_device import HopperWithoutDevice, in_place_of_the_driver

from qwen35.adapters.triton.kernels import gdn_config, gdn_decode
from qwen35.ports.gated_delta_rule import DecodeCall, Gates, LogGates, RawGates

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")

WIDTH = 128
#: Bytes that one load of sixteen a lane brings.
WIDE_LOAD = 16 * 32
#: Instructions that read or write global memory.
MEMORY = re.compile(r"\b(LDG|STG|ATOMG?|RED|LDGSTS|UBLKCP)\b")
BOTH = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Instruction:
    """``sets``: the scoreboard that is released when its result is there (None: none). ``waits``: the scoreboards that
    must be free before it is issued. Volta and later hold them in bits 110 to 112 and 116 to 121 of the instruction
    (Jia et al., Dissecting the NVIDIA Volta GPU architecture, arXiv:1804.06826, section 2.1)."""

    text: str
    sets: int | None
    waits: frozenset[int]

    @property
    def loads(self) -> bool:
        return "LDG." in self.text

    @property
    def loads_states(self) -> bool:
        return self.loads and ".128" in self.text


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[HopperWithoutDevice]:
    with in_place_of_the_driver(monkeypatch, HopperWithoutDevice(), gdn_decode.decode_kernel) as one:
        yield one


def decode(
    state: torch.dtype, gate: torch.dtype, bias: torch.dtype | None, heads: int = 32, key_heads: int = 16
) -> DecodeCall:
    """One row of bfloat16 tokens. ``bias``: the dtype of dt_bias; None: log gates, of the dtype ``gate``."""
    gates: Gates
    if bias is None:
        gates = LogGates(g=torch.zeros(1, heads, dtype=gate), beta=torch.zeros(1, heads, dtype=gate))
    else:
        raw = torch.zeros(1, heads, dtype=gate)
        gates = RawGates(a=raw, b=raw, A_log=torch.zeros(heads), dt_bias=torch.zeros(heads, dtype=bias))
    key = torch.zeros(1, key_heads, WIDTH, dtype=torch.bfloat16)
    return DecodeCall(
        q=key, k=key, v=torch.zeros(1, heads, WIDTH, dtype=torch.bfloat16), gates=gates,
        states=torch.zeros(1, heads, WIDTH, WIDTH, dtype=state), slots=torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip


def instructions(binary: bytes, folder: Path) -> list[Instruction]:
    """The machine code of one kernel, in order."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary)
    listed = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-sass", cubin], capture_output=True, text=True, check=True
    )
    found = re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+([^;]+);\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/", listed.stdout
    )
    return [read(text, int(upper, 16)) for text, upper in found]


def read(text: str, upper: int) -> Instruction:
    """``upper``: bits 64 to 127."""
    sets, waits = upper >> 46 & 7, upper >> 52 & 63
    return Instruction(text, None if sets == 7 else sets, frozenset(i for i in range(6) if waits >> i & 1))


def waited_for(code: list[Instruction]) -> list[str]:
    """The loads from memory that must have come before the first load of a state is issued."""
    waiting: dict[int, list[str]] = {}
    come: list[str] = []
    for one in code:
        for board in one.waits:
            come += waiting.pop(board, [])
        if one.loads_states:
            return come
        if one.sets is not None and one.loads:
            waiting.setdefault(one.sets, []).append(one.text)
    raise AssertionError("no load of a state in this kernel")


def compiled(hopper: HopperWithoutDevice, call: DecodeCall, states: int, folder: Path) -> list[Instruction]:
    """The code for ``call`` with the tile for ``states`` states; it loads a tile by loads of sixteen bytes a lane."""
    config = gdn_config.decode_config(WIDTH, WIDTH, call.states.element_size(), states)
    gdn_decode.launch_decode(call, torch.empty_like(call.v), config)
    code = instructions(hopper.binaries[-1], folder)
    tile = config.block_v * WIDTH * call.states.element_size()
    assert sum(one.loads_states for one in code) == tile // (WIDE_LOAD * config.num_warps)
    return code


@pytest.mark.parametrize("states", [32, 8192])
@pytest.mark.parametrize("state", BOTH, ids=str)
@pytest.mark.parametrize(
    ("gate", "bias"), [*product(BOTH, BOTH), (torch.float32, None), (torch.bfloat16, None)], ids=str
)
def test_decode_waits_for_nothing_but_the_slot_before_it_asks_for_the_state(
    hopper: HopperWithoutDevice, tmp_path: Path, state: torch.dtype, gate: torch.dtype, bias: torch.dtype | None,
    states: int,
) -> None:  # fmt: skip
    come = waited_for(compiled(hopper, decode(state, gate, bias), states, tmp_path))
    assert len(come) == 1, come


@pytest.mark.parametrize(
    "change",
    [{"write_slots": torch.zeros(1, dtype=torch.int32)}, {"slots": torch.zeros(1, dtype=torch.int64)}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (32, 16), (64, 16)])
def test_so_it_is_for_other_slots_and_heads(
    hopper: HopperWithoutDevice, tmp_path: Path, change: dict[str, Any], heads: int, key_heads: int
) -> None:
    call = replace(decode(torch.float32, torch.bfloat16, torch.bfloat16, heads, key_heads), **change)
    come = waited_for(compiled(hopper, call, 8192, tmp_path))
    assert len(come) == 1, come


@pytest.mark.parametrize("states", [32, 8192])
@pytest.mark.parametrize("write_slots", [None, torch.zeros(1, dtype=torch.int32)], ids=["in place", "write slots"])
def test_on_hopper_it_begins_early_and_touches_no_memory_before_the_kernel_ahead_has_ended(
    hopper: HopperWithoutDevice, tmp_path: Path, write_slots: torch.Tensor | None, states: int
) -> None:
    call = replace(decode(torch.float32, torch.bfloat16, torch.bfloat16), write_slots=write_slots)
    code = [one.text for one in compiled(hopper, call, states, tmp_path)]
    assert hopper.dependent == [True]
    first = next(at for at, text in enumerate(code) if MEMORY.search(text))
    assert [at for at, text in enumerate(code) if "ACQBULK" in text and at < first], code[: first + 1]


class AmpereWithoutDevice(HopperWithoutDevice):
    arch = 80


def test_before_hopper_it_begins_when_the_kernel_ahead_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dependent launches came with compute capability 9.0."""
    call = decode(torch.float32, torch.bfloat16, torch.bfloat16)
    with in_place_of_the_driver(monkeypatch, AmpereWithoutDevice(), gdn_decode.decode_kernel) as ampere:
        code = compiled(ampere, call, 32, tmp_path)
    assert ampere.dependent == [False]
    assert not [one for one in code if "ACQBULK" in one.text]


def test_a_wait_for_a_gate_is_seen() -> None:
    """A slot and a gate share scoreboard 2; what computes the state's address waits for both."""

    def one(text: str, sets: int | None = None, *waits: int) -> Instruction:
        return Instruction(text, sets, frozenset(waits))

    gate, state = one("LDG.E.U16 R4", 2), one("@P0 LDG.E.128 R8", 3)
    code = [one("LDG.E R2", 2), gate, one("IMAD.WIDE R6", None, 2), state, one("FADD", None, 3)]
    assert waited_for(code) == ["LDG.E R2", gate.text]
    apart = [one("LDG.E R2", 2), replace(gate, sets=1), *code[2:4], one("FADD", None, 1)]
    assert waited_for(apart) == ["LDG.E R2"]
    assert read("LDG.E R2", 0x0022_A200_0C1E_1900) == one("LDG.E R2", 2, 1)
    assert read("FADD R2", 0x004F_CE00_0000_0000) == one("FADD R2", None, 2)
