"""A bench holds one adapter; a trial is one call on it with every buffer behind the call watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.precision import ErrorBound
from qwen35.ports.support import dtype_name
from qwen35.testing.case import Case
from qwen35.testing.kit import Kit, Parts, Served, serve
from qwen35.testing.limits import Limits
from qwen35.testing.make import Made, make_parts
from qwen35.testing.oracle import Terms, Truth, assert_close, terms_of, truth
from qwen35.testing.tensors import poisoned_memory, same_bits


class Refused(Exception):  # noqa: N818 - not an error: the adapter said so beforehand
    """The adapter's ``supports`` declined the call; ``reasons`` say why."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


@dataclass(frozen=True, slots=True)
class Bench:
    """An adapter of the kit's port on a device. ``make`` (None: not known) makes another one like it."""

    adapter: Any
    kit: Kit
    device: str
    limits: Limits
    make: Callable[[], Any] | None = None

    @property
    def place(self) -> torch.device:
        """The device, with its index where it has one."""
        return torch.empty(0, device=self.device).device

    def trial(self, case: Case[Any]) -> Trial:
        """Tensors and call of ``case``."""
        return Trial(self, case, make_parts(self.kit, case, self.place))

    def call(self, phase: Phase, parts: Parts) -> Any:
        """The call object of the port."""
        return self.kit.call(phase, parts)

    def ask(self, call: Any) -> None:
        """Raise ``Refused`` where ``supports`` declines ``call``."""
        support = self.adapter.supports(call)
        if not support:
            raise Refused(support.reasons)

    def run(self, call: Any) -> Served:
        """Serve ``call`` on poisoned memory. Raises ``Refused`` where ``supports`` declines it."""
        self.ask(call)
        with poisoned_memory():
            return serve(self.adapter, call)

    def prepare(self, case: Case[Any]) -> None:
        """Prepare the adapter for ``case``. Raises ``Refused`` where it declines the plan."""
        try:
            self.adapter.prepare(self.kit.plan(case, self.place, self.limits.null_slot))
        except UnsupportedError as refusal:
            raise Refused(refusal.reasons) from refusal

    def truth(self, call: Any) -> Truth:
        """What ``call`` must give."""
        return truth(self.kit, call)

    def bound(self, case: Case[Any], phase: Phase, steps: int = 1) -> ErrorBound:
        """The bound that the adapter states; ``steps`` as in ``Precision.bound``."""
        stated = self.adapter.capabilities.precision
        assert phase in stated, f"capabilities.precision must state a bound for {phase}"
        bound: ErrorBound = stated[phase].bound(
            dtype_name(case.sizes.token_dtype), dtype_name(case.sizes.state_dtype), steps
        )
        return bound


class Trial:
    """One call and its buffers. Checks raise ``AssertionError`` with the case."""

    def __init__(self, bench: Bench, case: Case[Any], made: Made) -> None:
        self.bench, self.case, self.made = bench, case, made
        self.parts = made.parts
        self.phase = case.phase
        self._saved = _Saved(made)

    @property
    def call(self) -> Any:
        """The call object."""
        return self.bench.call(self.phase, self.parts)

    def padded_tokens(self) -> Tensor:
        """Which leading token positions belong to rows with slot -1: bool [B], [T] or [B, T]'s first axis."""
        padded = torch.tensor([s < 0 for s in self.case.slots], dtype=torch.bool, device=self.bench.place)
        if self.phase is not Phase.EXTEND:
            return padded
        return padded.repeat_interleave(torch.tensor(self.case.lengths, dtype=torch.int64, device=padded.device))

    def poison_padding(self) -> None:
        """Fill the tokens of padded rows with NaN: engines leave anything there."""
        padded = self.padded_tokens()
        for tokens in self.parts.tokens.values():
            tokens[padded] = float("nan")
        self._saved = _Saved(self.made)

    def fill_slots(self, slots: Iterable[int], value: float) -> None:
        """Overwrite whole slots of the pool."""
        for slot in slots:
            self.parts.pool[slot] = value
        self._saved = _Saved(self.made)

    def ask(self) -> None:
        """Prepare where the case says so. Raises ``Refused`` where plan or call is declined; costs no oracle."""
        if self.case.prepared or self.bench.limits.null_slot is not None:
            # A null slot is named by a plan, so there what an adapter supports hangs on one.
            self.bench.prepare(self.case)
        self.bench.ask(self.call)

    def run(self) -> Served:
        """Prepare where the case says so, then serve the call."""
        self.ask()
        return self.bench.run(self.call)

    def restore(self) -> None:
        """Put every buffer that a call writes back to what it was before."""
        self.made.pool.restore(self._saved.pool)
        for buffer, saved in ((self.made.out, self._saved.out), (self.made.intermediates, self._saved.intermediates)):
            if buffer is not None and saved is not None:
                buffer.restore(saved)

    def load(self, other: Trial) -> None:
        """Take over the values and case of another trial of the same shapes, at this trial's addresses."""
        self.made.pool.restore(other.made.pool)
        for name, base in self.made.inputs.items():
            base.copy_(other.made.inputs[name])
        for mine, theirs in ((self.made.out, other.made.out), (self.made.intermediates, other.made.intermediates)):
            if mine is not None and theirs is not None:
                mine.restore(theirs)
        self.case = other.case
        self._saved = _Saved(self.made)

    def truth(self) -> Truth:
        """What the call must give; ask before running it."""
        return self.bench.truth(self.call)

    def terms(self) -> Terms:
        """The terms of the outputs that the call must give; ask before running it."""
        return terms_of(self.bench.kit, self.call)

    def bound(self, steps: int = 1) -> ErrorBound:
        """See ``Bench.bound``."""
        return self.bench.bound(self.case, self.phase, steps)

    # Checks

    def padded_rows_are_zero(self, served: Served) -> None:
        """Outputs of rows with slot -1 are exactly zero."""
        assert served.out is not None
        rows = served.out[self.padded_tokens()]
        assert bool((rows == 0).all()), f"padded rows must be zero, got {_sample(rows)}; {self.case}"

    def only_written_slots_changed(self, also: Iterable[int] = ()) -> None:
        """Every byte of the pool's buffer outside the slots that the call writes is as before."""
        allowed = set(self.case.written) | set(also)
        if self.bench.limits.null_slot is not None:
            allowed.add(self.bench.limits.null_slot)
        expected = self._saved.pool.clone()
        for slot in allowed:
            expected.view[slot].copy_(self.parts.pool[slot])
        for slot in range(self.case.pool):
            assert same_bits(expected.view[slot], self.parts.pool[slot]), (
                f"slot {slot} changed, and the call writes only {sorted(allowed)}; {self.case}"
            )
        assert same_bits(expected.base, self.made.pool.base), f"bytes between the slots changed; {self.case}"

    def inputs_unchanged(self) -> None:
        """Everything that the call only reads, and the gaps of those buffers, are as before."""
        for name, before in self._saved.inputs.items():
            assert same_bits(before, self.made.inputs[name]), f"the buffer of {name} was written; {self.case}"

    def out_gaps_unchanged(self) -> None:
        """Bytes of the caller's output buffer outside ``out`` are as before."""
        if self.made.out is not None and self._saved.out is not None:
            expected = self._saved.out.clone()
            expected.view.copy_(self.made.out.view)
            assert same_bits(expected.base, self.made.out.base), f"bytes around out were written; {self.case}"

    def out_unchanged(self) -> None:
        """The caller's output buffer is as before."""
        if self.made.out is not None and self._saved.out is not None:
            assert same_bits(self._saved.out.base, self.made.out.base), f"out was written; {self.case}"

    def other_nodes_unchanged(self) -> None:
        """Of the intermediates only nodes 0..T-1 of live rows changed (in verify; in commit none)."""
        if self.made.intermediates is None or self._saved.intermediates is None:
            return
        expected = self._saved.intermediates.clone()
        if self.phase is Phase.VERIFY:
            for row in self.live_rows():
                expected.view[row, : self.case.draft].copy_(self.made.intermediates.view[row, : self.case.draft])
        assert same_bits(expected.base, self.made.intermediates.base), (
            f"intermediates of rows or nodes that the call does not write were changed; {self.case}"
        )

    def live_rows(self) -> list[int]:
        """Rows of the intermediates that live batch rows own."""
        rows = self.case.rows or tuple(range(len(self.case.slots)))
        return [row for slot, row in zip(self.case.slots, rows, strict=True) if slot >= 0]

    def states_are(self, want: Mapping[int, Tensor], bound: float) -> None:
        """Written slots hold the oracle's states."""
        for slot in sorted(self.case.written):
            assert_close(f"state of slot {slot}", self.parts.pool[slot], want[slot], bound, self.case)

    def nodes_are(self, want: Mapping[tuple[int, int], Tensor], bound: float) -> None:
        """Intermediates hold the oracle's states."""
        assert self.parts.intermediates is not None
        for (row, node), state in want.items():
            got = self.parts.intermediates[row, node]
            assert_close(f"intermediates[{row}, {node}]", got, state, bound, self.case)

    def matches(self, served: Served, want: Truth, steps: int = 1) -> None:
        """Outputs, written states, intermediates and checkpoints are within the adapter's stated bound."""
        if self.phase is not Phase.COMMIT:
            bound = self.bound(steps)
            assert served.out is not None
            assert want.out is not None
            assert served.out.dtype == self.case.sizes.token_dtype, f"out is {served.out.dtype}; {self.case}"
            assert_close("out", served.out, want.out, bound.output, self.case, want.terms)
            self.states_are(want.states, bound.state)
            self.nodes_are(want.nodes, bound.state) if want.nodes else None
            if want.checkpoints is not None:
                assert served.checkpoints is not None, f"checkpoints were planned and not returned; {self.case}"
                for i, (got, state) in enumerate(zip(served.checkpoints, want.checkpoints, strict=True)):
                    assert_close(f"checkpoint {i}", got, state, bound.state, self.case)
        else:
            for slot in self.case.written:
                assert bool((self.parts.pool[slot] == want.states[slot]).all()), (
                    f"slot {slot} must be a copy of the accepted state; {self.case}"
                )

    def replaced(self, **changes: Any) -> Any:
        """The call with some parts replaced."""
        return self.bench.call(self.phase, replace(self.parts, **changes))


class _Saved:
    """Copies of every buffer before the call."""

    def __init__(self, made: Made) -> None:
        self.pool = made.pool.clone()
        self.out = None if made.out is None else made.out.clone()
        self.intermediates = None if made.intermediates is None else made.intermediates.clone()
        self.inputs = {name: base.clone() for name, base in made.inputs.items()}


def _sample(tensor: Tensor) -> str:
    flat = tensor.flatten()
    bad = flat[(flat != 0)]
    return f"{bad[:4].tolist()} among {flat.numel()} values"
