"""Which tests run where: the one place that skips for want of a GPU or of Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "print_blob": True, "derandomize": False, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=25, **_COMMON)
settings.register_profile("interpreter", max_examples=5, **_COMMON)
settings.register_profile("gpu", max_examples=10, **_COMMON)


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter in this process."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def absolute_python_path() -> None:
    """Processes that tests start in other folders find a checkout that is not installed, as this one did:
    ``PYTHONPATH=src:FOLDER`` is relative."""
    given = os.environ.get("PYTHONPATH")
    if given:
        os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in given.split(os.pathsep))


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    absolute_python_path()
    if not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("interpreter" if interpreting() else "gpu" if torch.cuda.is_available() else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    kept, left = [], []
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        # In the interpreter's process only its own tests, elsewhere none of them.
        (kept if (item.get_closest_marker("interpreter") is not None) == interpreting() else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture(autouse=True)
def _free_device_memory() -> Iterator[None]:
    """Several processes may share one GPU, and pools past 2**31 elements are large."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed for a test's tensors; shown with the output of a test that fails."""
    fresh = random.SystemRandom().randrange(2**32)
    print(f"{request.node.name}: seed {fresh}")  # noqa: T201 - pytest shows it where the test fails
    return fresh
