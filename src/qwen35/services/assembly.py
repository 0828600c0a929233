"""From settings and registry to services: what the container's providers call."""

from __future__ import annotations

from collections.abc import Iterable

from qwen35.domain.capabilities import Phase
from qwen35.domain.platform import Platform
from qwen35.domain.shadow import ShadowSpec, parse_shadow
from qwen35.ports.adapter import AdapterEntry, AdapterOptions, HoldsScratch
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.services import gated_delta_rule, short_convolution
from qwen35.services.alignment_guard import AlignmentGuard
from qwen35.services.counters import Counters
from qwen35.services.finalize_fusion import FinalizeService
from qwen35.services.finalize_registry import WorkspaceRegistry
from qwen35.services.gated_delta_rule import GatedDeltaRuleService, ScratchHoldingService
from qwen35.services.named import named_by
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AdapterRegistry
from qwen35.services.shadow import Shadow, ShadowedGatedDeltaRule
from qwen35.services.short_convolution import ShortConvolutionService
from qwen35.settings import Settings

#: An adapter that needs no more than a tensor element's own alignment needs no guard.
NATURAL_ALIGNMENT = 1


def make_platform(settings: Settings) -> Platform:
    """The machine, as the settings' device selects it. Raises ``ConfigurationError`` for a device that is not there."""
    with named_by(settings, "device"):
        return detect_platform(settings.device)


def make_registry(settings: Settings, platform: Platform, extra: Iterable[AdapterEntry]) -> AdapterRegistry:
    """The registry, with the settings that concern single adapters."""
    options = AdapterOptions(prefill_split=settings.prefill_split, checked=settings.checked)
    return AdapterRegistry(platform, options, extra)


def make_gated_delta_rule(settings: Settings, registry: AdapterRegistry, counters: Counters) -> GatedDeltaRuleService:
    """The service over the adapters that the settings name, or the best usable ones; where all of them say how much
    scratch they hold, it says it too (``HoldsScratch``)."""
    port = gated_delta_rule.PORT
    requested = {
        Phase.DECODE: settings.gdn_decode, Phase.EXTEND: settings.gdn_extend, Phase.VERIFY: settings.gdn_verify,
    }  # fmt: skip
    names = {}
    for phase, name in requested.items():
        with named_by(settings, f"gdn_{phase}"):
            names[phase] = registry.choose(port, name, phase).name
    if settings.gdn_fallback is not None:
        with named_by(settings, "gdn_fallback"):
            registry.choose(port, settings.gdn_fallback)
    made: dict[str, GatedDeltaRule] = {
        name: guarded(name, registry.adapter(port, name), counters)
        for name in {*names.values(), *filter(None, [settings.gdn_fallback])}
    }
    if settings.gdn_shadow is not None:
        with named_by(settings, "gdn_shadow"):
            shadow = make_shadow(parse_shadow(settings.gdn_shadow), registry, counters)
        made = {name: ShadowedGatedDeltaRule(name, adapter, shadow) for name, adapter in made.items()}
    fallback = None if settings.gdn_fallback is None else (settings.gdn_fallback, made[settings.gdn_fallback])
    adapters = {phase: (name, made[name]) for phase, name in names.items()}
    told = all(isinstance(adapter, HoldsScratch) for adapter in made.values())
    service = ScratchHoldingService if told else GatedDeltaRuleService
    return service(adapters, counters, fallback, settings.checked)


def make_shadow(spec: ShadowSpec, registry: AdapterRegistry, counters: Counters) -> Shadow:
    """The shadow over an instance of its own, so that it shares no scratch with an adapter that serves."""
    port = gated_delta_rule.PORT
    adapter = guarded(f"shadow:{spec.adapter}", registry.apart().adapter(port, spec.adapter), counters)
    return Shadow(spec, adapter, counters)


def guarded(name: str, adapter: GatedDeltaRule, counters: Counters) -> GatedDeltaRule:
    """The adapter itself, or behind the alignment guard where its kernels ask for more than torch gives.

    Either way the gauges ``scratch_bytes`` and ``scratch_bound_bytes`` of ``name`` count all that is held.
    """
    if adapter.capabilities.byte_alignment > NATURAL_ALIGNMENT:
        return AlignmentGuard(name, adapter, counters)
    if isinstance(adapter, HoldsScratch):
        held = adapter
        counters.watch("scratch_bytes", lambda: held.scratch_bytes, adapter=name)
        counters.watch("scratch_bound_bytes", lambda: held.scratch_bound, adapter=name)
    return adapter


def make_short_convolution(
    settings: Settings, registry: AdapterRegistry, counters: Counters
) -> ShortConvolutionService:
    """The service over the adapter that the settings name, or the best usable one."""
    port = short_convolution.PORT
    with named_by(settings, "conv"):
        name = registry.choose(port, settings.conv).name
    return ShortConvolutionService(name, registry.adapter(port, name), counters, settings.checked)


def make_finalize(
    settings: Settings, registry: AdapterRegistry, counters: Counters, workspaces: WorkspaceRegistry
) -> FinalizeService:
    """The service of the fused finalize; which adapter it takes, all ranks agree on in ``prepare``."""
    with named_by(settings, "finalize"):
        return FinalizeService(registry, settings.finalize, workspaces, counters, settings.checked)
