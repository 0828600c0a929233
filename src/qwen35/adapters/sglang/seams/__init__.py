"""One module per supported release of SGLang: what is hooked or relied on, by name and signature, and what differs.

Only these and the modules ``seam*.py`` beside this folder import SGLang in a running engine; those use names that every
release here has, each of them among its targets, and its registry of hooks.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from qwen35.adapters.sglang.seams.release import Release
from qwen35.domain.errors import UnavailableError

#: Newest last: an untested release is tried with the last one.
TESTED = {"0.5.20": "v0_5_20", "0.5.23": "v0_5_23"}


def installed_release() -> str | None:
    """The version of SGLang that is installed here, None where there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def release_seam(found: str, untested: bool = False) -> Release:
    """The seam for release ``found``; ``untested`` tries one that no test has seen.

    Raises ``UnavailableError`` naming the tested releases.
    """
    name = TESTED.get(found)
    if name is None:
        if not untested:
            raise UnavailableError(
                f"the seam for SGLang {found}",
                [f"tested with {' and '.join(TESTED)} only; QWEN35_SGLANG_UNTESTED=true tries it all the same"],
            )
        name = list(TESTED.values())[-1]
    release = import_module(f"{__name__}.{name}").RELEASE
    if not isinstance(release, Release):
        raise UnavailableError(f"the seam for SGLang {found}", [f"{name}.RELEASE is no Release"])
    return release
