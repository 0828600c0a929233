"""The raw gates of a batch are for its own extend alone."""

from __future__ import annotations

import pytest
from seam_machine import Machine, close, start
from test_gdn_calls import ALL, dispatch_extend, extend_two, oracle


def assert_log_gates_are_used(machine: Machine) -> None:
    """Of as many sequences and tokens as ``extend_two`` has."""
    (out, _, _), plain = dispatch_extend(machine, [5, 2], [4, 1])
    close(out[0], oracle.extend(plain).out)
    close(machine.states, plain.states)


def test_after_an_extend_its_gates_are_gone() -> None:
    start(**ALL)
    machine = Machine()
    extend_two(machine)
    assert_log_gates_are_used(machine)


def test_after_an_extend_that_raised_its_gates_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.layers.attention.linear.gdn_backend as gdn

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no convolution")

    start(**ALL)
    machine = Machine()
    monkeypatch.setattr(gdn, "causal_conv1d_fn", fails)
    with pytest.raises(RuntimeError, match="no convolution"):
        extend_two(machine)
    assert_log_gates_are_used(machine)
