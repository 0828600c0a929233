"""A dispatcher that says its verify kernel is FlashInfer's does not say so of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from seam_machine import Machine, start
from test_gdn_calls import ALL

from qwen35 import sglang_plugin

FLAG = "verify_kernel_is_flashinfer"


def after_the_constructor(monkeypatch: pytest.MonkeyPatch, then: Callable[[Any], None]) -> None:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNKernelDispatcher

    plain = GDNKernelDispatcher.__init__

    @functools.wraps(plain)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        then(self)

    monkeypatch.setattr(GDNKernelDispatcher, "__init__", constructor)


@pytest.fixture
def _sglang_verifies_by_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where SGLang chose FlashInfer's kernel for verify, which needs a GPU."""
    after_the_constructor(monkeypatch, lambda dispatcher: setattr(dispatcher, FLAG, True))


@pytest.mark.usefixtures("_sglang_verifies_by_flashinfer")
def test_where_verify_is_routed_the_flag_is_off_until_sglang_has_its_kernels_back() -> None:
    start(gdn_verify="reference")
    machine = Machine(draft=2)
    assert getattr(machine.dispatcher, FLAG) is False
    sglang_plugin.uninstall()
    assert getattr(machine.dispatcher, FLAG) is True


@pytest.mark.usefixtures("_sglang_verifies_by_flashinfer")
@pytest.mark.parametrize("names", [{}, {"gdn_decode": "reference", "gdn_extend": "reference"}], ids=["none", "others"])
def test_where_verify_is_not_routed_the_flag_is_sglangs(names: dict[str, str]) -> None:
    start(**names)
    machine = Machine(draft=2)
    assert getattr(machine.dispatcher, FLAG) is True
    assert type(machine.dispatcher.verify_kernel).__name__ == "GdnKernel"


@pytest.mark.usefixtures("_sglang_verifies_by_flashinfer")
def test_of_another_family_the_flag_is_sglangs() -> None:
    start(**ALL)
    assert getattr(Machine(draft=2, family="qwen3_next").dispatcher, FLAG) is True


def test_a_release_without_the_flag_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_constructor(monkeypatch, lambda dispatcher: delattr(dispatcher, FLAG))
    start(**ALL)
    machine = Machine(draft=2)
    assert type(machine.dispatcher.verify_kernel).__name__ == "GdnKernel"
    assert FLAG not in vars(machine.dispatcher)
    sglang_plugin.uninstall()
    assert FLAG not in vars(machine.dispatcher)
