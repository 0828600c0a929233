"""Commands that need torch."""

from __future__ import annotations

import sys
from typing import Any

from typer.core import TyperCommand

from qwen35.cli.interrupts import deferred


class FrameworkCommand(TyperCommand):
    """A command that needs torch: it is imported before the command begins, where a Ctrl-C cannot be lost."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises ``KeyboardInterrupt`` for a Ctrl-C that came while torch was imported."""
        if "torch" not in sys.modules:
            with deferred():
                import torch  # noqa: F401
        return super().invoke(ctx)
