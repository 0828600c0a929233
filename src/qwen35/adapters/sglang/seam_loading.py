"""Whether SGLang would load this plugin at all: its own variable may name others only."""

from __future__ import annotations

import os

#: The names of plugins that SGLang loads, joined by commas; unset or empty: every one that is installed.
VARIABLE = "SGLANG_PLUGINS"
#: Our name among SGLang's plugins: that of the entry point.
PLUGIN = "qwen35"


def left_out() -> list[str]:
    """Why SGLang does not load this plugin, as its loader reads ``SGLANG_PLUGINS``; nothing where it does."""
    given = os.environ.get(VARIABLE, "")
    if not given or PLUGIN in {name.strip() for name in given.split(",")}:
        return []
    return [f"{VARIABLE} = {given!r} does not name {PLUGIN}, so SGLang does not load the plugin"]
