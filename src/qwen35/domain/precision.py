"""Error bounds, derived from dtypes.

An error is ``||got - oracle|| / ||oracle||`` (Frobenius, float64), for outputs that cancel relative to their terms
instead (``qwen35.testing.relative_error`` says why). Rounding to a dtype with unit roundoff u gives at most u
elementwise, so a result that is computed exactly and rounded once stays within 1 u.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Unit roundoff: half the distance from 1 to the next number. "tf32" keeps ten mantissa bits of float32.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """Largest relative error of a phase's outputs and of the states that it leaves."""

    output: float
    state: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How an adapter computes one phase: the dtypes its products run in, and how many roundings pile up.

    ``products`` is the dtype of the operands of matrix products (None: that of the tokens);
    ``roundings`` multiplies the sum of the unit roundoffs involved.
    """

    products: str | None = "float32"
    roundings: float = 1.0

    def bound(self, token_dtype: str, state_dtype: str, steps: int = 1) -> ErrorBound:
        """Bounds for tokens and states of these dtypes.

        ``steps`` counts how often the state was rounded to its dtype on the way (1 for a call of one
        phase, n for n decodes in a row): roundings of independent steps add up like a random walk.
        """
        compute = UNIT_ROUNDOFF[self.products or token_dtype]
        stored = UNIT_ROUNDOFF[state_dtype] * steps**0.5
        # float32 accumulation over hundreds of terms: 64 units cover it at every public width.
        floor = 64 * UNIT_ROUNDOFF["float32"] if compute >= UNIT_ROUNDOFF["float32"] else 64 * compute
        state = self.roundings * max(compute, stored) + floor
        return ErrorBound(output=self.roundings * UNIT_ROUNDOFF[token_dtype] + state, state=state)
