"""Text to token ids and back, where the checkpoint has a tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers  # type: ignore[import-untyped]

from qwen35.domain.errors import CheckpointError
from qwen35.model.config import read_json


class Tokenizer:
    """A tokenizer.json. Raises ``CheckpointError`` naming the file where it cannot be read."""

    def __init__(self, path: Path) -> None:
        read_json(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # The package raises nothing narrower.
            raise CheckpointError(f"{path} is not a tokenizer that can be read: {exc}") from exc

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``, without special tokens added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def find_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint ``directory``, None where it has no tokenizer.json."""
    path = directory / "tokenizer.json"
    return Tokenizer(path) if path.is_file() else None
