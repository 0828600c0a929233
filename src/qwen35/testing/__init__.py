"""Law suites for any implementation of a port, shipped so that third-party adapters run them too.

``run_laws("gated_delta_rule", make_adapter)`` checks every clause and returns a report a law;
``truth(kit, call)`` is the float64 oracle of one call. Needs neither a GPU nor a test framework.
"""

from __future__ import annotations

from qwen35.testing.bench import Bench
from qwen35.testing.case import Case, ConvSizes, GdnSizes
from qwen35.testing.conformance import LawReport, LawStatus, iter_laws, laws_of, run_law, run_laws
from qwen35.testing.kit import Kit, Parts, Served
from qwen35.testing.law import Law
from qwen35.testing.limits import Limits, Profile, limits_for
from qwen35.testing.measure import relative_error
from qwen35.testing.oracle import Truth, assert_close, truth
from qwen35.testing.tables import KITS, LAWS

__all__ = [
    "KITS", "LAWS", "Bench", "Case", "ConvSizes", "GdnSizes", "Kit", "Law", "LawReport", "LawStatus", "Limits", "Parts",
    "Profile", "Served", "Truth", "assert_close", "iter_laws", "laws_of", "limits_for", "relative_error", "run_law",
    "run_laws", "truth",
]  # fmt: skip
