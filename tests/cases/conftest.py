"""A case that the adapter declines beforehand is skipped with its reasons, or fails where it must be served."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from qwen35.testing.bench import Refused
from subjects import Subject, declined


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    except Refused as refusal:
        subject = item.funcargs.get("subject") if isinstance(item, pytest.Function) else None
        if not isinstance(subject, Subject):
            raise
        declined(subject, str(refusal))
