"""Writes the package's metadata into a folder, so that a checkout runs without being installed.

    python tools/make_dist_info.py FOLDER
    PYTHONPATH=src:FOLDER python ...

Entry points (our adapters, the command, SGLang's plugin group) are then found as after ``pip install``.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def entry_points_text(project: dict[str, Any]) -> str:
    """``entry_points.txt`` of the ``[project]`` table: scripts and every entry-point group."""
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    blocks = []
    for group, points in groups.items():
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def write(folder: Path) -> Path:
    """Write ``NAME-VERSION.dist-info`` into ``folder`` and return its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(entry_points_text(project))
    return info


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    sys.stdout.write(f"{write(Path(sys.argv[1]))}\n")
