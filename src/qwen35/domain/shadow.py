"""Which calls a shadow adapter repeats: the setting "ADAPTER:RATE" and the rule that samples."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from qwen35.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ShadowSpec:
    """``adapter`` repeats the share ``rate``, in (0, 1], of the eager calls of each phase."""

    adapter: str
    rate: float

    @property
    def every(self) -> int:
        """One call in so many is repeated: ``round(1 / rate)``, at least 1."""
        return round(min(1.0 / self.rate, float(sys.maxsize)))

    def samples(self, number: int) -> bool:
        """Whether a phase's eager call ``number``, counted from 1, is repeated: the last of each ``every``."""
        return number % self.every == 0


def parse_shadow(text: str) -> ShadowSpec:
    """The specification that ``text``, such as "flashinfer:0.01", spells.

    Raises ``ConfigurationError`` where adapter or rate is missing, and for a rate outside (0, 1].
    """
    adapter, _, given = (part.strip() for part in text.rpartition(":"))
    if not adapter:
        raise ConfigurationError(
            f"gdn_shadow must be 'ADAPTER:RATE' such as 'flashinfer:0.01', got {text!r}; name both, or unset it"
        )
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate <= 1.0:
        raise ConfigurationError(f"the rate of gdn_shadow must be a number in (0, 1], got {given!r} in {text!r}")
    return ShadowSpec(adapter, rate)
