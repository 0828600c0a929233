"""Whether the tensor-parallel ranks of a launch were told the same of fusion, asked before one waits for another.

Each rank reads its own environment, which can differ from node to node. A rank that was told of no fusion would never
come to where the others make theirs, so it comes to this, whatever it was told.
"""

from __future__ import annotations

import logging

from qwen35.adapters.sglang.seams.release import Release
from qwen35.domain.errors import AgreementError, ConfigurationError, UnavailableError
from qwen35.services.finalize_agreement import Agreements

logger = logging.getLogger("qwen35")

NOTHING_ASKED = "SGLang's own fusion (QWEN35_FINALIZE is unset, auto or off)"
_ABSENT = (
    "a rank on which the plugin is not installed, could not be, or is switched off (QWEN35_SGLANG_PLUGIN) does not "
    "answer; install it alike on every node, or one has stopped: see its log"
)


class RankSettings:
    """What this rank was told: the adapter ``requested`` (None: SGLang's own choice), ``checked`` and ``strict``."""

    def __init__(
        self, release: Release, requested: str | None, agreements: Agreements, *, checked: bool, strict: bool
    ) -> None:
        self._release, self._requested, self._agreements = release, requested, agreements
        self._checked, self._strict = checked, strict
        self._agreed = False

    def agree(self) -> None:
        """Compare with the other tensor-parallel ranks, once; every rank calls this together, outside capture.

        Raises ``ConfigurationError`` on all of them where they were told different things. Where one does not answer
        in time, ``UnavailableError`` where this one was told of an adapter, else only a line in the log.
        """
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        if self._agreed or parallel.tp_size == 1:
            return
        try:
            heard = self._agreements.of(parallel.tp_group.device_group, parallel.tp_size).exchange(self._told())
        except AgreementError as lost:
            if self._requested is not None:
                raise UnavailableError(f"finalize = {self._requested!r}", [_ABSENT, str(lost)]) from lost
            logger.warning("qwen35: not every rank says whether it fuses, this one does not: %s; %s", _ABSENT, lost)
            heard = []
        if any(told != heard[0] for told in heard):
            texts = "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(heard))
            raise ConfigurationError(
                f"the tensor-parallel ranks must be set alike, got {texts}. Set QWEN35_FINALIZE, QWEN35_CHECKED, "
                "QWEN35_SGLANG_STRICT and SGLang's CuTe DSL switch alike in every rank's environment or qwen35.toml"
            )
        self._agreed = True

    def _told(self) -> str:
        """All by which ranks part ways in what they wait for; nothing does where no adapter is asked for."""
        if self._requested is None:
            return NOTHING_ASKED
        words = {"checked": self._checked, "strict": self._strict, "SGLang's CuTe DSL": self._release.cutedsl_on()}
        return f"finalize = {self._requested!r}" + "".join(f", {name}" for name, on in words.items() if on)
