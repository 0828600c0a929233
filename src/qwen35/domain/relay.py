"""What a relay field is, and when a payload may be carried.

Values that one step produces and a later step reads travel in pool-indexed buffers. A field's buffer is laid out when
that field is first carried, whatever came before, and never again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwen35.domain.errors import DtypeError, ShapeError

#: The row that padded batches write and read: its content is nobody's.
PADDING_ROW = 0


@dataclass(frozen=True, slots=True)
class RelayField:
    """``tail`` is the shape of one row, ``dtype`` a dtype's name."""

    tail: tuple[int, ...]
    dtype: str


def new_fields(known: Mapping[str, RelayField], payload: Mapping[str, RelayField]) -> dict[str, RelayField]:
    """The fields of ``payload`` that are carried for the first time.

    Raises ``ShapeError`` or ``DtypeError`` where a known field drifted: a row is never cast or broadcast in silence.
    """
    fresh: dict[str, RelayField] = {}
    for name, field in payload.items():
        before = known.get(name)
        if before is None:
            fresh[name] = field
        elif before.tail != field.tail:
            raise ShapeError(f"relay field {name!r} must have rows of {before.tail} as first carried, got {field.tail}")
        elif before.dtype != field.dtype:
            raise DtypeError(f"relay field {name!r} must be {before.dtype} as first carried, got {field.dtype}")
    return fresh
