"""What the documents and plots of both swap experiments have in common."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from qwen35.domain.errors import UnavailableError
from qwen35.testing.measure import Timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def timing_fields(timing: Timing | None, method: str | None) -> dict[str, Any]:
    """A result's times in microseconds and how they were taken; all null where it did not run."""
    if timing is None:
        return dict.fromkeys(("time_us", "low_us", "high_us", "spread_us", "samples", "method"))
    times = {"time": timing.median_us, "low": timing.low_us, "high": timing.high_us, "spread": timing.spread_us}
    rounded = {f"{name}_us": round(value, 2) for name, value in times.items()}
    return {**rounded, "samples": timing.samples, "method": method}


def finite(value: float | None) -> float | None:
    """``value``, or null where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def new_figure(width: float, panels: int) -> Figure:
    """An empty figure with room for ``panels`` below one another.

    Raises ``UnavailableError`` where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise UnavailableError("plot", ["matplotlib is not installed: pip install 'qwen35[report]'"]) from exc
    return Figure(figsize=(width, 1.0 + 3.2 * max(1, panels)), layout="constrained")
