"""What the plugin would do, or does, for one machine, release and model, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen35.adapters.sglang.seams import TESTED
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.geometry import GdnGeometry
from qwen35.domain.platform import Platform
from qwen35.domain.shadow import parse_shadow
from qwen35.ports.gated_delta_rule import GdnPlan

#: FlashInfer's deferred finalize and CuTe DSL kernels begin here.
CUTEDSL_CAPABILITY = (10, 0)
#: Stands for sizes that only a running engine knows.
_SMALL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChoice:
    """Who serves a phase: ``adapter`` (None: SGLang's own kernel), and the ``reasons`` against it, if any."""

    phase: Phase
    adapter: str | None
    reasons: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable that chooses."""
        return f"QWEN35_GDN_{self.phase.upper()}"

    def text(self) -> str:
        """One line."""
        if self.adapter is None:
            return f"{self.phase}: SGLang's own kernel, counted ({self.variable} is not set)"
        if self.reasons:
            return f"{self.phase}: {self.adapter} ({self.variable}), which cannot serve here: {'; '.join(self.reasons)}"
        return f"{self.phase}: {self.adapter} ({self.variable})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionChoice:
    """Who serves all-reduce + residual + norm: ``adapter`` (None: SGLang's own choice), and the ``reasons`` against it.

    ``kept``: where nothing is named, the setting's value ("auto" or "off"). ``refused_switch``: what becomes of
    SGLang's own CuTe DSL switch, where it is on and this machine cannot serve it.
    """

    adapter: str | None
    kept: str = "auto"
    reasons: tuple[str, ...] = ()
    refused_switch: str | None = None

    def lines(self) -> list[str]:
        """One line, and one more for SGLang's switch."""
        if self.adapter is None:
            why = "QWEN35_FINALIZE is not set" if self.kept == "auto" else f"QWEN35_FINALIZE is {self.kept}"
            text = f"fusion: SGLang's own choice, counted ({why})"
        else:
            text = f"fusion: {self.adapter} (QWEN35_FINALIZE) for all-reduce + residual + norm among two ranks or more"
            if self.reasons:
                text = f"fusion: {self.adapter} (QWEN35_FINALIZE), which cannot serve here: {'; '.join(self.reasons)}"
        return [text, *([] if self.refused_switch is None else [self.refused_switch])]


def cutedsl_line(compute_capability: tuple[int, int] | None) -> str | None:
    """What becomes of SGLang's own CuTe DSL switch on a GPU that cannot serve it; None where it can."""
    if compute_capability is not None and compute_capability >= CUTEDSL_CAPABILITY:
        return None
    return (
        "SGLang's CuTe DSL fusion is switched on: on this GPU no MoE kernel can defer its finalize (block-FP8 experts "
        "on compute capability 10.0), so SGLang itself refuses the model; switch it off and set QWEN35_FINALIZE"
    )


def relay_line(mended: bool) -> str:
    """What happens to the overlap scheduler's FutureMap."""
    if mended:
        return "relay: orders of payloads that this release's FutureMap does not survive are mended"
    return "relay: SGLang's own FutureMap, which this release mended itself"


def shadow_line(setting: str | None, routed: bool) -> str:
    """Which calls are repeated by a second adapter."""
    if setting is None:
        return "shadow: none (QWEN35_GDN_SHADOW is not set)"
    spec = parse_shadow(setting)
    if not routed:
        return f"shadow: none; {spec.adapter} (QWEN35_GDN_SHADOW) needs a phase that an adapter of ours serves"
    return f"shadow: {spec.adapter} repeats one eager call in {spec.every} of each phase (QWEN35_GDN_SHADOW)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's configuration says: its ``family`` (model_type) and, for Qwen3.5, its GDN ``geometry``."""

    family: str
    geometry: GdnGeometry | None
    state_dtype: torch.dtype

    def plan(self, device: torch.device) -> GdnPlan | None:
        """The smallest plan of this geometry: what an adapter says to it, it says to every larger one."""
        if self.geometry is None:
            return None
        return GdnPlan(
            geometry=self.geometry, state_dtype=self.state_dtype, device=device, max_batch=_SMALL, max_tokens=_SMALL
        )


def read_model(directory: Path, state_dtype: str) -> ModelFacts:
    """From ``directory``/config.json. Raises ``ConfigurationError`` where it cannot be read as one."""
    path = directory / "config.json"
    try:
        whole: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"{path} must be a model's configuration: {exc}") from exc
    text = whole.get("text_config", whole)
    family = str(text.get("model_type", whole.get("model_type", "unknown")))
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes = [text.get(name) for name in names]
    geometry = None
    if all(isinstance(size, int) for size in sizes):
        heads, value_heads, key_width, value_width = sizes
        geometry = GdnGeometry(key_heads=heads, value_heads=value_heads, key_width=key_width, value_width=value_width)
    return ModelFacts(family=family, geometry=geometry, state_dtype=getattr(torch, state_dtype))


def explain(
    *, release: str | None, problems: Sequence[str], platform: Platform, choices: Iterable[PhaseChoice],
    fallback: str | None, parts: Iterable[str] = (), model: str | None = None, others: Iterable[str] = (),
) -> str:  # fmt: skip
    """The text: release and machine, who serves which phase, what happens to what an adapter refuses.

    ``problems``: why the seam is not installed (none: it is). ``parts`` (fusion, relay, shadow), ``model`` and
    ``others``: lines of their own.
    """
    tested = " and ".join(TESTED)
    capability = "" if platform.compute_capability is None else ", compute capability {}.{}".format(
        *platform.compute_capability
    )  # fmt: skip
    lines = [
        f"qwen35 inside SGLang {release or '(not installed)'} (tested with {tested}) "
        f"on {platform.device_name}{capability}",
        *(f"not installed: {problem}" for problem in problems),
    ]
    if problems:
        return "\n  ".join([*lines, "SGLang runs as if the plugin were not there"])
    chosen = list(choices)
    lines += [choice.text() for choice in chosen]
    if any(choice.adapter for choice in chosen):
        second = "" if fallback is None else f"{fallback} (QWEN35_GDN_FALLBACK), then "
        lines.append(f"what a chosen adapter refuses: {second}SGLang's own kernel, counted with the reason")
    lines += parts
    lines.append("always SGLang's own: short convolution, commit of accepted drafts, ReplaySSM, multi-item scoring")
    if model is not None:
        lines.append(f"model: {model}")
    return "\n  ".join([*lines, *others])
