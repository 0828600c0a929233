"""What a model directory's config.json says of Gated DeltaNet, read without SGLang."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen35.adapters.sglang.seam_gdn import MODEL_FAMILY
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import GdnPlan

#: SGLang sets this from --mamba-ssm-dtype, and it wins over the model's configuration.
STATE_DTYPE_VARIABLE = "SGLANG_MAMBA_SSM_DTYPE"
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
#: Stands for sizes that only a running engine knows.
_SMALL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's configuration says: its ``family`` (model_type) and, for Qwen3.5, its GDN ``geometry``.

    ``state_source``: who chose ``state_dtype``.
    """

    family: str
    geometry: GdnGeometry | None
    state_dtype: torch.dtype
    state_source: str

    @property
    def unrouted(self) -> str | None:
        """Why the plugin routes nothing of this model; None where it does."""
        if not self.family.startswith(MODEL_FAMILY):
            return f"{self.family} is not Qwen3.5"
        return None if self.geometry is not None else f"{self.family} has no Gated DeltaNet layers"

    def plan(self, device: torch.device) -> GdnPlan | None:
        """The smallest plan of this geometry: what an adapter says to it, it says to every larger one."""
        if self.geometry is None or self.unrouted is not None:
            return None
        return GdnPlan(
            geometry=self.geometry, state_dtype=self.state_dtype, device=device, max_batch=_SMALL, max_tokens=_SMALL
        )

    def line(self) -> str:
        """What was read, or why it does not matter."""
        g = self.geometry
        if self.unrouted is not None or g is None:
            return f"{self.unrouted}: nothing is routed"
        return (
            f"{self.family}, GDN heads {g.key_heads} (q, k) and {g.value_heads} (v) before tensor parallelism, "
            f"widths {g.key_width} and {g.value_width}, state {self.state_dtype} ({self.state_source}; "
            f"--mamba-ssm-dtype of the launch wins)"
        )


def read_model(directory: Path) -> ModelFacts:
    """From ``directory``/config.json. Raises ``ConfigurationError``, naming file and key, where it is not one."""
    path = directory / "config.json"
    try:
        whole: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"{path} must be a model's configuration: {exc}") from exc
    outer = _object(path, "the file", whole)
    text = _object(path, "text_config", outer.get("text_config", outer))
    family = text.get("model_type", outer.get("model_type", "unknown"))
    if not isinstance(family, str):
        raise ConfigurationError(f"{path}: model_type must be a string, got {family!r}")
    dtype, source = _state_dtype(text)
    return ModelFacts(family=family, geometry=_geometry(path, text), state_dtype=dtype, state_source=source)


def _object(path: Path, key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: {key} must be an object of a model's configuration, got {value!r:.80}")
    return value


def _geometry(path: Path, text: Mapping[str, Any]) -> GdnGeometry | None:
    sizes = [text.get(name) for name in _SIZES]
    if all(size is None for size in sizes):
        return None
    for name, size in zip(_SIZES, sizes, strict=True):
        if type(size) is not int:
            raise ConfigurationError(f"{path}: {name} must be a whole number, got {size!r}")
    heads, value_heads, key_width, value_width = (int(size) for size in sizes if size is not None)
    try:
        return GdnGeometry(key_heads=heads, value_heads=value_heads, key_width=key_width, value_width=value_width)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{path}: {', '.join(_SIZES)}: {exc}") from exc


def _state_dtype(text: Mapping[str, Any]) -> tuple[torch.dtype, str]:
    """SGLang's order, values that it does not know passed over as it does."""
    said = {STATE_DTYPE_VARIABLE: os.environ.get(STATE_DTYPE_VARIABLE), "mamba_ssm_dtype": text.get("mamba_ssm_dtype")}
    for source, name in said.items():
        if isinstance(name, str) and name in _STATE_DTYPES:
            return _STATE_DTYPES[name], source
    return torch.float32, "SGLang's default"
