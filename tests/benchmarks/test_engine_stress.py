"""Requests at random times, some of them cancelled: what is counted shows whether the engine ended those."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_engine


class FakeEngine:
    """A token a millisecond; ``aborts``: whether it ends a request that is to end, by an error where ``refuses``."""

    def __init__(self, *, aborts: bool = True, refuses: bool = False) -> None:
        self._aborts, self._refuses = aborts, refuses
        self._ended: set[str] = set()
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort)

    def _abort(self, rid: str) -> None:
        if self._aborts:
            self._ended.add(rid)

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], rid: str) -> dict[str, Any]:
        ids: list[int] = []
        while len(ids) < sampling_params["max_new_tokens"]:
            await asyncio.sleep(0.001)
            if rid in self._ended:
                if self._refuses:
                    raise ValueError("aborted")
                break
            ids.append(input_ids[0] + len(ids))
        return {"output_ids": ids}


def stressed(folder: Path, engine: FakeEngine) -> dict[str, Any]:
    (folder / "config.json").write_text('{"vocab_size": 64}')
    return asyncio.run(sglang_engine.stress(engine, argparse.Namespace(model=str(folder), stress=30)))


@pytest.mark.parametrize("refuses", [False, True])
def test_requests_that_are_cancelled_end_and_the_others_are_whole(tmp_path: Path, refuses: bool) -> None:
    found = stressed(tmp_path, FakeEngine(refuses=refuses))
    assert found["cancelled"] == found["ended"] > 0
    assert found["complete"] == found["of"] == 30 - found["cancelled"]
    assert found["same_ids_as_alone"] == found["compared_alone"] == 20


def test_an_engine_that_ends_none_of_them_is_seen(tmp_path: Path) -> None:
    found = stressed(tmp_path, FakeEngine(aborts=False))
    assert (found["ended"], found["complete"]) == (0, found["of"])
    assert found["cancelled"] > 0
