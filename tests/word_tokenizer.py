"""A tokenizer of whole words, as transformers stores one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_tokenizer(directory: Path, words: Mapping[str, int], unknown: str) -> None:
    """Write ``tokenizer.json`` of ``words`` and their ids; ``unknown`` is the one for all others."""
    (directory / "tokenizer.json").write_text(
        json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": words, "unk_token": unknown},
        })
    )  # fmt: skip
