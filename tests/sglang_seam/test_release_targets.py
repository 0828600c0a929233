"""The seam of each release has every target that it must have, whichever release is installed."""

from __future__ import annotations

import pytest
from release_targets import CHECKED, HOOKED, THERE, WEIGHT_UPDATES, update_path
from seam_machine import installed_seam, start

from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seams import release_seam


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
def test_no_target_is_dropped(version: str) -> None:
    targets = release_seam(version).targets.values()
    assert CHECKED[version] - {target.path for target in targets if target.signature is not None} == set()
    assert THERE[version] - {target.path for target in targets} == set()


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
def test_every_weight_update_is_one_of_the_seams(version: str) -> None:
    release = release_seam(version)
    paths = [release.targets[key].path for key in release.weight_updates]
    assert sorted(paths) == sorted(update_path(name) for name in WEIGHT_UPDATES[version])


def test_everything_that_must_be_hooked_is() -> None:
    phases = dict.fromkeys(("gdn_decode", "gdn_extend", "gdn_verify"), "reference")
    start(**phases, finalize="reference")
    assert set(seam.installed()) == HOOKED[installed_seam().version]
