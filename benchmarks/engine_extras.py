"""What a benchmark brings into an engine's processes besides the package: a recorder and deliberately wrong adapters.

None belongs to the package, so all come as a third party's would: by a dist-info, here in a folder that is put on
PYTHONPATH before the engine starts its processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAME, VERSION = "qwen35_bench_extras", "0"
ENTRY_POINTS = """[sglang.srt.plugins]
qwen35_bench_recorder = engine_recorder:register

[qwen35.adapters]
gated_delta_rule.wrong = engine_wrong:GATED_DELTA_RULE
gated_delta_rule.forgetful = engine_wrong:FORGETFUL
"""


def write_extras(folder: Path) -> Path:
    """Write the dist-info into ``folder`` and return its path."""
    info = folder / f"{NAME}-{VERSION}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return info


def bring_extras(folder: Path) -> None:
    """Make the extras visible to this process and to every one that it starts."""
    write_extras(folder)
    for path in (str(HERE), str(folder)):
        if path not in sys.path:
            sys.path.append(path)
        before = os.environ.get("PYTHONPATH", "")
        if path not in before.split(os.pathsep):
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, path]))
