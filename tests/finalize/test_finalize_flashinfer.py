"""FlashInfer's two finalizes on a machine without a GPU: imports, refusals, and what would be handed to it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion, Meeting, Twin
from finalize_services import CPU
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen35.adapters.flashinfer.finalize_ipc import FlashInferIpcFusion
from qwen35.adapters.flashinfer.finalize_multicast import FlashInferMulticastFusion
from qwen35.adapters.flashinfer.finalize_names import FusionNames, ipc_names, multicast_names
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import CreationError, UnavailableError, UnsupportedError
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.adapter import AdapterEntry
from qwen35.services.finalize_agreement import Agreements
from qwen35.services.finalize_choice import choose_fusion
from qwen35.services.registry import AdapterRegistry

BLACKWELL = DeviceFacts(device="cuda:0", compute_capability=(10, 0), multiprocessors=148)
HOPPER = replace(BLACKWELL, compute_capability=(9, 0), no_multicast=("multicast requires NVLink multicast",))


def signature(**changes: Any) -> WorkspaceSignature:
    """The one public shape that FlashInfer 0.6.18 has a profile for."""
    values: dict[str, Any] = {
        "group": object(),
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


PATTERNS = ("kMoEFinalizeARResidualRMSNorm", "kARResidualRMSNorm")
MODULES: dict[str, dict[str, Any]] = {
    "flashinfer.comm": {
        "allreduce_fusion": "launch",
        "AllReduceFusionPattern": SimpleNamespace(**{name: f"the pattern {name}" for name in PATTERNS}),
    },
    "flashinfer.comm.mnnvl_cutedsl": {"DEFAULT_CONFIG": "config"},
    "flashinfer.comm.mnnvl_cutedsl_ar": {"MNNVLCuteDSLAllReduceFusionWorkspace": "makes multicast"},
    "flashinfer.comm.allreduce": {"TRTLLMAllReduceFusionWorkspace": "makes ipc"},
}
NAMES = [
    (multicast_names, "makes multicast", "config", ["", ".mnnvl_cutedsl", ".mnnvl_cutedsl_ar"]),
    (ipc_names, "makes ipc", None, ["", ".allreduce"]),
]


def importing(modules: dict[str, dict[str, Any]]) -> Any:
    """Modules that have these names and no others."""

    def by_name(module: str) -> Any:
        if module not in modules:
            raise ImportError(f"No module named {module!r}")
        return SimpleNamespace(**modules[module])

    return by_name


@pytest.mark.row("A02")
@pytest.mark.parametrize(("names_of", "makes", "config", "modules"), NAMES)
def test_the_names_of_each_backend_are_its_own(names_of: Any, makes: str, config: Any, modules: list[str]) -> None:
    wanted = {name: MODULES[name] for name in (f"flashinfer.comm{module}" for module in modules)}
    names = names_of(importing(wanted))
    finalize, all_reduce = (f"the pattern {name}" for name in PATTERNS)
    assert names == FusionNames(makes, "launch", finalize, all_reduce, config)  # type: ignore[arg-type]


@pytest.mark.row("A02")
@pytest.mark.parametrize(("names_of", "makes", "config", "modules"), NAMES)
def test_a_name_that_flashinfer_lacks_is_named_and_nothing_else_is_taken(
    names_of: Any, makes: str, config: Any, modules: list[str]
) -> None:
    """One name away, one module away, one pattern away, and everything away: half an interface is none."""
    whole = {name: MODULES[name] for name in (f"flashinfer.comm{module}" for module in modules)}
    for module, names in whole.items():
        for name in names:
            without = whole | {module: {n: value for n, value in names.items() if n != name}}
            with pytest.raises(UnavailableError) as refused:
                names_of(importing(without))
            (reason,) = refused.value.reasons
            assert reason.startswith(f"unavailable: missing {module}.{name} ("), reason
        without = {other: rest for other, rest in whole.items() if other != module}
        with pytest.raises(UnavailableError) as refused:
            names_of(importing(without))
        reasons = [f"unavailable: missing {module}.{name} (No module named {module!r})" for name in names]
        assert list(refused.value.reasons) == reasons
    for pattern in PATTERNS:
        others = SimpleNamespace(**{name: name for name in PATTERNS if name != pattern})
        without = whole | {"flashinfer.comm": MODULES["flashinfer.comm"] | {"AllReduceFusionPattern": others}}
        with pytest.raises(UnavailableError) as refused:
            names_of(importing(without))
        assert refused.value.reasons == (f"unavailable: missing AllReduceFusionPattern.{pattern}",)
    with pytest.raises(UnavailableError) as refused:
        names_of(importing({}))
    assert len(refused.value.reasons) == sum(map(len, whole.values()))


@pytest.mark.row("A02")
@pytest.mark.parametrize(("names_of", "makes", "config", "modules"), NAMES)
def test_flashinfers_own_packages_have_every_name(names_of: Any, makes: str, config: Any, modules: list[str]) -> None:
    for module in modules:
        pytest.importorskip(f"flashinfer.comm{module}")
    names, patterns = names_of(), vars(importlib.import_module("flashinfer.comm").AllReduceFusionPattern)
    assert [names.finalize, names.all_reduce] == [patterns[name] for name in PATTERNS]


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
        if adapter == "ipc":
            return FlashInferIpcFusion(HOPPER, load, agreements).prepare(asked)
        memory = SymmetricMemory("CUDA")
        return fusion(config, load=load, backend=lambda: memory, agreements=agreements).prepare(asked)

    out = meeting.run(prepare)
    assert all(isinstance(e, CreationError) for e in out), out
    assert str(out[0]) == str(out[1])
    assert "rank 1: UnavailableError: flashinfer: unavailable: missing flashinfer.comm.allreduce_fusion" in str(out[0])
    assert made == []


def ipc_workspace(asked: WorkspaceSignature) -> tuple[Any, dict[str, Any], list[str]]:
    """A workspace of IPC's, what FlashInfer's own was made with, and on which device."""
    given: dict[str, Any] = {}
    devices: list[str] = []

    def on_device(device: str) -> Any:
        devices.append(device)
        return nullcontext()

    class Handles(Native):
        ipc_handles = ((11, 12), (21, 22))

    def make(**arguments: Any) -> Native:
        given.update(arguments)
        return Handles(**arguments)

    names = FusionNames(make, lambda **_: None, "finalize", "all-reduce")
    ipc = FlashInferIpcFusion(HOPPER, lambda: names, Agreements(lambda _: Twin()), on_device)
    with FakeTensorMode():
        return ipc.prepare(asked), given, devices


@pytest.mark.row("A04")
def test_what_the_ipc_workspace_is_made_with() -> None:
    asked = signature(hidden=2048, top_k=8, tp_size=2, rank=1, max_m=48, device="cuda:5")
    workspace, given, devices = ipc_workspace(asked)
    assert given == {
        "tp_size": 2, "tp_rank": 1, "max_token_num": 48, "hidden_dim": 2048, "dtype": torch.bfloat16,
        "group": asked.group,
    }  # fmt: skip
    assert given["group"] is asked.group, "left out, it would be the whole world"
    assert devices == ["cuda:5"]
    assert (workspace.adapter, workspace.signature, workspace.addresses) == ("flashinfer_ipc", asked, (11, 12, 21, 22))


def chosen_by_two(facts: Sequence[DeviceFacts], requested: str, max_m: int, *others: FakeFusion) -> list[Any]:
    """What two ranks with these devices choose among FlashInfer's IPC, as it is, and ``others``."""
    meeting = Meeting(2)

    def choose(rank: int) -> Any:
        ipc = AdapterEntry(
            port="finalize_fusion", name="flashinfer_ipc", rank=20, summary="", probe=lambda _: Support.of(),
            create=lambda *_: FlashInferIpcFusion(facts[rank]),
        )  # fmt: skip
        registry = AdapterRegistry(CPU, extra=[ipc, *(other.entry(rank=10) for other in others)])
        asked = signature(tp_size=2, rank=rank, max_m=max_m, device=f"cuda:{rank}")
        return choose_fusion(registry, requested, asked, facts[rank], meeting.side(rank))

    return meeting.run(choose)


def test_ipc_is_taken_for_more_tokens_than_it_serves_and_serves_those_that_it_can() -> None:
    for max_m in (63, 64, 65, 8192):
        for choice in chosen_by_two([HOPPER, HOPPER], "flashinfer_ipc", max_m):
            assert (choice.name, choice.max_m) == ("flashinfer_ipc", min(max_m, 64))
    can = FlashInferIpcFusion(HOPPER).capabilities
    assert [can.within(signature(max_m=m)).max_m for m in (63, 64, 65, 8192)] == [63, 64, 64, 64]


@pytest.mark.row("A25")
def test_ipc_reaches_into_peers_and_so_asks_for_one_host_and_memory_between_them() -> None:
    here, there = replace(HOPPER, host="a", uuid="u0"), replace(HOPPER, host="b", uuid="u1")
    closed = replace(there, host="a", no_symmetric_memory=("symmetric memory requires NCCL",))
    for facts, why in (
        ([here, there], "peers require one host, got rank 0 on a and rank 1 on b"),
        ([here, closed], "rank 1: symmetric memory requires NCCL"),
        ([here, replace(here)], "peers require a device each, got rank 0 and rank 1 on u0"),
    ):
        out = chosen_by_two(facts, "auto", 64, FakeFusion("plain"))
        assert {choice.name for choice in out} == {"plain"}, out
        assert all(choice.rejected["flashinfer_ipc"] == (why,) for choice in out), out


@pytest.mark.row("A25")
def test_the_ipc_backend_needs_no_multicast_and_says_what_it_needs() -> None:
    ipc = FlashInferIpcFusion(HOPPER)
    assert ipc.supports(signature(hidden=2048, top_k=8, tp_size=2, rank=0, max_m=64))
    bad = {
        "tensor parallel size": {"tp_size": 3, "rank": 0},
        "dtype": {"dtype": "float32"},
        "max_m requires at most 64": {"max_m": 65},
        "device": {"device": "cpu"},
    }
    for reason, change in bad.items():
        reasons = ipc.supports(signature(**{"max_m": 64} | change)).reasons
        assert len(reasons) == 1, reasons
        assert reasons[0].startswith(reason)
