"""Recording a dispatcher's calls, and judging the recordings, on calls whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine_parity
from engine_extras import bring_extras
from engine_recorder import Recorder
from engine_recording import recordings
from qwen35.container import adapter
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, LogGates, RawGates, VerifyCall

H, HV, K, V, N = 2, 4, 8, 6, 7
#: Sequences of the recorded extend; slot 0 is SGLang's own, the last row a padding one.
LENGTHS, SLOTS = (3, 5), (4, 2)
#: Draft tokens of a recorded verify; SGLang leaves the root's parent undefined.
DRAFT, UNDEFINED = 3, 77
TREES = [[UNDEFINED, 0, 0], [UNDEFINED, 0, 1], [UNDEFINED, 0, 1]]


class Layer:
    """One layer of an engine that computes with the float32 reference, through the recorder."""

    def __init__(self, recorder: Recorder, number: int, source: torch.Generator) -> None:
        self.recorder, self.source = recorder, source
        self.rule = adapter("gated_delta_rule", "reference", device="cpu")
        self.states = torch.randn(N, HV, V, K, generator=source)
        self.layer = SimpleNamespace(layer_id=number, A_log=self.draw(HV), dt_bias=self.draw(HV))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source)

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.draw(count, 2 * H * K + HV * V), self.draw(count, HV), self.draw(count, HV)

    def extend(self, lengths: tuple[int, ...], slots: tuple[int, ...]) -> None:
        packed, a, b = self.tokens(sum(lengths))
        q, k, v = (x[None] for x in split(packed))
        g = -self.layer.A_log.exp() * torch.nn.functional.softplus(a + self.layer.dt_bias)
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)

        def kernel(_: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
                   cache_indices: Tensor, query_start_loc: Tensor) -> tuple[Tensor, None, None]:  # fmt: skip
            call = ExtendCall(q=q[0], k=k[0], v=v[0], gates=LogGates(g=g[0], beta=beta[0]), states=ssm_states,
                              slots=cache_indices, cu_seqlens=query_start_loc)  # fmt: skip
            return self.rule.extend(call).out[None], None, None

        self.inside(a, b, lambda: self.recorder.around_extend(
            kernel, None, q=q, k=k, v=v, g=g[None], beta=b.sigmoid()[None], ssm_states=self.states,
            cache_indices=torch.tensor(slots, dtype=torch.int32), query_start_loc=offsets,
        ))  # fmt: skip

    def decode(self, slots: tuple[int, ...]) -> None:
        packed, a, b = self.tokens(len(slots))

        def kernel(_: Any, mixed: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
            q, k, v = split(mixed)
            gates = RawGates(a=a, b=b, A_log=self.layer.A_log, dt_bias=self.layer.dt_bias)
            out = self.rule.decode(DecodeCall(q=q, k=k, v=v, gates=gates, states=given["ssm_states"],
                                              slots=given["cache_indices"]))  # fmt: skip
            mixed.fill_(torch.nan)  # a kernel may use its input as scratch
            return out[None]

        packed_gates = torch.cat([b, a], dim=-1)  # a decode's layer gives both, for its dispatcher to take apart
        self.inside(packed_gates, packed_gates, lambda: self.recorder.around_packed(
            kernel, None, packed, a, b, num_v_heads=HV, head_v_dim=V, ssm_states=self.states,
            cache_indices=torch.tensor(slots, dtype=torch.int32),
        ))  # fmt: skip

    def verify(self, slots: tuple[int, ...], parents: list[list[int]] | None) -> None:
        rows, given_gates = len(slots), {"A_log": self.layer.A_log, "dt_bias": self.layer.dt_bias}
        packed, a, b = self.tokens(rows * DRAFT)
        q, k, v = (x[None] for x in split(packed))
        buffer = torch.full((N, DRAFT + 1, HV, V, K), torch.nan)

        def kernel(_: Any, *, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, ssm_states: Tensor,
                   cache_indices: Tensor, **given: Any) -> Tensor:  # fmt: skip
            q, k, v = (x[0].unflatten(0, (rows, DRAFT)) for x in (q, k, v))
            gates = RawGates(a=a.view(rows, DRAFT, HV), b=b.view(rows, DRAFT, HV), **given_gates)
            links = given["retrieve_parent_token"]
            tree = None if links is None else torch.where(torch.arange(DRAFT) == 0, -1, links).to(torch.int32)
            call = VerifyCall(q=q, k=k, v=v, gates=gates, states=ssm_states, slots=cache_indices, parents=tree,
                              intermediates=given["intermediate_states_buffer"][:, :DRAFT],
                              rows=given["intermediate_state_indices"])  # fmt: skip
            return self.rule.verify(call).flatten(0, 1)[None]

        self.inside(a, b, lambda: self.recorder.around_verify(
            kernel, None, q=q, k=k, v=v, a=a, b=b, **given_gates, ssm_states=self.states,
            cache_indices=torch.tensor(slots, dtype=torch.int32), cache_steps=DRAFT,
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32) * DRAFT, intermediate_states_buffer=buffer,
            intermediate_state_indices=torch.randperm(N, generator=self.source)[:rows].to(torch.int32),
            retrieve_parent_token=None if parents is None else torch.tensor(parents),
        ))  # fmt: skip

    def inside(self, a: Tensor, b: Tensor, call: Any) -> None:
        """As RadixLinearAttention.forward calls its backend."""
        self.recorder.around_layer(lambda *_: call(), self.layer, None, torch.empty(0), a, b)


def split(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = packed.split([H * K, H * K, HV * V], dim=-1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def recorded(folder: Path, seed: int, calls: int = 2) -> None:
    source = torch.Generator().manual_seed(seed)
    recorder = Recorder(folder, calls)
    for number in (1, 5):
        layer = Layer(recorder, number, source)
        layer.decode((0, -1, -1))  # warm-up
        layer.extend(LENGTHS, SLOTS)
        for _ in range(3):
            layer.decode((*SLOTS, -1))
        layer.verify((0, -1, -1), None)  # warm-up
        for parents in (None, TREES):
            layer.verify((*SLOTS, -1), parents)


def test_the_first_real_calls_of_each_layer_and_phase_are_recorded(tmp_path: Path, seed: int) -> None:
    recorded(tmp_path, seed)
    found = [(one.layer, one.phase, one.number, one.tokens) for one in recordings(tmp_path)]
    per_layer = [("decode", 0, 3), ("decode", 1, 3), ("extend", 0, sum(LENGTHS))]
    per_layer += [("verify", i, len(SLOTS) * DRAFT) for i in (0, 1)]
    assert found == [(layer, *rest) for layer in (1, 5) for rest in per_layer]


def test_recorded_calls_repeat_what_was_served(tmp_path: Path, seed: int) -> None:
    recorded(tmp_path, seed)
    rule = adapter("gated_delta_rule", "reference", device="cpu")
    for one in recordings(tmp_path):
        out, states = engine_parity.run(rule, one, "cpu")
        real = out[: len(SLOTS)] if one.phase == "decode" else out
        torch.testing.assert_close(real, one.tensors["out"][: real.shape[0]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states, one.tensors["after"], rtol=1e-5, atol=1e-5)
        if one.phase != "verify":  # which leaves the pool alone
            assert not torch.equal(one.tensors["before"], one.tensors["after"]), "the pool was recorded before the call"


def test_a_right_adapter_is_near_the_oracle_and_a_wrong_one_is_not(tmp_path: Path, seed: int) -> None:
    bring_extras(tmp_path / "extras")
    recorded(tmp_path / "one", seed)
    recorded(tmp_path / "other", seed + 1)
    document = tmp_path / "parity.json"
    folders = [str(tmp_path / "one"), str(tmp_path / "other")]
    engine_parity.main([*folders, "--adapters", "reference,wrong,nobody", "--device", "cpu", "--out", str(document)])
    said = json.loads(document.read_text())
    assert set(said) >= {"device", "versions", "created", "command"}
    assert list(said["refused"]) == ["nobody"]
    by = {(row["phase"], row["layer"], row["who"]): row for row in said["error"]}
    for phase in ("decode", "extend", "verify"):
        for layer in (1, 5):
            for who in ("served", "reference"):
                assert by[phase, layer, who]["out"]["max"] < 1e-5, (phase, layer, who)
                assert by[phase, layer, who]["states"]["max"] < 1e-5, (phase, layer, who)
            assert by[phase, layer, "wrong"]["out"]["median"] == pytest.approx(0.25, rel=1e-3)
    assert by["extend", 1, engine_parity.ROUNDED]["out"]["max"] < 1e-5, "these gates were not rounded"
    assert [(row["phase"], row["layer"]) for row in said["drift"]] == [
        (phase, layer) for phase in ("decode", "extend", "verify") for layer in (1, 5)
    ]
    assert all(row["out"]["median"] > 0.1 for row in said["drift"]), "two engines with nothing in common"


def test_an_engine_does_not_drift_from_itself(tmp_path: Path, seed: int) -> None:
    recorded(tmp_path, seed)
    found = recordings(tmp_path)
    assert all(row[what]["max"] == 0.0 for row in engine_parity.drift(found, found) for what in ("v", "out", "after"))


def test_an_empty_folder_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--record and without graphs"):
        recordings(tmp_path)
