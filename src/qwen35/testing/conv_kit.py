"""The short convolution as the laws see it."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from qwen35.domain.capabilities import Phase
from qwen35.ports.conv_calls import (
    Activation,
    ConvCommitCall,
    ConvDecodeCall,
    ConvExtendCall,
    ConvPlan,
    ConvVerifyCall,
)
from qwen35.ports.short_convolution import ConvCall
from qwen35.testing.case import Case, ConvSizes
from qwen35.testing.kit import Kit, Parts
from qwen35.testing.limits import Limits
from qwen35.testing.tensors import normal

ACTIVATIONS: tuple[Activation, ...] = ("silu", None)


class ConvKit(Kit):
    """See ``Kit``. Tokens: x; params: weight, bias, activation. The pool is ``windows``."""

    port = "short_convolution"
    groups = (("x",),)
    pool_name = "windows"

    def sizes(self, limits: Limits) -> st.SearchStrategy[ConvSizes]:
        """Channels, width, dtypes, bias and activation within ``limits``."""
        dtypes = st.sampled_from(limits.token_dtypes)
        return st.builds(
            ConvSizes, channels=st.sampled_from(limits.channels), width=st.sampled_from(limits.conv_widths),
            token_dtype=dtypes, state_dtype=st.sampled_from(limits.state_dtypes), bias=st.booleans(),
            activation=st.sampled_from(ACTIVATIONS),
        )  # fmt: skip

    def tokens(self, sizes: ConvSizes, leading: tuple[int, ...], source: torch.Generator) -> dict[str, Tensor]:
        """x, standard normal."""
        return {"x": normal((*leading, sizes.channels), source).to(sizes.token_dtype)}

    def params(self, sizes: ConvSizes, source: torch.Generator) -> dict[str, Any]:
        """weight [C, W], bias [C] and activation."""
        weight = normal((sizes.channels, sizes.width), source).to(sizes.token_dtype)
        bias = normal((sizes.channels,), source).to(sizes.token_dtype)
        return {"weight": weight, "bias": bias if sizes.bias else None, "activation": sizes.activation}

    def out_shape(self, sizes: ConvSizes) -> tuple[int, ...]:
        """[C]."""
        return (sizes.channels,)

    def plan(self, case: Case[ConvSizes], device: torch.device, null_slot: int | None) -> ConvPlan:
        """The smallest plan that holds the case; convolutions need no null slot."""
        return ConvPlan(
            channels=case.sizes.channels, width=case.sizes.width, window_dtype=case.sizes.state_dtype, device=device,
            max_batch=max(1, len(case.slots)), max_tokens=max(1, sum(case.lengths), len(case.slots)),
            max_draft=case.draft, token_dtype=case.sizes.token_dtype,
        )  # fmt: skip

    def call(self, phase: Phase, parts: Parts) -> ConvCall:
        """The call object of ``phase``."""
        p = parts
        if phase is Phase.COMMIT:
            assert p.intermediates is not None
            assert p.last is not None
            return ConvCommitCall(
                windows=p.pool, slots=p.slots, intermediates=p.intermediates, last=p.last, rows=p.rows
            )
        x, weight, bias, act = p.tokens["x"], p.params["weight"], p.params["bias"], p.params["activation"]
        if phase is Phase.DECODE:
            return ConvDecodeCall(
                x=x, weight=weight, bias=bias, activation=act, windows=p.pool, slots=p.slots,
                write_slots=p.write_slots, out=p.out,
            )  # fmt: skip
        if phase is Phase.VERIFY:
            assert p.intermediates is not None
            return ConvVerifyCall(
                x=x, weight=weight, bias=bias, activation=act, windows=p.pool, slots=p.slots,
                intermediates=p.intermediates, rows=p.rows, parents=p.parents, out=p.out,
            )  # fmt: skip
        assert p.cu_seqlens is not None
        return ConvExtendCall(
            x=x, weight=weight, bias=bias, activation=act, windows=p.pool, slots=p.slots, cu_seqlens=p.cu_seqlens,
            seq_lens_host=p.seq_lens_host, fresh=p.fresh, write_slots=p.write_slots, out=p.out,
        )  # fmt: skip

    def parts(self, call: ConvCall) -> Parts:
        """The reverse of ``call``."""
        if isinstance(call, ConvCommitCall):
            return Parts(
                pool=call.windows, slots=call.slots, intermediates=call.intermediates, rows=call.rows, last=call.last
            )
        tokens = {"x": call.x}
        params = {"weight": call.weight, "bias": call.bias, "activation": call.activation}
        if isinstance(call, ConvDecodeCall):
            return Parts(
                pool=call.windows, slots=call.slots, tokens=tokens, params=params, write_slots=call.write_slots,
                out=call.out,
            )  # fmt: skip
        if isinstance(call, ConvVerifyCall):
            return Parts(
                pool=call.windows, slots=call.slots, tokens=tokens, params=params, out=call.out,
                intermediates=call.intermediates, rows=call.rows, parents=call.parents,
            )  # fmt: skip
        return Parts(
            pool=call.windows, slots=call.slots, tokens=tokens, params=params, write_slots=call.write_slots,
            out=call.out, cu_seqlens=call.cu_seqlens, seq_lens_host=call.seq_lens_host, fresh=call.fresh,
        )  # fmt: skip

    def out_terms(self, oracle: Any, phase: Phase, parts: Parts) -> None:
        """None: every channel sums terms of its own, and the smallest case has eight."""
