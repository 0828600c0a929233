"""Reading keys of a configuration so that one error lists everything that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from qwen35.domain.errors import CheckpointError


class Keys:
    """A view of one JSON object that collects problems; after a problem a harmless 1 stands in for the value.

    ``prefix`` names the object in messages; ``parent`` is where a nested view collects.
    """

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "", parent: Keys | None = None) -> None:
        self.where = where
        self._values, self._prefix = values, prefix
        self._problems: list[str] = [] if parent is None else parent._problems
        self._spoilt: set[str] = set() if parent is None else parent._spoilt

    def get(self, name: str) -> object:
        """The value, None where it is absent or null."""
        return self._values.get(name)

    def wrong(self, name: str, expected: str, got: object) -> None:
        """Note that key ``name`` (or an entry of it, ``name[3]``) must be ``expected``."""
        self._spoilt.add(self._prefix + name.partition("[")[0])
        self._problems.append(f"{self._prefix}{name} must be {expected}, got {got}")

    def holds(self, *names: str) -> bool:
        """Whether nothing was wrong with these keys so far: only then can a rule between them be judged."""
        return not any(self._prefix + name in self._spoilt for name in names)

    def size(self, name: str, called: str | None = None, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least ``least``; ``called`` is the name that a missing key is reported under."""
        value = self.get(name)
        if value is None:
            return self._missing(name, called) if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.wrong(name, f"a whole number of at least {least}", repr(value))
            return 1
        return value

    def positive(self, name: str) -> float:
        """A finite number above 0."""
        value = self.get(name)
        if value is None:
            return self._missing(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.wrong(name, "a finite number above 0", repr(value))
            return 1
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false, ``default`` where absent."""
        value = self.get(name)
        return self.boolean(name, default if value is None else value)

    def boolean(self, name: str, value: object) -> bool:
        """``value`` itself, which must be true or false."""
        if not isinstance(value, bool):
            self.wrong(name, "true or false", repr(value))
        return value is True

    def fixed(self, name: str, only: object) -> None:
        """Absent, or the ``only`` value that this library has."""
        value = self.get(name)
        if value is not None and value != only:
            self.wrong(name, f"{only!r}, the only one supported", repr(value))

    def raise_problems(self) -> None:
        """Raise ``CheckpointError`` listing what was noted, if anything was."""
        if self._problems:
            raise CheckpointError(f"{self.where}: {'; '.join(dict.fromkeys(self._problems))}")

    def _missing(self, name: str, called: str | None = None) -> int:
        self._spoilt.add(self._prefix + name)
        self._problems.append(f"{self._prefix}{called or name} is missing")
        return 1
