"""The float64 oracle against code that others wrote: transformers' own Qwen3.5, in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qwen35.domain.capabilities import GateKind, Phase
from qwen35.domain.precision import UNIT_ROUNDOFF
from qwen35.ports.gated_delta_rule import ExtendCall, LogGates
from qwen35.testing import KITS, Case, ConvSizes, GdnSizes, relative_error, truth
from qwen35.testing.make import make_parts

hf = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
#: Float32 sums over chunks of 64, of a formula that is rearranged.
TOLERANCE = 256 * UNIT_ROUNDOFF["float32"]
CPU = torch.device("cpu")


def gdn_case(tokens: int, seed: int, gates: GateKind) -> Case[GdnSizes]:
    sizes = GdnSizes(key_heads=2, value_heads=6, key_width=16, value_width=24, gates=gates)
    return Case(phase=Phase.EXTEND, sizes=sizes, seed=seed, pool=2, slots=(1,), lengths=(tokens,))


def theirs(call: ExtendCall, function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, V] and final state [HV, V, K] by one of transformers' functions: there q and k come with
    HV heads, tensors as [B, T, H, K] and states as [B, H, K, V]."""
    ratio = call.v.shape[1] // call.q.shape[1]
    if isinstance(call.gates, LogGates):
        g, beta = call.gates.g, call.gates.beta
    else:
        gates = call.gates
        g = -gates.A_log.exp() * torch.nn.functional.softplus(gates.a + gates.dt_bias)
        beta = gates.b.sigmoid()
    out, state = function(
        call.q.repeat_interleave(ratio, 1)[None], call.k.repeat_interleave(ratio, 1)[None], call.v[None],
        g=g[None], beta=beta[None], initial_state=call.states[1].transpose(1, 2)[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out[0], state[0].transpose(1, 2)


@pytest.mark.row("D16")
@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("tokens", [1, 63, 65, 130])
@pytest.mark.parametrize("gates", list(GateKind))
def test_the_oracle_agrees_with_transformers(name: str, tokens: int, gates: GateKind, seed: int) -> None:
    kit = KITS["gated_delta_rule"]
    call = kit.call(Phase.EXTEND, make_parts(kit, gdn_case(tokens, seed, gates), CPU).parts)
    want = truth(kit, call)
    out, state = theirs(call, getattr(hf, name))
    assert want.out is not None
    assert relative_error(out, want.out) < TOLERANCE, f"seed {seed}"
    assert relative_error(state, want.states[1]) < TOLERANCE, f"seed {seed}"


@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_oracle_agrees_with_transformers(bias: bool, seed: int) -> None:
    kit = KITS["short_convolution"]
    case = Case(
        phase=Phase.EXTEND, sizes=ConvSizes(channels=24, width=4, bias=bias), seed=seed, pool=2, slots=(1,),
        lengths=(7,),
    )  # fmt: skip
    call = kit.call(Phase.EXTEND, make_parts(kit, case, CPU).parts)
    want = truth(kit, call)
    window = call.windows[1:].clone()
    out = hf.torch_causal_conv1d_update(call.x.T[None], window, call.weight, call.bias, "silu")
    assert want.out is not None
    assert relative_error(out[0].T, want.out) < TOLERANCE, f"seed {seed}"
    assert torch.equal(window[0].double(), want.states[1]), f"seed {seed}"


def test_relative_error_is_infinite_for_what_is_not_finite_and_exact_at_zero() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(one, zero) == float("inf")
    for odd in ("nan", "inf", "-inf"):
        spoilt = torch.tensor([1.0, float(odd), 1.0])
        for got, want, terms in ((spoilt, one, None), (spoilt, zero, None), (one, spoilt, None), (spoilt, one, one)):
            assert relative_error(got, want, terms) == float("inf"), f"{odd}: {got} {want} {terms}"
