"""From settings and registry to services: what the container's providers call."""

from __future__ import annotations

from collections.abc import Iterable

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions
from qwen35.services import gated_delta_rule, short_convolution
from qwen35.services.counters import Counters
from qwen35.services.gated_delta_rule import GatedDeltaRuleService
from qwen35.services.registry import AdapterRegistry
from qwen35.services.short_convolution import ShortConvolutionService
from qwen35.settings import Settings


def make_registry(settings: Settings, platform: Platform, extra: Iterable[AdapterEntry]) -> AdapterRegistry:
    """The registry, with the settings that concern single adapters."""
    return AdapterRegistry(platform, AdapterOptions(prefill_split=settings.prefill_split), extra)


def make_gated_delta_rule(
    settings: Settings, registry: AdapterRegistry, counters: Counters
) -> GatedDeltaRuleService:
    """The service over the adapters that the settings name, or the best usable ones."""
    port = gated_delta_rule.PORT
    if settings.gdn_shadow is not None:
        raise ConfigurationError("gdn_shadow cannot be honoured yet: this release has no shadow service; unset it")
    requested = {
        Phase.DECODE: settings.gdn_decode, Phase.EXTEND: settings.gdn_extend, Phase.VERIFY: settings.gdn_verify,
    }  # fmt: skip
    adapters = {}
    for phase, name in requested.items():
        chosen = registry.choose(port, name).name
        adapters[phase] = (chosen, registry.adapter(port, chosen))
    fallback = settings.gdn_fallback
    second = None if fallback is None else (fallback, registry.adapter(port, fallback))
    return GatedDeltaRuleService(adapters, counters, second, settings.checked)


def make_short_convolution(
    settings: Settings, registry: AdapterRegistry, counters: Counters
) -> ShortConvolutionService:
    """The service over the adapter that the settings name, or the best usable one."""
    port = short_convolution.PORT
    name = registry.choose(port, settings.conv).name
    return ShortConvolutionService(name, registry.adapter(port, name), counters, settings.checked)
