"""From a Hugging Face checkpoint directory to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen35.domain.errors import CheckpointError, ConfigurationError, Qwen35Error
from qwen35.model.config import TextConfig, read_config
from qwen35.model.manifest import Source, match, refuse_far_more
from qwen35.model.model import ALONE, Model
from qwen35.model.parallel import TensorParallel
from qwen35.model.progress import progress_bar
from qwen35.model.safetensors_files import list_tensors, opened
from qwen35.model.sharding import piece_of, shard_config
from qwen35.model.tokenizer import Tokenizer, find_tokenizer
from qwen35.model.weights import WeightSpec, weight_table
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.short_convolution import ShortConvolution
from qwen35.services.finalize_agreement import GroupAgreement
from qwen35.services.finalize_fusion import FinalizeService
from qwen35.services.platform import detect_platform

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def load_model(
    directory: str | PathLike[str],
    *,
    gated_delta_rule: GatedDeltaRule,
    short_convolution: ShortConvolution,
    finalize: FinalizeService | None = None,
    tensor_parallel: TensorParallel = ALONE,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    quiet: bool = False,
) -> Model:
    """The model of a checkpoint ``directory`` in the layout of Hugging Face, computing on the given kernels.

    Reads config.json, model.safetensors or its shards, and tokenizer.json where there is one. Model types
    qwen3_5_text and qwen3_5_moe_text, and the text part of qwen3_5 and qwen3_5_moe; the vision tower
    (``model.visual.``) and the multi-token prediction layers (``mtp.``) are passed over. Expert weights may be
    packed or one by one.

    ``dtype`` None takes the checkpoint's own. Norm weights, A_log and dt_bias stay in float32 whatever it is.
    ``quiet`` shows no progress bar. Raises ``CheckpointError`` (naming the file, the keys or the tensors) for
    anything that does not fit, and leaves nothing behind; ``ConfigurationError`` for a ``device`` that is not there
    ("auto", "cpu", "cuda", "cuda:1") and kernels that do not implement their port, before anything is read.

    With ``tensor_parallel`` ranks every one of them calls this together, on its own ``device``, and reads its share
    of the weights; an error on one rank is a ``CheckpointError`` on the others. ``finalize`` may then fuse the sums
    over ranks. Raises ``ConfigurationError`` where heads or widths cannot be divided.
    """
    if not isinstance(tensor_parallel, TensorParallel):
        raise ConfigurationError(f"tensor_parallel must be a TensorParallel, got {tensor_parallel!r}")

    def load() -> _Loaded:
        _check_kernels(gated_delta_rule, short_convolution, finalize)
        return _load(_path(directory), tensor_parallel, _device(device), dtype, quiet)

    loaded = _together(tensor_parallel, load)
    with torch.device("meta"):
        model = Model(
            loaded.config, gated_delta_rule=gated_delta_rule, short_convolution=short_convolution, finalize=finalize,
            tensor_parallel=tensor_parallel, tokenizer=loaded.tokenizer,
        )  # fmt: skip
    model.load_state_dict(loaded.weights, strict=True, assign=True)
    return model.to(loaded.device).eval()


@dataclass(frozen=True, slots=True)
class _Loaded:
    config: TextConfig
    tokenizer: Tokenizer | None
    weights: dict[str, Tensor]
    device: torch.device


def _check_kernels(rule: object, convolution: object, finalize: object) -> None:
    for name, given, port in (
        ("gated_delta_rule", rule, GatedDeltaRule), ("short_convolution", convolution, ShortConvolution),
    ):  # fmt: skip
        if not isinstance(given, port):
            raise ConfigurationError(
                f"{name} must implement {port.__name__}, got {given!r}; qwen35.build(...).{name}() gives one"
            )
    if not isinstance(finalize, FinalizeService | None):
        raise ConfigurationError(
            f"finalize must be a FinalizeService or None, got {finalize!r}; qwen35.build(...).finalize() gives one"
        )


def _path(directory: object) -> Path:
    if not isinstance(directory, str | PathLike):
        raise ConfigurationError(f"directory must be the path of a checkpoint, got {directory!r}")
    return Path(directory)


def _device(device: object) -> torch.device:
    if not isinstance(device, str | torch.device):
        raise ConfigurationError(f"device must be text or a torch.device, got {device!r}")
    return torch.device(detect_platform(str(device)).device)


def _load(path: Path, ranks: TensorParallel, device: torch.device, dtype: torch.dtype | None, quiet: bool) -> _Loaded:
    """What the directory holds, of the weights this rank's share."""
    config = read_config(path)
    chosen = _dtype(config, dtype)
    shard_config(config, ranks.size)  # sizes that do not divide are refused before anything is read
    stored = list_tensors(path)
    refuse_far_more(config, stored)
    table = weight_table(config)
    sources = match(table, stored, config.tied)
    tokenizer = find_tokenizer(path)
    return _Loaded(config, tokenizer, _Reader(ranks, table, device, chosen).read(sources, quiet), device)


def _together(ranks: TensorParallel, load: Callable[[], _Loaded]) -> _Loaded:
    """``load()`` on every rank, or an error on all: each checks only what it reads, and none is left waiting."""
    if ranks.group is None:
        return load()
    loaded: _Loaded | None = None
    error: Exception | None = None
    try:
        loaded = load()
    except (Qwen35Error, RuntimeError, OSError) as exc:  # a device that is full among them
        error = exc
    found = GroupAgreement(ranks.group).exchange(None if error is None else str(error))
    if error is not None:
        raise error
    told = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
    if told or loaded is None:
        raise CheckpointError(f"another rank could not load its share: {'; '.join(told)}")
    return loaded


def _dtype(config: TextConfig, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        if config.dtype not in DTYPES:
            raise CheckpointError(f"config.json: dtype must be one of {', '.join(DTYPES)}, got {config.dtype}")
        return DTYPES[config.dtype]
    if dtype not in DTYPES.values():
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return dtype


class _Reader:
    """Reads one rank's piece of every tensor, each file opened once."""

    def __init__(
        self, ranks: TensorParallel, table: Mapping[str, WeightSpec], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._ranks, self._table, self._device, self._dtype = ranks, table, device, dtype
        self._weights: dict[str, Tensor] = {}

    def read(self, sources: list[Source], quiet: bool) -> dict[str, Tensor]:
        head: Tensor | None = None
        with progress_bar(quiet) as bar:
            task = bar.add_task("Loading weights", total=len(sources))
            for path, group in groupby(sources, key=lambda source: source.stored.path):
                with opened(path) as file:
                    for source in group:
                        tensor, start = self._piece(file, source)
                        if source.weight not in self._table:
                            head = tensor
                        else:
                            self._place(source, tensor, start)
                        bar.advance(task)
        if head is not None and not torch.equal(head, self._weights[_EMBEDDING]):
            raise CheckpointError(f"{_HEAD} must equal {_EMBEDDING}, since config.json ties them; it differs")
        return self._weights

    def _piece(self, file: Any, source: Source) -> tuple[Tensor, int]:
        """This rank's piece, converted, and where it begins in a packed weight."""
        spec = self._table.get(source.weight, self._table[_EMBEDDING])
        piece = piece_of(spec, source.part, self._ranks.size, self._ranks.rank)
        name = source.stored.name
        stored = piece.read(file.get_slice(name)) if piece.cuts else file.get_tensor(name)
        kind = torch.float32 if spec.keep_float32 else self._dtype
        tensor = _finite(stored, source, self._device, kind)
        return torch.zeros_like(tensor) if piece.zero else tensor, piece.start

    def _place(self, source: Source, tensor: Tensor, start: int) -> None:
        part, weights = source.part, self._weights
        if part is None:
            weights[source.weight] = tensor
            return
        if source.weight not in weights:
            spec = self._table[source.weight]
            shape = list(spec.shape)
            if spec.shard_dim is not None:
                shape[spec.shard_dim] //= self._ranks.size
            weights[source.weight] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        weights[source.weight][part.expert, start : start + tensor.shape[0]] = tensor


def _finite(tensor: Tensor, source: Source, device: torch.device, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(device=device, dtype=dtype)
    if bool(torch.isfinite(converted).all()):
        return converted
    stored = source.stored
    why = "has NaN or infinite values"
    if bool(torch.isfinite(tensor).all()):
        why = f"has values beyond the range of {dtype}"
    raise CheckpointError(f"{stored.name} in {stored.path} {why}")
