"""SGLang's entry point: builds the container and hands its services to the seam of the installed release.

SGLang loads plugins in every process that it starts, before it knows model and arguments. So ``register`` only
checks what can be known by then and hooks the scheduler's constructor; the rest is installed from inside that.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seam_choices import (
    fusion_choice,
    impossible,
    named_adapters,
    part_lines,
    phase_choices,
    refused_switch,
    requested_fusion,
    requested_phases,
)
from qwen35.adapters.sglang.seam_explain import explain as explain_text
from qwen35.adapters.sglang.seam_faults import end_scheduler, reported
from qwen35.adapters.sglang.seam_finalize import FinalizeSeam
from qwen35.adapters.sglang.seam_fusion import FusionSeam
from qwen35.adapters.sglang.seam_gdn import GdnSeam
from qwen35.adapters.sglang.seam_loading import left_out
from qwen35.adapters.sglang.seam_metrics import PrometheusMirror, metrics_wanted
from qwen35.adapters.sglang.seam_model import read_model
from qwen35.adapters.sglang.seam_moved import our_half
from qwen35.adapters.sglang.seam_plan import speculating
from qwen35.adapters.sglang.seam_ranks import RankSettings
from qwen35.adapters.sglang.seam_relay import RelaySeam
from qwen35.adapters.sglang.seams import installed_release, release_seam
from qwen35.adapters.sglang.seams.release import Place, Release
from qwen35.container import Container, build
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import (
    ConfigurationError,
    Qwen35Error,
    UnavailableError,
    UnsupportedError,
)
from qwen35.services.assembly import make_platform, make_registry
from qwen35.services.finalize_agreement import PROCESS_AGREEMENTS, Agreements
from qwen35.services.finalize_fusion import OFF
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AUTO
from qwen35.settings import Settings, load_settings, sglang_switched_off

logger = logging.getLogger("qwen35")

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
#: Serves nothing in a container whose settings name no adapter, and costs nothing to make.
UNUSED = "reference"
SWITCHED_OFF = "QWEN35_SGLANG_PLUGIN is off"


@dataclass(slots=True)
class Running:
    """The plugin in one scheduler process. ``gdn`` and the parts after it were installed together."""

    container: Container
    release: Release
    place: Place
    gdn: GdnSeam
    fusion: FusionSeam
    finalize: FinalizeSeam
    relay: RelaySeam
    mirror: PrometheusMirror | None = None
    announced: list[str] = field(default_factory=list)


_RUNNING: list[Running] = []
#: What was uninstalled. CUDA graphs that were captured by then hold addresses of its scratch, parameter copies and
#: workspaces, and nothing tells when the last of them is gone: that memory is held until the process ends.
_OUTLIVED: list[Running] = []


def register() -> None:
    """SGLang calls this in every process. A demand that cannot be met ends the process with one line."""
    if SCHEDULER_MODULE not in sys.modules:
        return  # no scheduler is made in this process, and importing one takes seconds
    if sglang_switched_off():
        return
    try:
        settings = load_settings()
        refuse_impossible(settings)
        release = _release(settings)
    except Qwen35Error as exc:
        raise SystemExit(f"qwen35: {exc}") from exc
    if release is not None:
        seam.hook_later(release.targets["scheduler"].path, partial(_around_scheduler, settings, release))


def running() -> Running | None:
    """The plugin as it runs in this process, None where it is not installed."""
    return _RUNNING[-1] if _RUNNING else None


def uninstall() -> None:
    """Turn everything off: hooks pass straight on, and every live dispatcher has SGLang's own kernels again.

    CUDA graphs that were captured keep the kernels that they captured. So nothing that these may read is freed, and
    where there are any, weight updates go on refreshing the parameter copies.
    """
    seam.uninstall()
    gone = tuple(_RUNNING)
    _OUTLIVED.extend(gone)
    _RUNNING.clear()
    for one in gone:
        one.gdn.restore()
    for one in gone:
        if one.mirror is not None:
            _stop(one.mirror)


def _stop(mirror: PrometheusMirror) -> None:
    try:
        mirror.stop()
    except Exception as exc:  # noqa: BLE001 - prometheus_client and its files may raise anything; all else is off by now
        logger.error("qwen35: is off, but its last counts did not reach the metrics (%s)", seam.said(exc))


def refuse_impossible(settings: Settings) -> None:
    """Raise for an adapter that the settings name and that does not exist or cannot be used on this machine."""
    if named_adapters(settings) or settings.conv != AUTO:
        first = next(impossible(settings, make_registry(settings, make_platform(settings), ())), None)
        if first is not None:
            raise first


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a launch would do, in words, and whether it ``ends`` for what it was asked."""

    text: str
    ends: bool


def explain(model: str = "") -> str:
    """The text of ``explained``, which see."""
    return explained(model).text


def explained(model: str = "") -> Explanation:
    """What the plugin would do on this machine with the settings in force, for the model directory ``model``.

    Imports SGLang, to check its names. Raises ``ConfigurationError`` for settings or a directory that cannot be read.
    """
    absent = [*([SWITCHED_OFF] if sglang_switched_off() else []), *left_out()]
    if absent:  # nothing else of ours is read, so nothing can end the launch
        text = explain_text(
            release=installed_release(), problems=absent, platform=detect_platform(), choices=(), fallback=None
        )
        return Explanation(text, ends=False)
    settings = load_settings()
    registry = make_registry(settings, make_platform(settings), ())
    facts = read_model(Path(model)) if model else None
    found, release = installed_release(), None
    problems: tuple[str, ...] = ("SGLang is not installed",)
    if found is not None:
        try:
            release = release_seam(found, settings.sglang_untested)
            problems = seam.differences(release.targets)
        except UnavailableError as exc:
            problems = (str(exc),)
    ends = [str(exc) for exc in impossible(settings, registry)]
    if problems and found is not None and settings.sglang_strict:
        ends.append("QWEN35_SGLANG_STRICT is set")
    fits = None if problems else release
    choices = phase_choices(settings, registry, facts)
    parts, verdicts = [], [bool(ends)]
    if fits is not None:
        fusion = fusion_choice(settings, registry, fits, facts)
        parts = part_lines(settings, fusion, fits, facts)
        verdicts += [fusion.ends, *(choice.ends for choice in choices)]
    text = explain_text(
        release=found, problems=problems, platform=registry.platform, choices=choices,
        fallback=settings.gdn_fallback, model=None if facts is None else facts.line(), ends=ends,
        parts=parts,
    )  # fmt: skip
    return Explanation(text, ends=any(verdicts))


def _release(settings: Settings) -> Release | None:
    """The seam of the installed release; None, said once, where it is untested and SGLang may run without us."""
    found = installed_release()
    if found is None:
        return None
    try:
        return release_seam(found, settings.sglang_untested)
    except UnavailableError as exc:
        if settings.sglang_strict:
            raise
        logger.error("qwen35: %s. SGLang runs as if the plugin were not there", exc)
        return None


def _around_scheduler(
    settings: Settings, release: Release, original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any
) -> None:
    one = _begin(settings, release, partial(inspect.signature(original).bind, scheduler, *args, **kwargs))
    try:
        original(scheduler, *args, **kwargs)
        if one is not None and one is running():
            one.gdn.refuse_unrouted()
    except (UnsupportedError, UnavailableError, ConfigurationError) as exc:
        end_scheduler(exc)
    if one is None or one is not running():
        return
    try:
        announce(settings, one)
    except Exception as exc:  # noqa: BLE001 - an engine that stands must not end by what is said of it
        logger.error("qwen35: serves, but could not say so or start its metrics (%s)", seam.said(exc))


def _begin(settings: Settings, release: Release, bind: Callable[[], inspect.BoundArguments]) -> Running | None:
    """The plugin installed in this process; None, said once, where the seam does not fit and SGLang may run alone."""
    what = f"the seam for SGLang {installed_release()}"
    try:
        with reported(what):
            found = seam.differences(release.targets)
            if found:
                raise UnavailableError(what, found)
            place = release.place(bind().arguments)
        container = _container_or_end(settings, place)
        with reported(what):
            return start(settings, release, place, container)
    except UnavailableError as exc:
        _leave_alone(settings, exc)
        return None
    except Qwen35Error as exc:
        end_scheduler(exc)


def _leave_alone(settings: Settings, exc: UnavailableError) -> None:
    """Uninstall what there is, and say so in one line; by setting the launch ends with it."""
    uninstall()
    if settings.sglang_strict:
        end_scheduler(exc)
    logger.error("qwen35: %s. SGLang runs as if the plugin were not there", exc)


def _container_or_end(settings: Settings, place: Place) -> Container:
    try:
        return make_container(settings, place)
    except Qwen35Error as exc:
        end_scheduler(exc)


def make_container(settings: Settings, place: Place) -> Container:
    """The container of this process. Phases that are not routed share a routed phase's adapter, or a free one.

    Raises ``ConfigurationError`` or ``UnavailableError`` for what cannot be honoured.
    """
    routes = requested_phases(settings)
    filler = next(iter(routes.values()), UNUSED)
    names = {f"gdn_{phase}": routes.get(phase, filler) for phase in (Phase.DECODE, Phase.EXTEND, Phase.VERIFY)}
    overrides: dict[str, Any] = {
        **names, "conv": UNUSED, "device": _device(settings, place), "finalize": requested_fusion(settings) or OFF,
    }  # fmt: skip
    return build(settings, **overrides)


def start(
    settings: Settings, release: Release, place: Place, container: Container,
    agreements: Agreements = PROCESS_AGREEMENTS,
) -> Running:  # fmt: skip
    """Install every part of the seam in this process, or nothing. Ranks are heard through ``agreements``.

    Raises ``UnavailableError`` naming release, target and difference.
    """
    routes = requested_phases(settings)
    guard = partial(our_half, release, partial(_leave_alone, settings))
    gdn = GdnSeam(
        release, routes, container.gated_delta_rule() if routes else None, container.counters(), guard,
        checked=settings.checked, strict=settings.sglang_strict, fallback=settings.gdn_fallback,
    )  # fmt: skip
    named = requested_fusion(settings)
    service = container.finalize() if named is not None else None
    ranks = RankSettings(release, named, agreements, checked=settings.checked, strict=settings.sglang_strict)
    fusion = FusionSeam(release, named, service, container.counters(), ranks, guard, strict=settings.sglang_strict)
    finalize = FinalizeSeam(named, service, place.gpu, ranks)
    relay = RelaySeam(release, container.counters(), guard)
    hooks = gdn.hooks() | fusion.hooks() | finalize.hooks() | relay.hooks()
    seam.install(installed_release() or release.version, release.targets, hooks)
    refused = refused_switch(release, container.registry())
    if refused is not None:  # SGLang's refusal comes while it makes the model, and does not say what else there is
        logger.warning("qwen35: %s", refused)
    one = Running(container, release, place, gdn, fusion, finalize, relay)
    _RUNNING.append(one)
    return one


def announce(settings: Settings, one: Running) -> None:
    """Once the engine stands: start the metrics, in one process of each replica, and log what is done and why, at a
    level that shows, in one process of all."""
    unrouted = one.gdn.unrouted
    if requested_phases(settings) and unrouted is not None:
        one.gdn.notes.append(f"{unrouted}: nothing is routed")
    if one.place.counts and metrics_wanted():
        one.mirror = PrometheusMirror(one.container.counters(), one.place.data_rank)
        one.mirror.start()
    if not one.place.first:
        return
    registry = one.container.registry()
    fusion, drafts = fusion_choice(settings, registry, one.release, None), speculating()
    text = explain_text(
        release=installed_release(), problems=(), platform=registry.platform,
        choices=phase_choices(settings, registry, None, unrouted, drafts), fallback=settings.gdn_fallback,
        model=one.gdn.model_line(), parts=part_lines(settings, fusion, one.release, None, unrouted, drafts),
        others=[*one.gdn.notes, *one.fusion.notes],
    )  # fmt: skip
    one.announced.append(text)
    logger.warning("%s", text)


def _device(settings: Settings, place: Place) -> str:
    """SGLang makes a GPU current only after its scheduler has begun, so "auto" would take the first one."""
    if settings.device == AUTO and torch.cuda.is_available() and place.gpu < torch.cuda.device_count():
        return f"cuda:{place.gpu}"
    return settings.device
