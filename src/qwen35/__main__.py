"""``python -m qwen35``."""

from __future__ import annotations

from qwen35.cli.main import app

if __name__ == "__main__":
    app(prog_name="qwen35")
