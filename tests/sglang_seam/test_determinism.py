"""SGLang's deterministic inference: what is refused, what is said, and what is let be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from seam_machine import Machine, start

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35 import sglang_plugin
from qwen35.container import build
from qwen35.domain.errors import UnsupportedError

SWITCH = "--enable-deterministic-inference"


@pytest.fixture
def _switched_on() -> Iterator[None]:
    from sglang.srt.runtime_context import get_exec

    with get_exec().deterministic.override(enable_deterministic_inference=True):
        yield


def start_with_a_flashinfer(**names: str) -> sglang_plugin.Running:
    """The plugin with an adapter of that name, which need not be usable here."""
    settings = dict.fromkeys(("gdn_decode", "gdn_extend", "gdn_verify"), "reference") | names
    entries = [fake_entry("flashinfer", FakeGatedDeltaRule(1.0))]
    return start(build(adapters=entries, device="cpu", **settings), **names)


@pytest.mark.row("D29")
@pytest.mark.usefixtures("_switched_on")
@pytest.mark.parametrize(
    ("names", "variable"),
    [
        ({"gdn_extend": "flashinfer"}, "QWEN35_GDN_EXTEND"),
        ({"gdn_extend": "reference", "gdn_fallback": "flashinfer"}, "QWEN35_GDN_FALLBACK"),
    ],
)
def test_flashinfer_for_extend_is_refused_by_the_name_of_its_setting(names: dict[str, str], variable: str) -> None:
    start_with_a_flashinfer(**names)
    with pytest.raises(UnsupportedError, match=rf"{SWITCH}.*{variable}=flashinfer; set triton"):
        Machine()


@pytest.mark.row("D29")
@pytest.mark.usefixtures("_switched_on")
def test_flashinfer_for_decode_alone_is_served_and_said_to_promise_nothing() -> None:
    one = start_with_a_flashinfer(gdn_decode="flashinfer")
    machine = Machine()
    assert type(machine.dispatcher.decode_kernel).__name__ == "GdnKernel"
    assert [note for note in one.gdn.notes if SWITCH in note and "decode by flashinfer" in note]


@pytest.mark.row("D29")
@pytest.mark.usefixtures("_switched_on")
def test_another_choice_is_served_and_the_missing_promise_is_noted() -> None:
    one = start(gdn_decode="reference", gdn_extend="reference")
    Machine()
    assert [note for note in one.gdn.notes if SWITCH in note and "decode by reference, extend by reference" in note]


@pytest.mark.row("D29")
@pytest.mark.usefixtures("_switched_on")
def test_without_a_choice_nothing_is_said() -> None:
    one = start()
    Machine()
    assert not one.gdn.notes


@pytest.mark.row("D29")
def test_without_the_switch_flashinfer_serves_extend() -> None:
    start_with_a_flashinfer(gdn_extend="flashinfer")
    Machine()
