"""FlashInfer's own reference functions of the gated delta rule against our float64 oracle, on inputs like its tests'.

    git clone https://github.com/flashinfer-ai/flashinfer
    python benchmarks/oracle_against_flashinfer.py flashinfer --out results/oracle_flashinfer.json

Reads ``tests/gdn/reference_delta_rule.py`` of that checkout, which is plain torch in float32; needs no GPU. Draws as
its tests do: bfloat16 tokens of width 128 from a normal distribution, A_log, dt_bias and a of a tenth of it, scale 1;
for prefill normalised keys and uniform decays and betas. Exits with 1 past ``LIMIT``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import qwen35
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GatedDeltaRule, LogGates, RawGates, VerifyCall
from qwen35.testing import relative_error
from qwen35.testing.machine import versions

#: What sums of a few hundred float32 roundings may differ by; a wrong formula differs by a tenth or more.
LIMIT = 1e-5
WIDTH = 128
HEADS = ((1, 1), (4, 4), (2, 8), (16, 32))
LENGTHS = (64, 111, 192, 1)
BATCH, DRAFT = 4, 4


def main(
    checkout: Annotated[Path, typer.Argument(help="A checkout of FlashInfer.")],
    out: Annotated[Path, typer.Option(help="Where to write the document.")] = Path("oracle_flashinfer.json"),
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Compare, print, write."""
    source = checkout / "tests" / "gdn" / "reference_delta_rule.py"
    theirs = reference(source)
    ours = qwen35.adapter("gated_delta_rule", "reference64", device="cpu")
    torch.manual_seed(seed)
    rows = [
        {"function": function.__name__, "heads": heads, **{name: float(f"{e:.2e}") for name, e in errors.items()}}
        for heads in HEADS
        for function, errors in (
            (theirs.decode_delta_rule, decode(theirs, ours, *heads)),
            (theirs.verify_delta_rule, verify(theirs, ours, *heads)),
            (theirs.blockwise_delta_rule, prefill(theirs.blockwise_delta_rule, ours, *heads, block_size=64)),
            *([(theirs.delta_rule, prefill(theirs.delta_rule, ours, *heads))] if heads[0] == heads[1] else []),
        )
    ]
    for row in rows:
        typer.echo(json.dumps(row))
    document = {
        "kind": "oracle against FlashInfer", "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]), "versions": versions(),
        "reference_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "seed": seed, "limit": LIMIT, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    worst = max(value for row in rows for value in row.values() if isinstance(value, float))
    raise typer.Exit(int(worst > LIMIT))


def reference(path: Path) -> Any:
    """The module of FlashInfer's reference functions."""
    spec = importlib.util.spec_from_file_location("reference_delta_rule", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise typer.BadParameter(f"{path} is not there: the argument must be a checkout of FlashInfer")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(heads: int, value_heads: int, *leading: int) -> tuple[dict[str, Tensor], RawGates]:
    """Tokens and raw gates as FlashInfer's decode tests draw them."""
    tokens = {
        n: torch.randn(*leading, h, WIDTH).bfloat16() for n, h in (("q", heads), ("k", heads), ("v", value_heads))
    }
    a, b = (torch.randn(*leading, value_heads).bfloat16() for _ in range(2))
    A_log, dt_bias = (torch.randn(value_heads) * 0.1 for _ in range(2))
    return tokens, RawGates(a=a * 0.1, b=b, A_log=A_log, dt_bias=dt_bias)


def wide(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tokens.items()}


def as_float(tokens: dict[str, Tensor], gates: RawGates, states: Tensor) -> dict[str, Any]:
    """Their arguments; their states are [B, HV, K, V]."""
    return {
        **{name: tensor.float() for name, tensor in tokens.items()}, "state": states.transpose(-1, -2).contiguous(),
        "A_log": gates.A_log, "a": gates.a.float(), "dt_bias": gates.dt_bias, "b": gates.b.float(), "scale_factor": 1.0,
    }  # fmt: skip


def doubled(gates: RawGates) -> RawGates:
    return RawGates(a=gates.a.double(), b=gates.b.double(), A_log=gates.A_log.double(), dt_bias=gates.dt_bias.double())


def decode(theirs: Any, ours: GatedDeltaRule, heads: int, value_heads: int) -> dict[str, float]:
    tokens, gates = drawn(heads, value_heads, BATCH)
    states = torch.randn(BATCH, value_heads, WIDTH, WIDTH)
    out, after = theirs.decode_delta_rule(**as_float(tokens, gates, states))
    pool = states.double()
    want = ours.decode(
        DecodeCall(**wide(tokens), gates=doubled(gates), states=pool, slots=torch.arange(BATCH), scale=1.0)
    )
    return {"out": relative_error(out, want), "states": relative_error(after.transpose(-1, -2), pool)}


def verify(theirs: Any, ours: GatedDeltaRule, heads: int, value_heads: int) -> dict[str, float]:
    tokens, gates = drawn(heads, value_heads, BATCH, DRAFT)
    states = torch.randn(BATCH, value_heads, WIDTH, WIDTH)
    out, _, kept = theirs.verify_delta_rule(**as_float(tokens, gates, states), cache_intermediate_states=True)
    nodes = torch.zeros(BATCH, DRAFT, value_heads, WIDTH, WIDTH, dtype=torch.float64)
    want = ours.verify(
        VerifyCall(
            **wide(tokens), gates=doubled(gates), states=states.double(), slots=torch.arange(BATCH), scale=1.0,
            intermediates=nodes,
        )
    )  # fmt: skip
    return {"out": relative_error(out, want), "intermediates": relative_error(kept.transpose(-1, -2), nodes)}


def prefill(function: Any, ours: GatedDeltaRule, heads: int, value_heads: int, **options: int) -> dict[str, float]:
    """Their prefill takes q and k as they are; ours normalises, so both get normalised ones, ours twice."""
    total = sum(LENGTHS)
    tokens, _ = drawn(heads, value_heads, total)
    tokens |= {name: torch.nn.functional.normalize(tokens[name].float(), dim=-1) for name in ("q", "k")}
    alpha, beta = torch.rand(total, value_heads), torch.rand(total, value_heads)
    out, after = function(
        *(tokens[name].float() for name in ("q", "k", "v")), list(LENGTHS), alpha=alpha, beta=beta, scale_factor=1.0,
        **options,
    )[:2]  # fmt: skip
    pool = torch.zeros(len(LENGTHS), value_heads, WIDTH, WIDTH, dtype=torch.float64)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    want = ours.extend(
        ExtendCall(
            **wide(tokens), gates=LogGates(g=alpha.double().log(), beta=beta.double()), states=pool, scale=1.0,
            slots=torch.arange(len(LENGTHS)), cu_seqlens=ends,
        )
    ).out  # fmt: skip
    return {"out": relative_error(out, want), "states": relative_error(after.transpose(-1, -2), pool)}


if __name__ == "__main__":
    typer.run(main)
