"""What a vendor's package is and has, read from its files, and how to import it without changing the process."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

#: Module below the package, function, arguments that we pass.
Required = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """``found`` packages with their versions ("unknown" without metadata), ``missing`` packages and names."""

    found: Mapping[str, str]
    missing: tuple[str, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the vendor's kernels cannot be used; none where they can."""
        have = ", ".join(f"{name} {number}" for name, number in self.found.items()) or "nothing"
        return tuple(f"unavailable: missing {name} (found {have})" for name in self.missing)


def report(package: str, distributions: Mapping[str, str], required: Iterable[Required]) -> ReleaseReport:
    """What is installed of ``distributions`` (by import name) and of what we call in ``package``. Never raises;
    reads files and metadata and imports nothing."""
    found: dict[str, str] = {}
    missing: list[str] = []
    for module, distribution in distributions.items():
        if found_spec(module) is None:
            missing.append(module)
            continue
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            found[distribution] = "unknown"
    spec = found_spec(package)
    if spec is not None:
        for folder in list(spec.submodule_search_locations or [])[:1]:
            missing += missing_names(package, Path(folder), required)
    return ReleaseReport(found=MappingProxyType(found), missing=tuple(missing))


def found_spec(package: str) -> ModuleSpec | None:
    """Where ``package`` is; None where it is not, or where what was put into ``sys.modules`` under its name does not
    say."""
    try:
        return find_spec(package)
    except ValueError:
        return None


def missing_names(package: str, folder: Path, required: Iterable[Required]) -> list[str]:
    """Which functions and arguments the sources in ``folder`` do not define."""
    missing: list[str] = []
    for module, function, arguments in required:
        name = f"{package}.{module}"
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError) as exc:
            missing.append(f"{name} ({type(exc).__name__})")
            continue
        defined = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
        if not defined:
            missing.append(f"{name}.{function}")
            continue
        taken = {a.arg for a in (*defined[-1].args.args, *defined[-1].args.kwonlyargs)}
        missing += [f"argument {a!r} of {name}.{function}" for a in arguments if a not in taken]
    return missing


@contextmanager
def environment_kept(declared: frozenset[str] = frozenset()) -> Iterator[None]:
    """Undo what happens to the process environment inside, but for the variables ``declared``."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before) - declared:
            del os.environ[name]
        os.environ.update({n: v for n, v in before.items() if n not in declared})
