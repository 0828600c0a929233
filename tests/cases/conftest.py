"""A case that the adapter declines beforehand, with its reasons, is skipped with them."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from qwen35.testing.bench import Refused


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    except Refused as refusal:
        pytest.skip(f"declined: {refusal}")
