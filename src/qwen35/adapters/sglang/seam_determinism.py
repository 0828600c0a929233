"""What SGLang's --enable-deterministic-inference leaves of a user's choices.

It promises that a sequence's result is the same in every batch. Our contract promises no such thing, and FlashInfer's
prefill splits a sequence by how many others there are, so SGLang refuses it for its own kernels too.
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import UnsupportedError

SPLITS_BY_BATCH = "flashinfer"
SWITCH = "--enable-deterministic-inference"


def deterministic() -> bool:
    """Whether this launch asked for it. The launch's arguments are published when a GDN backend is made."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def deterministic_note(routes: Mapping[Phase, str], fallback: str | None) -> str | None:
    """The line that says what is not promised, None where nothing is routed.

    Raises ``UnsupportedError`` where FlashInfer would serve extend, as the choice or as its fallback.
    """
    extend = routes.get(Phase.EXTEND)
    if extend is not None and SPLITS_BY_BATCH in (extend, fallback):
        chosen = "QWEN35_GDN_EXTEND" if extend == SPLITS_BY_BATCH else "QWEN35_GDN_FALLBACK"
        raise UnsupportedError(
            f"extend under {SWITCH}",
            [f"an adapter other than {SPLITS_BY_BATCH} is required, whose prefill depends on the batch, got {chosen}="
             f"{SPLITS_BY_BATCH}; set triton, unset it, or switch {SWITCH} off"],
        )  # fmt: skip
    if not routes:
        return None
    served = ", ".join(f"{phase} by {name}" for phase, name in routes.items())
    return f"{SWITCH} is on: no adapter promises that a sequence's result is the same in every batch ({served})"
