"""The command line in an empty folder, a tiny checkpoint, and another package's adapters."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from qwen35.cli.demo import make_checkpoint
from qwen35.cli.main import app

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in an empty folder: no qwen35.toml is read, and what is written stays there."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path, env: dict[str, str] | None = None) -> Result:
        return CliRunner(env={"COLUMNS": "160", **(env or {})}).invoke(app, [str(word) for word in words])

    return run


@pytest.fixture(scope="session")
def seed() -> int:
    """Fresh each session; assertion messages show it."""
    return random.SystemRandom().randrange(2**31)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell ignores Ctrl-C on behalf of what it runs in the background, and children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """A Qwen3.5-MoE checkpoint that transformers wrote; 1 key head, 2 value heads, K = V = 16."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, seed)
    return folder


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution, as far as the interpreter can tell, that offers adapters by entry point."""
    site = tmp_path / "site"
    info = site / "third_party_kernels-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party-kernels\nVersion: 0.1\n")
    names = (
        "plain", "clamping", "loud", "drifting", "widening", "flattening", "recording", "reversing", "interrupted",
        "crashing", "fatal", "modest",
    )  # fmt: skip
    lines = [f"gated_delta_rule.{name} = cli_third_party:{name.upper()}" for name in names]
    lines.append("gated_delta_rule.gone = cli_third_party:NOWHERE")
    (info / "entry_points.txt").write_text("[qwen35.adapters]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(site)
