"""What hooks read of SGLang's batches in the middle of a forward is looked for before a hook is installed."""

from __future__ import annotations

import inspect
import pkgutil

import pytest
from seam_machine import Machine, start
from test_faults import ALONE, lines, scheduler_starts

from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seam import Target
from qwen35.adapters.sglang.seams import installed_release
from qwen35.domain.errors import UnavailableError

BATCH = "sglang.srt.model_executor.forward_batch_info:ForwardBatch"
DRAFT = "sglang.srt.speculative.spec_info:SpecInput"
READ = pytest.mark.parametrize(
    ("path", "name"),
    [
        (BATCH, "forward_mode"), (BATCH, "extend_seq_lens_cpu"), (BATCH, "spec_info"), (DRAFT, "ragged_verify_layout"),
    ],
)  # fmt: skip


def forget(monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    """As in a release whose class no longer has the attribute."""
    for base in pkgutil.resolve_name(path).__mro__:
        if name in vars(base):
            monkeypatch.delattr(base, name)
        if name in inspect.get_annotations(base):
            monkeypatch.delitem(vars(base)["__annotations__"], name)


@READ
def test_a_launch_where_it_moved_is_sglangs_alone_in_one_line(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QWEN35_GDN_EXTEND", "reference")
    forget(monkeypatch, path, name)
    scheduler_starts(monkeypatch)
    (line,) = lines(caplog)
    assert line == f"qwen35: the seam for SGLang {installed_release()}: {path} must have {name}. {ALONE}"
    assert seam.installed() == ()
    assert type(Machine().dispatcher.extend_kernel).__name__ == "TritonGDNKernel"
    assert f"not installed: {path} must have {name}" in sglang_plugin.explain()


def test_a_mode_that_is_asked_otherwise_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    monkeypatch.delattr(ForwardMode, "is_target_verify")
    with pytest.raises(UnavailableError, match=r"ForwardMode.is_target_verify is not there"):
        start(gdn_extend="reference")


class Base:
    inherited: int


class Thing(Base):
    declared: int
    given = 1


def test_fields_are_those_that_a_class_or_its_bases_declare() -> None:
    def lacks(path: str, *fields: str) -> tuple[str, ...]:
        return seam.differences({"one": Target(path, fields=fields)})

    path = f"{__name__}:Thing"
    assert lacks(path, "inherited", "declared", "given") == ()
    assert lacks(path, "given", "other", "one_more") == (f"{path} must have other, one_more",)
    no_class = f"{__name__}:BATCH"
    assert lacks(no_class, "declared") == (f"{no_class} must have declared",)
