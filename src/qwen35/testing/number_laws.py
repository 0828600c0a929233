"""Laws of both ports about numbers: precision, parameters, checkpoints, finite results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qwen35.domain.capabilities import Clause, GateKind, Phase
from qwen35.testing.bench import Bench, Trial
from qwen35.testing.case import Case, GdnSizes
from qwen35.testing.kit import Kit
from qwen35.testing.law import Law
from qwen35.testing.slot_laws import TOKEN_PHASES, law
from qwen35.testing.strategies import Wish


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
    return laws


def _checkpoints(bench: Bench) -> tuple[str, ...]:
    return () if bench.adapter.capabilities.checkpoints else ("checkpoints are not offered",)
