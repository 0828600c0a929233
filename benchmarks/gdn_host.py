"""The host's part of gdn_integration.py: what a call costs before its kernels are queued."""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gdn_claims import Claim, Session
from gdn_paths import STATES, FlashInferDirect, Thunk, decode_calls, host_medians, layout_of
from qwen35.domain.capabilities import Phase
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GatedDeltaRule, RawGates
from qwen35.services.gated_delta_rule import PORT
from qwen35.testing.workload import Row, random_call, random_pool, raw_gates

#: GDN layers of 35B-A3B, and the tokens of two prompts in turn, so that the first layer of each is checked anew. Triton
#: knows both after the first time, and other lengths that serving brings it does not: a launch or two of thirty more.
LAYERS, PROMPTS = 30, (128, 120)


def host_part(session: Session) -> Iterator[Claim]:
    """Host time of one decode at B = 1."""
    usable = session.registry.usable(PORT, "flashinfer")
    for name, state in STATES.items():
        found, where = _host_times(session, name, state, bool(usable)), f"{name} state, B = 1"
        claim = Claim("host", f"container + guard + FlashInfer over FlashInfer's function, {where}", at_most=15.0)
        claim.unit, claim.detail, claim.reasons = "us more", {"us": found}, list(usable.reasons)
        if usable:
            claim.value = found["flashinfer container"] - found["flashinfer direct"]
        yield claim
        for way, microseconds in found.items():
            yield Claim("host", f"{way}, {where}", microseconds, "us")


@torch.inference_mode()
def _host_times(session: Session, name: str, state: torch.dtype, flashinfer: bool) -> dict[str, float]:
    """In inference mode, as engines run: views cost half as much there."""
    call = decode_calls(session.geometry, state, 1, session.seed)[0]
    ways: dict[str, Thunk] = {"flashinfer direct": FlashInferDirect.of(call).by_index()} if flashinfer else {}
    for adapter in ("flashinfer", "triton") if flashinfer else ("triton",):
        rule, bare = session.rule(adapter, state, 1), session.bare(adapter, state, 1)
        ways |= {
            f"{adapter} adapter": partial(bare.decode, call), f"{adapter} container": partial(rule.decode, call),
            f"{adapter} container, call made anew": partial(_made_anew, rule, call),
        }  # fmt: skip
    found = host_medians(ways)
    show_profiles(session, ways, f"{name} state, B = 1", count=2000)
    return found


def _made_anew(rule: GatedDeltaRule, c: DecodeCall) -> object:
    """As an engine calls: the objects are made for the call."""
    given = raw_gates(c)
    gates = RawGates(a=given.a, b=given.b, A_log=given.A_log, dt_bias=given.dt_bias)
    return rule.decode(DecodeCall(q=c.q, k=c.k, v=c.v, gates=gates, states=c.states, slots=c.slots, out=c.out))


def show_profiles(session: Session, ways: Mapping[str, Thunk], what: str, count: int) -> None:
    """Where the host's time goes in each container, if ``session`` wants to know."""
    for way, thunk in ways.items():
        if session.profile and way.endswith("container"):
            show_profile(f"{way}, {what}", thunk, count)


def show_profile(what: str, thunk: Thunk, count: int) -> None:
    """Of one way; cProfile itself about doubles it."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        thunk()
    profiler.disable()
    torch.cuda.synchronize()
    sys.stdout.write(f"\n{what}: {count} calls\n")
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(15)


@torch.inference_mode()
def extend_host_part(session: Session) -> Iterator[Claim]:
    """Host time that one extend of a model's layers takes, of short prompts with a float32 state."""
    usable = session.registry.usable(PORT, "flashinfer")
    prompts = [_layers(session, tokens) for tokens in PROMPTS]
    ways: dict[str, Thunk] = {}
    if usable:
        ways["flashinfer direct"] = partial(_run_each, [[_prefill_direct(c) for c in calls] for calls in prompts])
    for adapter in ("flashinfer", "triton") if usable else ("triton",):
        bare, rule = (make(adapter, torch.float32, 1, max(PROMPTS)) for make in (session.bare, session.rule))
        for way, subject in (("adapter", bare), ("container", rule)):
            thunks = [[partial(subject.extend, call) for call in calls] for calls in prompts]
            ways[f"{adapter} {way}"] = partial(_run_each, thunks)
    found = host_medians(ways, count=60, block=3)
    show_profiles(session, ways, f"extends of {LAYERS} layers", count=20)
    for way, microseconds in found.items():
        what = f"{way}, extends of {' and '.join(map(str, PROMPTS))} tokens in turn, a layer"
        yield Claim("extend_host", what, microseconds / (len(PROMPTS) * LAYERS), "us", reasons=list(usable.reasons))


def _layers(session: Session, tokens: int) -> list[ExtendCall]:
    """The calls of a model's layers for one prompt: each its own tensors, one set of offsets and lengths."""
    layout, row = layout_of(session.geometry, torch.float32), Row(Phase.EXTEND, (tokens,))
    generator = torch.Generator("cuda").manual_seed(session.seed)
    slot = torch.tensor([2], dtype=torch.int32, device="cuda")
    calls: list[ExtendCall] = []
    for _ in range(LAYERS):
        made: Any = random_call(layout, row, random_pool(layout, 3, generator), slot, generator)
        calls.append(replace(made, cu_seqlens=calls[0].cu_seqlens) if calls else made)
    return calls


def _prefill_direct(call: ExtendCall) -> Thunk:
    """FlashInfer's public prefill function on tensors that are ready."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (call.q, call.k))
    shape = call.slots.shape[0], *call.states.shape[1:]
    decay, beta = (torch.rand(call.v.shape[:2], device=call.v.device) for _ in range(2))
    return partial(
        chunk_gated_delta_rule, q=q, k=k, v=call.v.contiguous(), g=decay, beta=beta,
        initial_state=torch.zeros(shape, device=call.v.device), output_final_state=True,
        cu_seqlens=call.cu_seqlens.long(), output=torch.empty_like(call.v.contiguous()),
        output_state=torch.empty(shape, device=call.v.device), use_cp=False,
    )  # fmt: skip


def _run_each(prompts: Sequence[Sequence[Thunk]]) -> None:
    for layers in prompts:
        for layer in layers:
            layer()
