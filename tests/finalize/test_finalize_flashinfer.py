"""FlashInfer's two finalizes on a machine without a GPU: imports, refusals, and what would be handed to it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from finalize_fakes import GROUP, Meeting, Twin
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen35.adapters.flashinfer.finalize_ipc import FlashInferIpcFusion
from qwen35.adapters.flashinfer.finalize_multicast import FlashInferMulticastFusion
from qwen35.adapters.flashinfer.finalize_names import FusionNames
from qwen35.domain.errors import CreationError, UnavailableError, UnsupportedError
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.services.finalize_agreement import Agreements

BLACKWELL = DeviceFacts(device="cuda:0", compute_capability=(10, 0), multiprocessors=148)
HOPPER = replace(BLACKWELL, compute_capability=(9, 0), no_multicast=("multicast requires NVLink multicast",))


def signature(**changes: Any) -> WorkspaceSignature:
    """The one public shape that FlashInfer 0.6.18 has a profile for."""
    values: dict[str, Any] = {
        "group": GROUP,
        "tp_size": 8,
        "rank": 3,
        "hidden": 8192,
        "top_k": 10,
        "max_m": 512,
        "device": "cuda:0",
    }
    return WorkspaceSignature(**(values | changes))


class Native:
    """Stands for FlashInfer's workspace type."""

    def __init__(self, **given: Any) -> None:
        self.given, self.destroyed = given, False

    def is_buffer_size_sufficient(self, tp_size: int, tokens: int, hidden: int, dtype: torch.dtype) -> bool:
        return tokens <= self.given["max_token_num"] // 2

    def destroy(self) -> None:
        self.destroyed = True


class SymmetricMemory:
    """A process's choice of backend; ``after`` is what it has once one was set."""

    def __init__(self, before: str | None, after: str | None = "NCCL") -> None:
        self.name, self.after, self.sets = before, after, []

    def get_backend(self, device: torch.device) -> str | None:
        return self.name

    def set_backend(self, name: Any) -> None:
        self.sets.append(name)
        self.name = self.after


@pytest.fixture(scope="module")
def config() -> Any:
    return pytest.importorskip("flashinfer.comm.mnnvl_cutedsl").DEFAULT_CONFIG


def fusion(config: Any, facts: DeviceFacts = BLACKWELL, **changes: Any) -> FlashInferMulticastFusion:
    names = FusionNames(Native, lambda **_: None, "finalize", "all-reduce", config)
    options: dict[str, Any] = {
        "load": lambda: names, "shape_of": lambda _: (8, 3), "agreements": Agreements(lambda _: Twin()),
    }  # fmt: skip
    return FlashInferMulticastFusion(facts, **(options | changes))


@pytest.mark.row("A01")
def test_importing_the_adapters_and_asking_a_cpu_imports_no_flashinfer() -> None:
    script = (
        "import sys; from qwen35.services.registry import AdapterRegistry; "
        "from qwen35.domain.platform import Platform; "
        "import qwen35.adapters.flashinfer.finalize_multicast, qwen35.adapters.flashinfer.finalize_ipc; "
        "r = AdapterRegistry(Platform(device='cpu', device_name='CPU')); "
        "print([bool(r.usable('finalize_fusion', n)) for n in r.names('finalize_fusion')]); "
        "assert not {'flashinfer', 'triton.language'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[False,", "False,", "False,", "True]"]


@pytest.mark.row("A02")
def test_half_an_interface_is_none(config: Any) -> None:
    def half() -> FusionNames:
        raise UnavailableError("flashinfer", ["unavailable: missing flashinfer.comm.mnnvl_cutedsl.DEFAULT_CONFIG"])

    support = fusion(config, load=half).supports(signature())
    assert support.reasons == ("unavailable: missing flashinfer.comm.mnnvl_cutedsl.DEFAULT_CONFIG",)
    with pytest.raises(UnsupportedError, match=r"missing flashinfer\.comm"):
        fusion(config, load=half).prepare(signature())


@pytest.mark.row("A23")
@pytest.mark.parametrize(
    ("facts", "changes", "shape", "reason"),
    [
        (BLACKWELL, {"tp_size": 3, "rank": 0}, (3, 0), "tensor parallel size requires 16 or 2 or 4 or 8, got 3"),
        (BLACKWELL, {"dtype": "float32"}, (8, 3), "dtype requires bfloat16, got float32"),
        (BLACKWELL, {"device": "cpu"}, (8, 3), "device requires cuda, got cpu"),
        (replace(BLACKWELL, compute_capability=(9, 0)), {}, (8, 3), "capability requires at least 10.0, got 9.0"),
        (replace(BLACKWELL, no_symmetric_memory=("symmetric memory: X",)), {}, (8, 3), "symmetric memory: X"),
        (replace(BLACKWELL, no_multicast=("multicast: Y",)), {}, (8, 3), "multicast: Y"),
        (BLACKWELL, {}, (4, 3), "process group requires 8 ranks, got 4"),
        (BLACKWELL, {}, (8, 1), "process group requires rank 3, got 1"),
        (BLACKWELL, {"hidden": 4096}, (8, 3), "(8, 8192, 10) or (16, 8192, 10), got (8, 4096, 10)"),
        (BLACKWELL, {"top_k": 8}, (8, 3), "got (8, 8192, 8)"),
    ],
)  # fmt: skip
def test_each_refusal_has_its_own_reason(
    config: Any, facts: DeviceFacts, changes: dict[str, Any], shape: tuple[int, int], reason: str
) -> None:
    assert fusion(config).supports(signature())
    reasons = fusion(config, facts, shape_of=lambda _: shape).supports(signature(**changes)).reasons
    assert len(reasons) == 1, reasons
    assert reason in reasons[0]


@pytest.mark.row("A23")
@pytest.mark.case("C40")
@pytest.mark.parametrize(("hidden", "top_k"), [(2048, 8), (3072, 8), (4096, 10)])
def test_the_public_geometries_are_refused_even_on_blackwell(config: Any, hidden: int, top_k: int) -> None:
    assert not fusion(config).supports(signature(hidden=hidden, top_k=top_k))
    reasons = fusion(config, HOPPER).supports(signature(hidden=hidden, top_k=top_k)).reasons
    assert any(r.startswith("multicast") for r in reasons)
    assert any(r.startswith("compute capability") for r in reasons)


@pytest.mark.row("A03")
def test_flashinfers_own_config_is_rewritten_without_being_touched(config: Any) -> None:
    from qwen35.domain.finalize_early_load import FLAG, with_early_shared_load

    def flags(of: Any) -> list[bool]:
        presets = [t.preset for profile in of.profiles for t in profile.finalize_routes.targets]
        return [getattr(p, FLAG) for p in presets if any(f.name == FLAG for f in fields(p))]

    before = flags(config)
    changed = with_early_shared_load(config, speculative=False)
    assert flags(config) == before
    assert flags(changed) == [True] * len(before)
    assert len(before) > 0
    assert not all(before)
    for old, new in zip(config.profiles, changed.profiles, strict=True):
        assert new.all_reduce_routes is old.all_reduce_routes
    assert with_early_shared_load(changed, speculative=False) == changed


def prepared(config: Any, **changes: Any) -> tuple[Any, Native]:
    """A workspace whose own two small buffers are tensors without memory."""
    made: list[Native] = []

    def make(**given: Any) -> Native:
        made.append(Native(**given))
        return made[-1]

    names = FusionNames(make, lambda **_: None, "finalize", "all-reduce", config)
    options: dict[str, Any] = {"load": lambda: names, "backend": lambda: SymmetricMemory("CUDA")}
    asked = signature(speculative=changes.pop("speculative", False))
    with FakeTensorMode():
        return fusion(config, **(options | changes)).prepare(asked), made[0]


@pytest.mark.row("A04")
@pytest.mark.row("A07")
@pytest.mark.parametrize("speculative", [False, True])
def test_what_the_workspace_is_made_with(config: Any, speculative: bool) -> None:
    workspace, native = prepared(config, speculative=speculative)
    given, s = native.given, workspace.signature
    assert (given.pop("config") is config) is speculative
    assert given == {
        "tp_size": 8, "tp_rank": 3, "max_token_num": 512, "hidden_dim": 8192, "dtype": torch.bfloat16, "group": s.group,
        "top_k": 10, "rms_eps": s.eps, "routed_scaling_factor": 1.0, "weight_bias": 0.0, "include_shared_expert": True,
        "add_residual": True, "write_residual_output": True,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.row("A07")
def test_the_multicast_kernels_are_launched_behind_the_ones_before_them(config: Any) -> None:
    """Programmatic dependent launch, without which the early load could not begin before the experts have ended."""
    launched: list[dict[str, Any]] = []
    names = FusionNames(Native, lambda **given: launched.append(given), "finalize", "all-reduce", config)
    memory = SymmetricMemory("CUDA")
    with FakeTensorMode():
        workspace = fusion(config, load=lambda: names, backend=lambda: memory).prepare(signature())
        local = torch.empty(3, 8192, dtype=torch.bfloat16, device="cuda:0")
        workspace.all_reduce(local, torch.empty_like(local), torch.empty_like(local[0]))
    assert [given["launch_with_pdl"] for given in launched] == [True]


@pytest.mark.row("A09")
@pytest.mark.row("A15")
def test_it_supports_what_the_signature_and_flashinfer_allow(config: Any) -> None:
    workspace, native = prepared(config)
    assert [bool(workspace.supports(m)) for m in (-1, 0, 1, 256, 257, 512, 513)] == [
        False, False, True, True, False, False, False,
    ]  # fmt: skip
    workspace.destroy()
    workspace.destroy()
    assert native.destroyed
    assert not workspace.supports(1)


@pytest.mark.row("A06")
@pytest.mark.parametrize(("before", "sets"), [("CUDA", []), ("NVSHMEM", []), (None, ["NCCL"])])
def test_a_symmetric_memory_backend_that_is_chosen_stays(config: Any, before: str | None, sets: list[str]) -> None:
    memory = SymmetricMemory(before)
    prepared(config, backend=lambda: memory)
    assert memory.sets == sets
    assert memory.name == (before or "NCCL")


@pytest.mark.row("A06")
def test_no_symmetric_memory_backend_at_all_is_an_error(config: Any) -> None:
    with pytest.raises(CreationError, match=r"rank 0: UnavailableError.*no backend for cuda:0"):
        prepared(config, backend=lambda: SymmetricMemory(None, None))


@pytest.mark.row("A02")
@pytest.mark.parametrize("adapter", ["multicast", "ipc"])
def test_a_rank_without_the_names_leaves_no_other_in_flashinfers_own_rendezvous(config: Any, adapter: str) -> None:
    """FlashInfer's constructors wait for all ranks; that it is half there is found out before."""
    meeting, made = Meeting(2), []

    def prepare(rank: int) -> Any:
        def load() -> FusionNames:
            loads.append(rank)
            # The multicast adapter asks for the names to decide too, which all ranks had agreed on.
            if rank and len(loads) == (2 if adapter == "multicast" else 1):
                raise UnavailableError("flashinfer", ["unavailable: missing flashinfer.comm.allreduce_fusion"])
            return FusionNames(lambda **given: made.append(given), lambda **_: None, "finalize", "all-reduce", config)

        loads: list[int] = []
        agreements = Agreements(lambda _: meeting.side(rank))
        shape = {"tp_size": 2, "rank": rank} if adapter == "ipc" else {}
        asked = signature(**shape, max_m=64)
        with FakeTensorMode():
            if adapter == "ipc":
                ipc = FlashInferIpcFusion(HOPPER, load, agreements, lambda _: nullcontext(), lambda: lambda *_: None)
                return ipc.prepare(asked)
            memory = SymmetricMemory("CUDA")
            return fusion(config, load=load, backend=lambda: memory, agreements=agreements).prepare(asked)

    out = meeting.run(prepare)
    assert all(isinstance(e, CreationError) for e in out), out
    assert str(out[0]) == str(out[1])
    assert "rank 1: UnavailableError: flashinfer: unavailable: missing flashinfer.comm.allreduce_fusion" in str(out[0])
    assert "rank 0" not in str(out[0])
    assert made == []
