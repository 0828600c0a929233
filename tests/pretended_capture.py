"""CUDA graph capture as far as a CPU shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def capture() -> Iterator[None]:
    """The body as inside CUDA graph capture: captures are pretended, since there are none on a CPU."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield
