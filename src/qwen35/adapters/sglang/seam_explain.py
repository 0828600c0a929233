"""What the plugin would do, or does, for one machine, release and model, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qwen35.adapters.sglang.seams import TESTED
from qwen35.domain.capabilities import Phase
from qwen35.domain.platform import Platform
from qwen35.domain.shadow import parse_shadow

#: FlashInfer's deferred finalize and CuTe DSL kernels begin here.
CUTEDSL_CAPABILITY = (10, 0)
#: What becomes of a launch that was asked for the impossible.
ENDS = "the launch ends"
#: The same where SGLang could run without us.
STRICTLY_ENDS = f"{ENDS} (QWEN35_SGLANG_STRICT)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The ``reasons`` against an adapter that a setting names, if any, and what the launch does about those."""

    reasons: tuple[str, ...] = ()
    then: str = ENDS

    @property
    def ends(self) -> bool:
        """Whether the launch ends for the reasons against the adapter."""
        return bool(self.reasons) and self.then.startswith(ENDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChoice(_Named):
    """Who serves a phase: ``adapter`` (None: SGLang's own kernel), and the ``reasons`` against it, if any.

    ``then``: what the launch does about those. ``unrouted``: why nothing of this model is routed, whatever is named.
    ``drafts``: whether the launch has drafts to verify (None: nothing tells before it stands).
    """

    phase: Phase
    adapter: str | None
    unrouted: str | None = None
    drafts: bool | None = None

    @property
    def routed(self) -> bool:
        """Whether calls of the phase go to our service."""
        return self.adapter is not None and self.unrouted is None and not self.undrafted

    @property
    def undrafted(self) -> bool:
        """Whether no call of the phase comes, for want of drafts."""
        return self.phase is Phase.VERIFY and self.drafts is False

    @property
    def variable(self) -> str:
        """The environment variable that chooses."""
        return f"QWEN35_GDN_{self.phase.upper()}"

    def text(self) -> str:
        """One line."""
        if self.unrouted is not None and not self.reasons:
            idle = "" if self.adapter is None else f"; {self.adapter} ({self.variable}) serves nothing"
            return f"{self.phase}: SGLang's own kernel, uncounted: {self.unrouted}{idle}"
        if self.adapter is None:
            return f"{self.phase}: SGLang's own kernel, counted ({self.variable} is not set)"
        named = f"{self.adapter} ({self.variable})"
        if self.reasons:
            return _with_reasons(f"{self.phase}: {named}", self.reasons, self.then)
        if self.undrafted:
            return f"{self.phase}: no calls: this launch has no speculative decoding; {named} serves nothing"
        drafted = self.phase is Phase.VERIFY and self.drafts is None
        return f"{self.phase}: {named}" + (", where the launch has speculative decoding" if drafted else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionChoice(_Named):
    """Who serves all-reduce + residual + norm: ``adapter`` (None: SGLang's own choice), and the ``reasons`` against it.

    ``kept``: where nothing is named, the setting's value ("auto" or "off"). ``refused_switch``: what becomes of
    SGLang's own CuTe DSL switch, where it is on and this machine cannot serve it. ``then``: what the launch does about
    the reasons.
    """

    adapter: str | None
    kept: str = "auto"
    refused_switch: str | None = None

    def lines(self) -> list[str]:
        """One line, and one more for SGLang's switch."""
        if self.adapter is None:
            why = "QWEN35_FINALIZE is not set" if self.kept == "auto" else f"QWEN35_FINALIZE is {self.kept}"
            text = f"fusion: SGLang's own choice, counted ({why})"
        else:
            text = f"fusion: {self.adapter} (QWEN35_FINALIZE)"
            text += "" if self.reasons else " for all-reduce + residual + norm among two ranks or more"
            text = _with_reasons(text, self.reasons, self.then)
        return [text, *([] if self.refused_switch is None else [self.refused_switch])]


def _with_reasons(choice: str, reasons: Sequence[str], then: str) -> str:
    return f"{choice}, which cannot serve here: {'; '.join(reasons)}; {then}" if reasons else choice


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


def idle_line(name: str, value: object, decides: str) -> str:
    """That the setting ``name`` is set and does nothing here, and what ``decides`` instead."""
    return f"QWEN35_{name.upper()} = {value} does nothing inside SGLang: {decides}"


def shadow_line(setting: str | None, routes: Mapping[Phase, str]) -> str:
    """Which calls are repeated by a second adapter, where ``routes`` says who serves."""
    if setting is None:
        return "shadow: none (QWEN35_GDN_SHADOW is not set)"
    spec = parse_shadow(setting)
    if not routes:
        return f"shadow: none; {spec.adapter} (QWEN35_GDN_SHADOW) needs a phase that an adapter of ours serves"
    text = f"shadow: {spec.adapter} repeats one eager call in {spec.every} of each phase (QWEN35_GDN_SHADOW)"
    same = [phase for phase, adapter in routes.items() if adapter == spec.adapter]
    return f"{text}; it serves {', '.join(same)} too, and is compared with itself there" if same else text


def explain(
    *, release: str | None, problems: Sequence[str], platform: Platform, choices: Iterable[PhaseChoice],
    fallback: str | None, parts: Iterable[str] = (), model: str | None = None, others: Iterable[str] = (),
    ends: Iterable[str] = (),
) -> str:  # fmt: skip
    """The text: release and machine, who serves which phase, what happens to what an adapter refuses.

    ``problems``: why the seam is not installed (none: it is). ``parts`` (fusion, relay, shadow), ``model`` and
    ``others``: lines of their own. ``ends``: what ends the launch.
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
    ending = [f"{ENDS}: {why}" for why in ends]
    if problems:
        return "\n  ".join([*lines, *(ending or ["SGLang runs as if the plugin were not there"])])
    chosen = list(choices)
    lines += [choice.text() for choice in chosen]
    serving = {choice.adapter for choice in chosen if choice.routed and not choice.ends}
    if serving:
        second = "" if fallback is None or serving == {fallback} else f"{fallback} (QWEN35_GDN_FALLBACK), then "
        lines.append(f"what a chosen adapter refuses: {second}SGLang's own kernel, counted with the reason")
    lines += parts
    lines.append("always SGLang's own: short convolution, commit of accepted drafts, ReplaySSM, multi-item scoring")
    if model is not None:
        lines.append(f"model: {model}")
    return "\n  ".join([*lines, *others, *ending])
