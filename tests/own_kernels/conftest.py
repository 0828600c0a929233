"""Cases that share compiled kernels run in one worker of pytest-xdist (`--dist loadgroup`), where that is there."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        asked = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if {"name", "state", "heads"} <= set(asked):
            group = f"{asked['name']}-{asked['state']}-{asked['heads']}"
            item.add_marker(pytest.mark.xdist_group(group))
