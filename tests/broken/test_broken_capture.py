"""Adapters that break the capture clause, which only a GPU can show."""

from __future__ import annotations

import pytest
from capture_broken import CAPTURE_BROKEN, OnTriton
from delegate import assert_caught, law_that_catches

from qwen35.domain.capabilities import Clause
from qwen35.testing import KITS, LAWS


@pytest.mark.gpu
@pytest.mark.parametrize("broken", CAPTURE_BROKEN, ids=lambda kind: kind.__name__)
def test_an_adapter_that_cannot_be_captured_fails_the_capture_clause(broken: type[OnTriton]) -> None:
    assert_caught(broken, law_that_catches(broken.port, broken, "cuda"))


@pytest.mark.parametrize("port", KITS)
def test_decode_and_commit_of_either_port_have_adapters_that_cannot_be_captured(port: str) -> None:
    caught_by = {kind.caught_by for kind in CAPTURE_BROKEN if kind.port == port}
    assert caught_by <= {law.name for law in LAWS[port][Clause.CAPTURE]}
    assert caught_by >= {"decode: nothing waits for the device", "commit: replays see new values"}
