"""From settings, machine and model to what the plugin chooses, and the lines that say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from qwen35.adapters.sglang.seam_explain import (
    ENDS,
    STRICTLY_ENDS,
    FusionChoice,
    PhaseChoice,
    cutedsl_line,
    idle_line,
    relay_line,
    shadow_line,
)
from qwen35.adapters.sglang.seam_model import ModelFacts
from qwen35.adapters.sglang.seams.release import Release
from qwen35.domain.capabilities import Capabilities, Phase
from qwen35.domain.errors import UnavailableError
from qwen35.domain.finalize_policy import FUSING_MODEL_TYPES
from qwen35.domain.shadow import parse_shadow
from qwen35.ports.support import plan_support
from qwen35.services.finalize_choice import PORT as FUSION
from qwen35.services.finalize_fusion import OFF
from qwen35.services.gated_delta_rule import PORT
from qwen35.services.named import named_by
from qwen35.services.registry import AUTO, AdapterRegistry
from qwen35.services.short_convolution import PORT as CONVOLUTION
from qwen35.settings import Settings

#: The adapter that the setting prefill_split is for.
SPLITS_PREFILL = "flashinfer"
#: Settings of the library that decide nothing inside SGLang, and what decides there.
IDLE = {
    "conv": "the short convolution is always SGLang's own",
    "dtype": "SGLang's --dtype decides",
    "state_dtype": "SGLang's --mamba-ssm-dtype, else mamba_ssm_dtype of the model's configuration, decides",
}


def requested_phases(settings: Settings) -> dict[Phase, str]:
    """The phases that the settings route, and the adapter of each; "auto" keeps SGLang's own kernel."""
    names = {
        Phase.DECODE: settings.gdn_decode, Phase.EXTEND: settings.gdn_extend, Phase.VERIFY: settings.gdn_verify,
    }  # fmt: skip
    return {phase: name for phase, name in names.items() if name != AUTO}


def requested_fusion(settings: Settings) -> str | None:
    """The adapter that fuses all-reduce, residual and norm; None for "auto" and "off": SGLang's own choice is kept."""
    return None if settings.finalize in (AUTO, OFF) else settings.finalize


def named_adapters(settings: Settings) -> dict[tuple[str, str], str]:
    """(port, name) of every adapter that the settings name and a launch would make, and the first setting that names
    it; ``ConfigurationError`` for a shadow that is not spelt as one."""
    named = {f"gdn_{phase}": name for phase, name in requested_phases(settings).items()}
    if settings.gdn_fallback is not None:
        named["gdn_fallback"] = settings.gdn_fallback
    if settings.gdn_shadow is not None:
        with named_by(settings, "gdn_shadow"):
            named["gdn_shadow"] = parse_shadow(settings.gdn_shadow).adapter
    found: dict[tuple[str, str], str] = {}
    for setting, name in sorted(named.items(), key=lambda item: item[1]):
        found.setdefault((PORT, name), setting)
    fusion = requested_fusion(settings)
    return found if fusion is None else found | {(FUSION, fusion): "finalize"}


def impossible(settings: Settings, registry: AdapterRegistry) -> Iterator[UnavailableError]:
    """What ends a launch before anything is installed: each named adapter that this machine cannot use.

    Raises ``UnknownNameError`` for one that does not exist, also for the convolution's, which nothing here would use.
    """
    if settings.conv != AUTO:
        with named_by(settings, "conv"):
            registry.entry(CONVOLUTION, settings.conv)
    for (port, name), setting in named_adapters(settings).items():
        try:
            with named_by(settings, setting):
                support = registry.usable(port, name)
                if not support:
                    raise UnavailableError(f"{port} adapter {name!r}", support.reasons)
        except UnavailableError as exc:
            yield exc


def phase_choices(
    settings: Settings, registry: AdapterRegistry, facts: ModelFacts | None, unrouted: str | None = None,
    drafts: bool | None = None,
) -> list[PhaseChoice]:  # fmt: skip
    """Who serves each phase, for the model ``facts`` where there is one.

    ``unrouted``: why nothing is routed, as an engine without ``facts`` found out. ``drafts``: whether it has drafts to
    verify (None: there is no engine yet).
    """
    why = unrouted if facts is None else facts.unrouted
    chosen = [
        _phase_choice(settings, registry, facts, phase, why) for phase in (Phase.DECODE, Phase.EXTEND, Phase.VERIFY)
    ]
    return [replace(choice, drafts=drafts) for choice in chosen]


def _phase_choice(
    settings: Settings, registry: AdapterRegistry, facts: ModelFacts | None, phase: Phase, unrouted: str | None
) -> PhaseChoice:
    name = requested_phases(settings).get(phase)
    if name is None:
        return PhaseChoice(phase=phase, adapter=None, unrouted=unrouted)
    try:
        can = registry.adapter(PORT, name).capabilities
    except UnavailableError as exc:
        return PhaseChoice(phase=phase, adapter=name, reasons=exc.reasons)
    reasons, then = _against(can, registry, facts, phase), _instead(settings, registry, facts, phase)
    if unrouted is not None and settings.sglang_strict:  # a fallback cannot serve it either
        reasons, then = (unrouted, *reasons), STRICTLY_ENDS
    return PhaseChoice(phase=phase, adapter=name, reasons=reasons, unrouted=unrouted, then=then)


def _against(can: Capabilities, registry: AdapterRegistry, facts: ModelFacts | None, phase: Phase) -> tuple[str, ...]:
    """Why an adapter with capabilities ``can`` serves no call of ``phase`` here, for the model where there is one."""
    if phase not in can.phases:
        return (f"{phase} is not offered",)
    plan = None if facts is None else facts.plan(torch.device(registry.platform.device))
    return () if plan is None else plan_support(can, plan).reasons


def _instead(settings: Settings, registry: AdapterRegistry, facts: ModelFacts | None, phase: Phase) -> str:
    """What happens where the chosen adapter serves no call of ``phase``."""
    second = settings.gdn_fallback
    if second is not None and registry.usable(PORT, second):
        can = registry.adapter(PORT, second).capabilities
        if not _against(can, registry, facts, phase):
            return f"{second} (QWEN35_GDN_FALLBACK) serves"
    return STRICTLY_ENDS if settings.sglang_strict else "SGLang's own kernel serves"


def part_lines(
    settings: Settings, fusion: FusionChoice, release: Release, facts: ModelFacts | None, unrouted: str | None = None,
    drafts: bool | None = None,
) -> list[str]:  # fmt: skip
    """Fusion, relay, shadow, and settings that do nothing here; ``unrouted`` and ``drafts`` as in ``phase_choices``."""
    why = unrouted if facts is None else facts.unrouted
    routes = requested_phases(settings) if why is None else {}
    if drafts is False:
        routes.pop(Phase.VERIFY, None)
    # Without ``facts`` the fusion has no reasons against a model; but one without our GDN layers is never fused.
    fuses = fusion.adapter is not None and not fusion.reasons and unrouted is None
    return [
        *fusion.lines(), relay_line("relay" in release.targets),
        shadow_line(settings.gdn_shadow, routes), *idle_lines(settings, routes, fuses),
    ]  # fmt: skip


def idle_lines(settings: Settings, routes: Mapping[Phase, str], fuses: bool) -> list[str]:
    """Settings that are set and do nothing here, where adapters of ours serve the phases of ``routes``.

    ``fuses``: whether one serves all-reduce, residual and norm. The shadow has a line of its own.
    """
    idle = IDLE | dict(_unconcerned(settings, routes, fuses))
    values = settings.model_dump(include=set(idle))
    set_ones = [name for name in idle if values[name] != Settings.model_fields[name].default]
    return [idle_line(name, values[name], idle[name]) for name in set_ones]


def _unconcerned(settings: Settings, routes: Mapping[Phase, str], fuses: bool) -> Iterator[tuple[str, str]]:
    """Settings that concern nothing of what is routed, and what they need."""
    if not routes:
        yield "gdn_fallback", "it needs a phase that an adapter of ours serves"
    elif set(routes.values()) == {settings.gdn_fallback}:
        yield "gdn_fallback", "it is the adapter of every routed phase itself"
    if not routes and not fuses:
        yield "checked", "it needs a phase or a fusion that an adapter of ours serves"
    shadow = None if settings.gdn_shadow is None else parse_shadow(settings.gdn_shadow).adapter
    extend = routes.get(Phase.EXTEND)
    if extend is None or SPLITS_PREFILL not in (extend, settings.gdn_fallback, shadow):
        yield "prefill_split", f"it needs extend to be routed, and served or repeated by {SPLITS_PREFILL}"


def fusion_choice(
    settings: Settings, registry: AdapterRegistry, release: Release, facts: ModelFacts | None
) -> FusionChoice:
    """Who serves all-reduce, residual and norm."""
    named = requested_fusion(settings)
    machine: tuple[str, ...] = () if named is None else registry.usable(FUSION, named).reasons
    model: tuple[str, ...] = ()
    if named is not None and facts is not None and facts.family not in FUSING_MODEL_TYPES:
        model = (f"model type requires {' or '.join(sorted(FUSING_MODEL_TYPES))}, got {facts.family}",)
    then = ENDS
    if not machine:
        then = STRICTLY_ENDS if settings.sglang_strict else "SGLang's own choice is kept"
    return FusionChoice(
        adapter=named, kept=settings.finalize, reasons=machine + model, then=then,
        refused_switch=refused_switch(release, registry),
    )  # fmt: skip


def refused_switch(release: Release, registry: AdapterRegistry) -> str | None:
    """What becomes of SGLang's own CuTe DSL switch, where it is on and this machine cannot serve it."""
    try:
        on = release.cutedsl_on()
    except ValueError:  # no launch has published its arguments in this process
        on = False
    return cutedsl_line(registry.platform.compute_capability) if on else None
