"""How the finalize kernels are cut and launched: sizes worked out on the host, then one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import triton.language as tl
from torch import Tensor

from qwen35.adapters.triton.finalize_mailboxes import Mailboxes
from qwen35.adapters.triton.kernels.finalize_one_shot import finalize_one_shot
from qwen35.adapters.triton.kernels.finalize_two_step import finalize_two_step
from qwen35.domain.alignment import power_of_two
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.finalize_signature import WorkspaceSignature

_TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16}
_WORDS = {"float32": tl.int32, "bfloat16": tl.int16}

#: Registers a thread, so that the number of resident programs is known before compilation.
_REGISTERS = 128

#: Bytes of one access, and of the row alignment that it needs.
_ACCESS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was measured, and may be measured again (``benchmarks/finalize.py``).

    ``wire``: element type between ranks; float32 keeps every rounding but the last away. ``max_splits``: most
    programs that share a row; ``min_slice``: fewest columns of one; ``crowding``: programs a multiprocessor that
    sharing rows may make. ``pieces``: most sends that a one-shot program makes of what it has of a row; ``min_piece``:
    fewest columns of one; both are powers of two, since a Triton block is. ``wave``: programs a multiprocessor of a
    launch that loops over rows (None: as many as are resident). ``words_a_thread`` sets the warps of a program.
    ``one_shot_rows``: rows up to which a launch is one-shot, by number of ranks (nearest number below).

    Raises ``ConfigurationError`` where ``pieces`` or ``min_piece`` is no power of two.
    """

    wire: str = "float32"
    max_splits: int = 8
    min_slice: int = 256
    crowding: int = 1
    pieces: int = 4
    min_piece: int = 512
    wave: int | None = None
    words_a_thread: int = 32
    one_shot_rows: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({1: 1 << 30, 3: 128, 6: 64}))

    def __post_init__(self) -> None:
        for name, count in (("pieces", self.pieces), ("min_piece", self.min_piece)):
            if count < 1 or count & (count - 1):
                raise ConfigurationError(f"{name} must be a power of two, got {count}")

    def one_shot(self, rows: int, ranks: int) -> bool:
        """Whether a launch of ``rows`` is one-shot. Each row costs N - 1 sends in one shot, about 2 in two steps."""
        return rows <= self.one_shot_rows[max(n for n in self.one_shot_rows if n <= ranks)]


@dataclass(frozen=True, slots=True)
class Cut:
    """Launch arithmetic of one signature on one device."""

    signature: WorkspaceSignature
    multiprocessors: int
    tuning: Tuning

    def splits(self, rows: int) -> int:
        """Programs that share a row: as many as leave each row's programs resident together."""
        hidden, splits = self.signature.hidden, self.tuning.max_splits
        while splits > 1 and (
            rows * splits > self._room or hidden % (_ACCESS // 2 * splits) or hidden // splits < self.tuning.min_slice
        ):
            splits //= 2
        return splits

    def one_shot(self, rows: int) -> bool:
        """Whether a launch of ``rows`` is one-shot."""
        return self.tuning.one_shot(rows, self.signature.tp_size)

    def single(self, rows: int) -> bool:
        """Whether a one-shot launch of ``rows`` has a program for each row."""
        return self.splits(rows) == 1 and rows <= self.wave

    def pieces(self, columns: int) -> int:
        """Sends that ``columns``, a power of two, are cut into."""
        return max(1, min(self.tuning.pieces, columns // self.tuning.min_piece))

    def kernel(self, rows: int) -> tuple[int, bool]:
        """What a launch of ``rows`` is compiled for: programs that share a row (0: two-step), and ``single``."""
        return (self.splits(rows), self.single(rows)) if self.one_shot(rows) else (0, False)

    @property
    def split_rows(self) -> int:
        """Rows from there on are never shared by programs."""
        return self._room // 2 + 1

    @property
    def _room(self) -> int:
        """Most programs of a launch whose programs share rows, all of them resident together."""
        return min(self.multiprocessors * self.tuning.crowding, self.resident)

    @property
    def block(self) -> int:
        return power_of_two(self.signature.hidden)

    @property
    def sources(self) -> int:
        return power_of_two(self.signature.tp_size)

    @property
    def warps(self) -> int:
        wanted = self.block * max(self.sources, 2) // (32 * self.tuning.words_a_thread)
        return min(16, max(4, wanted))

    @property
    def resident(self) -> int:
        """Programs that the device surely holds at once: 64 Ki registers a multiprocessor."""
        return self.multiprocessors * (65536 // (_REGISTERS * 32 * self.warps))

    @property
    def wave(self) -> int:
        """Programs of a launch that loops over rows."""
        wave = self.tuning.wave
        return self.resident if wave is None else min(self.resident, self.multiprocessors * wave)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The tensors of one launch. ``source`` [R, D] routed rows with weights and indices [m, top_k], or [m, D]."""

    source: Tensor
    residual: Tensor
    gamma: Tensor
    norm: Tensor
    out_residual: Tensor
    weights: Tensor | None = None
    indices: Tensor | None = None
    shared: Tensor | None = None


def launch(
    cut: Cut, mail: Mailboxes, rows: Rows, rank: int, *, one_shot: bool, phases: tuple[bool, ...] = (True, True, True),
    spin_limit: int = 0,
) -> None:  # fmt: skip
    """Launch one kernel over ``rows``. ``phases`` (send, reduce, take; a one-shot does the last two as one) are all
    true in service. A positive ``spin_limit`` is checked mode."""
    kernel, programs, arguments = _call(cut, mail, rows, rank, one_shot, phases, spin_limit)
    kernel[(programs,)](**arguments)


def compile_launch(cut: Cut, mail: Mailboxes, rows: Rows, rank: int, *, one_shot: bool, spin_limit: int = 0) -> None:
    """Compile and load the kernel that ``launch`` would run, without running it: no peer is needed, or touched."""
    kernel, programs, arguments = _call(cut, mail, rows, rank, one_shot, (True, True, True), spin_limit)
    compiled = kernel.warmup(grid=(programs,), **arguments)
    if compiled is not None:  # the interpreter has nothing to compile
        _ = compiled.run  # loads it, which would not be legal inside capture


def _call(
    cut: Cut, mail: Mailboxes, rows: Rows, rank: int, one_shot: bool, phases: tuple[bool, ...], spin_limit: int
) -> tuple[Any, int, dict[str, Any]]:
    """The kernel, how many programs, and its arguments."""
    signature, m = cut.signature, rows.residual.shape[0]
    splits = cut.splits(m) if one_shot else 1
    programs = min(m * splits, cut.wave if splits == 1 else cut.resident)
    unused = rows.source
    arguments: dict[str, Any] = {
        "source": rows.source, "weights": unused if rows.weights is None else rows.weights,
        "indices": unused if rows.indices is None else rows.indices,
        "shared": unused if rows.shared is None else rows.shared,
        "residual": rows.residual, "gamma": rows.gamma, "norm_out": rows.norm, "residual_out": rows.out_residual,
        "inbox": mail.inbox, "peers": mail.peers, "epochs": mail.epochs, "missing": mail.missing,
        "m": m, "steps": -(-m * splits // programs), "source_rows": rows.source.shape[0], "rank": rank,
        "split_rows": cut.split_rows, "spin_limit": spin_limit, "eps": signature.eps,
        "weight_bias": signature.weight_bias, "D": signature.hidden,
        "TOP_K": 0 if rows.indices is None else signature.top_k, "SHARED": rows.shared is not None,
        "N": signature.tp_size, "N_POW2": cut.sources, "BLOCK": cut.block, "WIRE": _TYPES[cut.tuning.wire],
        "WORD": _WORDS[cut.tuning.wire], "VECTOR": _ACCESS // mail.inbox.element_size(),
        "SEND": phases[0], "CHECKED": spin_limit > 0, "num_warps": cut.warps, "num_stages": 1, "maxnreg": _REGISTERS,
    }  # fmt: skip
    if one_shot:
        slice_block = power_of_two(signature.hidden // splits)
        return finalize_one_shot, programs, arguments | {
            "SPLITS": splits, "SINGLE": cut.single(m), "SLICE_BLOCK": slice_block,
            "PIECES": cut.pieces(slice_block), "RECEIVE": phases[2],
        }  # fmt: skip
    return finalize_two_step, programs, arguments | {
        "outbox": mail.outbox, "outboxes": mail.outboxes, "TOKEN": _TYPES[signature.dtype],
        "TOKEN_WORD": _WORDS[signature.dtype], "REDUCE": phases[1], "TAKE": phases[2],
    }  # fmt: skip
