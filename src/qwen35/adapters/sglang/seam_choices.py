"""From settings, machine and model to what the plugin chooses, and the lines that say so."""

from __future__ import annotations

import torch

from qwen35.adapters.sglang.seam_explain import (
    FusionChoice,
    ModelFacts,
    PhaseChoice,
    cutedsl_line,
    relay_line,
    shadow_line,
)
from qwen35.adapters.sglang.seam_gdn import MODEL_FAMILY
from qwen35.adapters.sglang.seams.release import Release
from qwen35.domain.capabilities import Phase
from qwen35.domain.finalize_policy import FUSING_MODEL_TYPES
from qwen35.ports.support import plan_support
from qwen35.services.finalize_choice import PORT as FUSION
from qwen35.services.finalize_fusion import OFF
from qwen35.services.gated_delta_rule import PORT
from qwen35.services.registry import AUTO, AdapterRegistry
from qwen35.settings import Settings


def requested_phases(settings: Settings) -> dict[Phase, str]:
    """The phases that the settings route, and the adapter of each; "auto" keeps SGLang's own kernel."""
    names = {
        Phase.DECODE: settings.gdn_decode, Phase.EXTEND: settings.gdn_extend, Phase.VERIFY: settings.gdn_verify,
    }  # fmt: skip
    return {phase: name for phase, name in names.items() if name != AUTO}


def requested_fusion(settings: Settings) -> str | None:
    """The adapter that fuses all-reduce, residual and norm; None for "auto" and "off": SGLang's own choice is kept."""
    return None if settings.finalize in (AUTO, OFF) else settings.finalize


def phase_choices(settings: Settings, registry: AdapterRegistry, facts: ModelFacts | None) -> list[PhaseChoice]:
    """Who serves each phase, for the model ``facts`` where there is one."""
    routes = requested_phases(settings)
    return [
        PhaseChoice(phase=phase, adapter=routes.get(phase), reasons=_reasons(registry, routes.get(phase), facts))
        for phase in (Phase.DECODE, Phase.EXTEND, Phase.VERIFY)
    ]


def part_lines(settings: Settings, registry: AdapterRegistry, release: Release, facts: ModelFacts | None) -> list[str]:
    """Fusion, relay and shadow."""
    named = requested_fusion(settings)
    reasons: tuple[str, ...] = () if named is None else registry.usable(FUSION, named).reasons
    if named is not None and facts is not None and facts.family not in FUSING_MODEL_TYPES:
        reasons += (f"model type requires {' or '.join(sorted(FUSING_MODEL_TYPES))}, got {facts.family}",)
    fusion = FusionChoice(
        adapter=named, kept=settings.finalize, reasons=reasons, refused_switch=refused_switch(release, registry)
    )
    return [
        *fusion.lines(), relay_line("relay" in release.targets),
        shadow_line(settings.gdn_shadow, bool(requested_phases(settings))),
    ]  # fmt: skip


def refused_switch(release: Release, registry: AdapterRegistry) -> str | None:
    """What becomes of SGLang's own CuTe DSL switch, where it is on and this machine cannot serve it."""
    try:
        on = release.cutedsl_on()
    except ValueError:  # no launch has published its arguments in this process
        on = False
    return cutedsl_line(registry.platform.compute_capability) if on else None


def _reasons(registry: AdapterRegistry, name: str | None, facts: ModelFacts | None) -> tuple[str, ...]:
    if name is None:
        return ()
    support = registry.usable(PORT, name)
    plan = None if facts is None else facts.plan(torch.device(registry.platform.device))
    if support and plan is not None:
        support = plan_support(registry.adapter(PORT, name).capabilities, plan)
    return support.reasons


def model_line(facts: ModelFacts) -> str:
    """What the plugin reads in a model's configuration."""
    if not facts.family.startswith(MODEL_FAMILY):
        return f"{facts.family} is not Qwen3.5: nothing is routed, SGLang's own kernels serve"
    g = facts.geometry
    if g is None:
        return f"{facts.family} has no Gated DeltaNet layers: nothing is routed"
    return (
        f"{facts.family}, GDN heads {g.key_heads} (q, k) and {g.value_heads} (v) before tensor parallelism, "
        f"widths {g.key_width} and {g.value_width}"
    )
