"""What ``build()`` would do with each setting that names an adapter, and whether it would succeed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import Qwen35Error, UnavailableError

if TYPE_CHECKING:
    from qwen35.domain.finalize_signature import WorkspaceSignature
    from qwen35.services.registry import AdapterRegistry
    from qwen35.settings import Settings

#: The one adapter with two prefill kernels.
_SPLITS = "flashinfer"
_SPLIT_RULES = {
    "auto": "split over the sequence where few long sequences without checkpoints would leave the GPU idle, else one "
    "pass; the service's decisions say which way the latest call went",
    "on": "every extend is split over the sequence; one with checkpoints is refused",
    "off": "every extend takes one pass",
}
_RULE, _CONVOLUTION, _FINALIZE = "gated_delta_rule", "short_convolution", "finalize_fusion"

#: What the finalize's adapters are asked about: a public geometry, and as many tokens as a long prefill's chunk.
_EXAMPLE, _TOKENS = "35B-A3B", 8192


class ChoiceFacts(TypedDict):
    """What one setting leads to. ``adapter`` is None where nothing serves; ``ok`` is false where that makes
    ``build()``, or the first use after it, fail; ``reason`` says why."""

    setting: str
    requested: str
    port: str
    adapter: str | None
    ok: bool
    reason: str
    rejected: dict[str, list[str]]


class BuildFacts(TypedDict):
    """Whether ``build()`` succeeds with these settings; ``reason`` says why not."""

    ok: bool
    reason: str


def choices(registry: AdapterRegistry, settings: Settings) -> list[ChoiceFacts]:
    """One entry a setting."""
    extend = _chosen(registry, settings, "gdn_extend", _RULE, Phase.EXTEND)
    return [
        _chosen(registry, settings, "gdn_decode", _RULE, Phase.DECODE),
        extend,
        _prefill_split(settings, extend["adapter"]),
        _chosen(registry, settings, "gdn_verify", _RULE, Phase.VERIFY),
        _fallback(registry, settings),
        _shadow(registry, settings),
        _chosen(registry, settings, "conv", _CONVOLUTION),
        _finalize(registry, settings),
    ]


def try_to_build(registry: AdapterRegistry, settings: Settings) -> BuildFacts:
    """Make the services as the container does. The workspace of the fused finalize is no part of it."""
    from qwen35.services.assembly import make_finalize, make_gated_delta_rule, make_short_convolution
    from qwen35.services.counters import Counters
    from qwen35.services.finalize_registry import WorkspaceRegistry

    counters = Counters()
    try:
        make_gated_delta_rule(settings, registry, counters)
        make_short_convolution(settings, registry, counters)
        make_finalize(settings, registry, counters, WorkspaceRegistry())
    except Qwen35Error as exc:
        return BuildFacts(ok=False, reason=str(exc))
    return BuildFacts(ok=True, reason="")


def _facts(setting: str, port: str, requested: str, reason: str, *, ok: bool = True) -> ChoiceFacts:
    return ChoiceFacts(setting=setting, requested=requested, port=port, adapter=None, ok=ok, reason=reason, rejected={})


def _chosen(
    registry: AdapterRegistry, settings: Settings, setting: str, port: str, phase: Phase | None = None
) -> ChoiceFacts:
    from qwen35.services.named import named_by

    requested = settings.model_dump()[setting]
    try:
        with named_by(settings, setting):
            choice = registry.choose(port, requested, phase)
    except Qwen35Error as exc:
        return _facts(setting, port, requested, f"build() would fail: {exc}", ok=False)
    facts = _facts(setting, port, requested, choice.reason)
    facts["adapter"] = choice.name
    facts["rejected"] = {name: list(why) for name, why in choice.rejected.items()}
    return facts


def _prefill_split(settings: Settings, extends: str | None) -> ChoiceFacts:
    requested = settings.prefill_split
    if _SPLITS not in (extends, settings.gdn_fallback):
        reason = f"concerns the extend of {_SPLITS} alone, which {extends or 'nobody'} serves here"
        return _facts("prefill_split", _RULE, requested, reason)
    facts = _facts("prefill_split", _RULE, requested, _SPLIT_RULES[requested])
    facts["adapter"] = _SPLITS
    return facts


def _fallback(registry: AdapterRegistry, settings: Settings) -> ChoiceFacts:
    from qwen35.services.named import named_by

    setting, requested = "gdn_fallback", settings.gdn_fallback
    if requested is None:
        return _facts(setting, _RULE, "none", "no fallback: what the chosen adapter refuses is an error")
    try:
        with named_by(settings, setting):
            registry.adapter(_RULE, requested)
    except Qwen35Error as exc:
        return _facts(setting, _RULE, requested, f"build() would fail: {exc}", ok=False)
    facts = _facts(setting, _RULE, requested, "serves what the chosen adapter refuses")
    facts["adapter"] = requested
    return facts


def _shadow(registry: AdapterRegistry, settings: Settings) -> ChoiceFacts:
    from qwen35.services.assembly import make_gated_delta_rule
    from qwen35.services.counters import Counters

    setting = "gdn_shadow"
    if settings.gdn_shadow is None:
        return _facts(setting, _RULE, "none", "no shadow")
    # Adapters that always work, so that only the shadow can fail.
    others = dict.fromkeys(("gdn_decode", "gdn_extend", "gdn_verify"), "reference")
    try:
        make_gated_delta_rule(settings.model_copy(update={**others, "gdn_fallback": None}), registry, Counters())
    except Qwen35Error as exc:
        return _facts(setting, _RULE, settings.gdn_shadow, f"build() would fail: {exc}", ok=False)
    facts = _facts(setting, _RULE, settings.gdn_shadow, "runs on copies of sampled calls")
    facts["adapter"] = settings.gdn_shadow.partition(":")[0]
    return facts


def _finalize(registry: AdapterRegistry, settings: Settings) -> ChoiceFacts:
    """What the service's own choice says of an example as far as this process sees alone: in ``prepare`` all ranks
    agree on it."""
    from qwen35.domain.finalize_capabilities import DeviceFacts
    from qwen35.services.finalize_agreement import Alone
    from qwen35.services.finalize_choice import choose_fusion
    from qwen35.services.finalize_fusion import OFF
    from qwen35.services.named import named_by

    requested = settings.finalize
    if requested == OFF:
        return _facts("finalize", _FINALIZE, requested, f"off: no layer ends in the fused finalize{_policy(requested)}")
    asked = _example(registry)
    example = f"{_EXAMPLE} on {asked.tp_size} ranks, up to {asked.max_m} tokens"
    try:
        with named_by(settings, "finalize"):
            choice = choose_fusion(registry, requested, asked, DeviceFacts(device=asked.device), Alone())
    except UnavailableError as exc:
        reason = f"build() works, prepare() among ranks would fail for {example}"
        facts = _facts("finalize", _FINALIZE, requested, reason, ok=False)
        facts["rejected"] = _by_adapter(registry, exc.reasons, requested)
        return facts
    except Qwen35Error as exc:
        return _facts("finalize", _FINALIZE, requested, f"build() would fail: {exc}", ok=False)
    fewer = "" if choice.max_m == asked.max_m else f", of which it serves {choice.max_m}: larger steps are not fused"
    reason = f"the first usable here for {example}{fewer}; prepare() asks every rank{_policy(requested)}"
    facts = _facts("finalize", _FINALIZE, requested, reason)
    facts["adapter"] = choice.name
    facts["rejected"] = {name: [_own(text) for text in why] for name, why in choice.rejected.items()}
    return facts


def _example(registry: AdapterRegistry) -> WorkspaceSignature:
    """A public geometry on this process's ranks, two at least; nobody's group."""
    from qwen35.domain.finalize_signature import WorkspaceSignature
    from qwen35.domain.geometry import public_geometry
    from qwen35.settings import launch_environment

    geometry = public_geometry(_EXAMPLE)
    return WorkspaceSignature(
        group=None, tp_size=max(2, launch_environment().world_size), rank=0, hidden=geometry.hidden,
        top_k=geometry.top_k, max_m=_TOKENS, device=registry.platform.device, speculative=False,
    )  # fmt: skip


def _by_adapter(registry: AdapterRegistry, reasons: Iterable[str], requested: str) -> dict[str, list[str]]:
    """The reasons of an error of the choice, which names the adapter of each unless asking one failed."""
    rejected: dict[str, list[str]] = {}
    for reason in reasons:
        name, _, text = reason.partition(": ")
        known = name in registry.names(_FINALIZE)
        rejected.setdefault(name if known else requested, []).append(_own(text if known else reason))
    return rejected


def _own(reason: str) -> str:
    """A reason without its rank, which is this process."""
    return reason.removeprefix("rank 0: ")


def _policy(requested: str) -> str:
    """What the eligibility policy says of a mixture's decode step with as many ranks as this process has."""
    from qwen35.domain.finalize_policy import ForwardMode, Situation, decide_finalize
    from qwen35.services.finalize_fusion import OFF
    from qwen35.settings import launch_environment

    situation = Situation(
        forward_mode=ForwardMode.DECODE, m=1, max_m=1, tp_size=launch_environment().world_size,
        enabled=requested != OFF,
    )  # fmt: skip
    reasons = decide_finalize(situation).reasons
    return f". A step of this process would not be fused: {'; '.join(reasons)}" if reasons else ""
