"""From a Hugging Face checkpoint directory to a model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from qwen35.domain.errors import CheckpointError, ConfigurationError
from qwen35.model.config import TextConfig, read_config
from qwen35.model.manifest import Source, match
from qwen35.model.model import Model
from qwen35.model.progress import progress_bar
from qwen35.model.safetensors_files import list_tensors, opened
from qwen35.model.tokenizer import find_tokenizer
from qwen35.model.weights import WeightSpec, weight_table
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.short_convolution import ShortConvolution

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def load_model(
    directory: str | PathLike[str],
    *,
    gated_delta_rule: GatedDeltaRule,
    short_convolution: ShortConvolution,
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
    anything that does not fit, and leaves nothing behind.
    """
    path = Path(directory)
    config = read_config(path)
    chosen = _dtype(config, dtype)
    target = torch.device(device)
    table = weight_table(config)
    sources = match(table, list_tensors(path), config.tied)
    tokenizer = find_tokenizer(path)
    weights = _read(table, sources, target, chosen, quiet)
    with torch.device("meta"):
        model = Model(
            config, gated_delta_rule=gated_delta_rule, short_convolution=short_convolution, tokenizer=tokenizer
        )
    model.load_state_dict(weights, strict=True, assign=True)
    return model.to(target).eval()


def _dtype(config: TextConfig, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        if config.dtype not in DTYPES:
            raise CheckpointError(f"config.json: dtype must be one of {', '.join(DTYPES)}, got {config.dtype}")
        return DTYPES[config.dtype]
    if dtype not in DTYPES.values():
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return dtype


def _read(
    table: Mapping[str, WeightSpec], sources: list[Source], device: torch.device, dtype: torch.dtype, quiet: bool
) -> dict[str, Tensor]:
    """Every weight on ``device``, each file opened once."""
    weights: dict[str, Tensor] = {}
    head: Tensor | None = None
    with progress_bar(quiet) as bar:
        task = bar.add_task("Loading weights", total=len(sources))
        for path, group in groupby(sources, key=lambda source: source.stored.path):
            with opened(path) as file:
                for source in group:
                    spec = table.get(source.weight, table[_EMBEDDING])
                    kind = torch.float32 if spec.keep_float32 else dtype
                    tensor = _finite(file.get_tensor(source.stored.name), source, device, kind)
                    if source.weight not in table:
                        head = tensor
                    else:
                        _place(weights, spec, source, tensor)
                    bar.advance(task)
    if head is not None and not torch.equal(head, weights[_EMBEDDING]):
        raise CheckpointError(f"{_HEAD} must equal {_EMBEDDING}, since config.json ties them; it differs")
    return weights


def _finite(tensor: Tensor, source: Source, device: torch.device, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(device=device, dtype=dtype)
    if bool(torch.isfinite(converted).all()):
        return converted
    stored = source.stored
    why = "has NaN or infinite values"
    if bool(torch.isfinite(tensor).all()):
        why = f"has values beyond the range of {dtype}"
    raise CheckpointError(f"{stored.name} in {stored.path} {why}")


def _place(weights: dict[str, Tensor], spec: WeightSpec, source: Source, tensor: Tensor) -> None:
    part = source.part
    if part is None:
        weights[source.weight] = tensor
        return
    if source.weight not in weights:
        weights[source.weight] = torch.empty(spec.shape, dtype=tensor.dtype, device=tensor.device)
    weights[source.weight][part.expert, part.start : part.stop] = tensor
