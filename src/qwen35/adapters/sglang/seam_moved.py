"""Our half of a hook while SGLang builds its engine: what it reads of SGLang is more than the targets can check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from qwen35.adapters.sglang.seam import said
from qwen35.adapters.sglang.seams import installed_release
from qwen35.adapters.sglang.seams.release import Release
from qwen35.domain.errors import Qwen35Error, UnavailableError

#: Given the key of a hook's target, guards our half of that hook.
Guard = Callable[[str], AbstractContextManager[None]]
#: What reading a value raises that is no longer where, or what, it was.
_MOVED = (AttributeError, ImportError, LookupError, TypeError, ValueError)


@contextmanager
def our_half(release: Release, give_up: Callable[[UnavailableError], None], key: str) -> Iterator[None]:
    """End the body at something of SGLang that moved, and tell ``give_up``: the engine is built on without us.

    ``key``: of the hook's target in ``release``. Never around a call of SGLang's own, nor while it serves. Errors of
    ours, and all others, travel on.
    """
    try:
        yield
    except Qwen35Error:
        raise
    except _MOVED as exc:
        found, hook = installed_release() or release.version, release.targets[key].path
        moved = UnavailableError(f"the seam for SGLang {found}", [f"in the hook on {hook}: {said(exc)}"])
        moved.__cause__ = exc
        give_up(moved)
