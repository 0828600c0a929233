"""Laws of both ports about numbers: precision, parameters, checkpoints, finite results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from qwen35.domain.capabilities import Clause, GateKind, Phase
from qwen35.testing.bench import Bench, Trial
from qwen35.testing.case import Case, GdnSizes
from qwen35.testing.kit import Kit
from qwen35.testing.law import Law
from qwen35.testing.limits import Limits
from qwen35.testing.slot_laws import TOKEN_PHASES, law
from qwen35.testing.strategies import Wish, cases
from qwen35.testing.tensors import Guards


def precision(bench: Bench, case: Case[Any]) -> None:
    """Outputs, states, intermediates and checkpoints are within the stated bound of the float64 oracle."""
    trial = bench.trial(case)
    trial.ask()
    want = trial.truth()
    trial.matches(trial.run(), want)


def parameters(bench: Bench, case: Case[Any]) -> None:
    """Parameters rewritten in place count after ``refresh_parameters``, as do another layer's parameters."""
    trial = bench.trial(case)
    trial.run()
    later = bench.trial(replace(case, seed=case.seed ^ 1))
    new = {name: value for name, value in later.parts.params.items() if isinstance(value, torch.Tensor)}
    for name, value in new.items():
        trial.parts.params[name].copy_(value)
    bench.adapter.refresh_parameters()
    mixed = Trial(bench, later.case, replace(later.made, parts=replace(later.parts, params=trial.parts.params)))
    want = mixed.truth()
    mixed.matches(mixed.run(), want)
    # Another layer comes with its own tensors, which may live where the first layer's did.
    third = bench.trial(replace(case, seed=case.seed ^ 2))
    want = third.truth()
    third.matches(third.run(), want)


def checkpoints(bench: Bench, case: Case[Any]) -> None:
    """Checkpoint i of a sequence is its state after (i + 1) * every tokens; planning them changes nothing else."""
    trial = bench.trial(case)
    want = trial.truth()
    served = trial.run()
    assert served.checkpoints is not None, f"checkpoints were planned and not returned; {case}"
    expected = sum(n // case.every for n in case.lengths) if case.every else 0
    shape = (expected, *case.sizes.slot_shape)
    assert tuple(served.checkpoints.shape) == shape, f"checkpoints are {list(served.checkpoints.shape)}; {case}"
    assert served.checkpoints.dtype == case.sizes.state_dtype, f"checkpoints are {served.checkpoints.dtype}; {case}"
    trial.matches(served, want)


def nothing_past_checkpoints(bench: Bench, case: Case[Any]) -> None:
    """A last chunk that is not full gives no checkpoint: none is written over another sequence's, nor past the last.

    The adapter makes the checkpoints, so what lies behind them is looked at in what torch hands out.
    """
    trial = bench.trial(case)
    want = trial.truth()
    with Guards(2 * trial.parts.pool[0].numel(), bench.place) as guards:
        served = trial.run()
    trial.matches(served, want)
    broken = guards.broken()
    assert not broken, f"something was written past the end of what was made as {broken}; {case}"


def large_gates(bench: Bench, case: Case[Any]) -> None:
    """Softplus is linear past 20 and has no end: gates of 25 and 60 decay as the oracle says, by a rate that is small
    enough to see it."""
    trial = bench.trial(case)
    a, dt_bias, A_log = trial.parts.tokens["a"], trial.parts.params["dt_bias"], trial.parts.params["A_log"]
    A_log.add_(1.0).div_(6.0).sub_(5.0)  # -4..2 becomes -5.5..-4.5: decays of 0.51 to 0.90
    turn = torch.arange(a.numel(), device=a.device).view(a.shape) + case.seed
    a.copy_(torch.where(turn % 2 == 0, 25.0, 60.0) - dt_bias.float())
    want = trial.truth()
    trial.matches(trial.run(), want)


def no_graph(bench: Bench, case: Case[Any]) -> None:
    """Parameters that ask for gradients get none: outputs, states and intermediates belong to no autograd graph."""
    trial = bench.trial(case)
    # Views of their buffers, as loaders make them: nn.Parameter of the very same memory.
    params = {
        name: torch.nn.Parameter(value) if isinstance(value, torch.Tensor) else value
        for name, value in trial.parts.params.items()
    }
    trial.parts = replace(trial.parts, params=params)
    served = trial.run()
    made = {"out": served.out, "the pool": trial.parts.pool, "intermediates": trial.parts.intermediates}
    for name, tensor in made.items():
        assert tensor is None or not tensor.requires_grad, f"{name} belongs to an autograd graph; {case}"


def finite(bench: Bench, case: Case[Any]) -> None:
    """Zero keys, huge gates of either sign and large inputs give finite results."""
    trial = bench.trial(case)
    _extremes(trial)
    served = trial.run()
    assert served.out is not None
    assert bool(torch.isfinite(served.out).all()), f"out is not finite; {case}"
    for slot in case.written:
        assert bool(torch.isfinite(trial.parts.pool[slot]).all()), f"state of slot {slot} is not finite; {case}"
    if trial.parts.intermediates is not None:
        live = trial.parts.intermediates[trial.live_rows(), : case.draft]
        assert bool(torch.isfinite(live).all()), f"intermediates are not finite; {case}"


#: Values that overflow, underflow or cancel in a careless formula: softplus and exp, log decay, beta.
_GATE_EXTREMES = {
    "a": (1e4, 100.0, 88.0, -1e4, -100.0), "b": (1e4, -1e4, 100.0, -100.0), "g": (-1e6, -1e4, -100.0, 0.0),
    "beta": (0.0, 1.0),
}  # fmt: skip


def _extremes(trial: Trial) -> None:
    """Overwrite single heads or channels of single tokens by extreme values, picked by the seed."""
    choice, tokens = trial.case.choices(), trial.parts.tokens
    if isinstance(trial.case.sizes, GdnSizes):
        for name in ("q", "k"):
            flat = tokens[name].movedim(-2, 0)
            flat[choice.randrange(flat.shape[0])] = choice.choice((0.0, 0.0, 1e15, 1e-15))
        for name, values in _GATE_EXTREMES.items():
            if name in tokens:
                heads = tokens[name].movedim(-1, 0)
                for head in range(heads.shape[0]):
                    if choice.random() < 0.7:
                        heads[head] = choice.choice(values)
        if trial.case.sizes.gates is GateKind.RAW:
            trial.parts.params["A_log"][choice.randrange(trial.case.sizes.value_heads)] = choice.choice((8.0, -20.0))
    else:
        x = tokens["x"].movedim(-1, 0)
        for value in (1e4, -1e4, 100.0, -100.0, 1e15, -1e15):
            x[choice.randrange(x.shape[0])] = value


def number_laws(kit: Kit) -> list[Law]:
    """The laws of this module for one port."""
    laws = [
        law(kit, Clause.PRECISION, phase, "within the stated bound of the oracle", precision, Wish(tree=None),
            must_serve=True)
        for phase in TOKEN_PHASES
    ]  # fmt: skip
    for phase in TOKEN_PHASES:
        laws.append(
            law(kit, Clause.PRECISION, phase, "parameters are those of now, of this layer", parameters,
                Wish(pad=False, min_length=1))
        )  # fmt: skip
        laws.append(
            law(kit, Clause.ISOLATION, phase, "parameters get no gradients", no_graph, Wish(pad=False, min_length=1),
                most_examples=5)
        )  # fmt: skip
        laws.append(law(kit, Clause.FINITE, phase, "extreme inputs give finite results", finite, Wish(min_length=1)))
    if kit.port == "gated_delta_rule":
        laws.append(
            law(kit, Clause.PRECISION, Phase.EXTEND, "checkpoints are the states on the way", checkpoints,
                Wish(checkpoints=True), needs=_checkpoints)
        )  # fmt: skip
        past = law(kit, Clause.ISOLATION, Phase.EXTEND, "nothing is written past the checkpoints",
                   nothing_past_checkpoints, needs=_checkpoints, most_examples=3)  # fmt: skip
        laws.append(replace(past, cases=lambda limits: _with_partial_chunks(kit, limits)))
        for phase in TOKEN_PHASES:
            linear = law(kit, Clause.PRECISION, phase, "softplus is linear past 20", large_gates, needs=_raw_gates)
            laws.append(replace(linear, cases=_raw_cases(kit, phase)))
    return laws


def _with_partial_chunks(kit: Kit, limits: Limits) -> st.SearchStrategy[Case[Any]]:
    """Extends with a checkpoint a chunk, in which the last sequence lacks one token for its second checkpoint; so does
    the first where there are three."""
    every = limits.checkpoint_multiple if limits.checkpoint_multiple > 1 else 5

    def cut(case: Case[Any]) -> Case[Any]:
        rows = len(case.slots)
        lengths = [2 * every - 1] * (rows > 2) + [every] * (rows - 1 - (rows > 2)) + [2 * every - 1]
        return replace(case, lengths=tuple(lengths), every=every)

    return cases(kit, limits, Phase.EXTEND, Wish(pad=False, min_rows=2, checkpoints=True)).map(cut)


def _raw_cases(kit: Kit, phase: Phase) -> Any:
    """Cases of raw gates in which every state counts: no fresh sequence, none without tokens, two rows or more."""

    def raw(case: Case[Any]) -> Case[Any]:
        return replace(case, sizes=replace(case.sizes, gates=GateKind.RAW), fresh=None)

    wish = Wish(pad=False, writes=False, min_rows=2, min_length=1)
    return lambda limits: cases(kit, limits, phase, wish).map(raw)


def _raw_gates(bench: Bench) -> tuple[str, ...]:
    return () if GateKind.RAW in bench.limits.gates else ("raw gates are not offered",)


def _checkpoints(bench: Bench) -> tuple[str, ...]:
    return () if bench.adapter.capabilities.checkpoints else ("checkpoints are not offered",)
