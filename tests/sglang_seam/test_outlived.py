"""What CUDA graphs that were captured with the plugin still read after it is uninstalled: held, and kept up to date."""

from __future__ import annotations

import gc
import pkgutil
import types
import weakref
from typing import Any

import pytest
from release_targets import WEIGHT_UPDATES, update_path
from seam_machine import Machine, start
from test_install import NAMES, RELEASE

from fakes import FakeGatedDeltaRule, fake_entry
from pretended_capture import capture
from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.container import build


class Refreshed(FakeGatedDeltaRule):
    """Counts how often its parameter copies were refreshed."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.refreshed = 0

    def refresh_parameters(self) -> int:
        self.refreshed += 1
        return 1


def started(fake: FakeGatedDeltaRule) -> sglang_plugin.Running:
    container = build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **NAMES)
    return start(container, **NAMES)


def decode() -> None:
    """A decode step of a new backend, through SGLang's own classes."""
    machine = Machine()
    packed, a, b = machine.tokens(2)
    machine.metadata([3, 6], [0, 1, 2])
    machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1, 1]), packed, a, b)


def update_weights(method: str) -> None:
    """A weight update that fails, after it may have changed parameters."""
    update = pkgutil.resolve_name(update_path(method))
    with pytest.raises(AttributeError):
        update(types.SimpleNamespace(offload_tags=set()), types.SimpleNamespace())  # neither weights nor workers


def test_what_a_captured_graph_reads_outlives_the_plugin() -> None:
    fake = Refreshed()
    one = started(fake)
    held = {"adapter": weakref.ref(fake), "container": weakref.ref(one.container), "seam": weakref.ref(one.gdn),
            "service": weakref.ref(one.container.gated_delta_rule())}  # fmt: skip
    decode()  # eagerly: the seam cannot know of every graph
    sglang_plugin.uninstall()
    del fake, one
    gc.collect()
    assert {name for name, reference in held.items() if reference() is None} == set()
    adapter: Any = held["adapter"]()
    assert adapter.closed == 0


@pytest.mark.parametrize("method", WEIGHT_UPDATES[RELEASE])
def test_copies_that_captured_graphs_read_are_refreshed_after_the_plugin_is_off(method: str) -> None:
    fake = Refreshed()
    started(fake)
    with capture():
        decode()
    assert len(fake.calls) == 1
    sglang_plugin.uninstall()
    assert seam.installed() == ()
    update_weights(method)
    assert fake.refreshed == 1
    again = Refreshed()
    started(again)
    update_weights(method)
    assert (fake.refreshed, again.refreshed) == (2, 1), "installed again, both have copies"


def test_without_a_captured_graph_a_weight_update_is_sglangs_alone() -> None:
    fake = Refreshed()
    started(fake)
    decode()
    sglang_plugin.uninstall()
    for method in WEIGHT_UPDATES[RELEASE]:
        update_weights(method)
    assert fake.refreshed == 0
