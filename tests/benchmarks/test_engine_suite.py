"""The driver records what fails and goes on; its documents say how engines compare."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_suite
from engine_compare import document
from engine_model import continued, judged
from engine_suites import EAGER, FLASHINFER, MIXED, MODELS, SUITES, TRITON, Engine, Suite


def result(tag: str, logprobs: list[float], ids: list[int], **more: Any) -> dict[str, Any]:
    """An engine's result, as sglang_engine.py writes it."""
    return {
        "tag": tag, "created": "2026-01-01", "device": "CPU", "versions": {}, "prompt_logprobs": [logprobs],
        "prompt_logprobs_batch": [logprobs], "output_ids": [ids], "settings": [], "engine": {"port": tag, "dtype": "x"},
        "counters": {}, **more,
    }  # fmt: skip


def chosen(*values: float) -> dict[str, Any]:
    """Log-probabilities of a result's ids."""
    return {"output_logprobs": [list(values)]}


@pytest.mark.parametrize("name", SUITES)
def test_every_document_names_engines_of_its_suite_and_every_model_can_be_made(name: str) -> None:
    suite = SUITES[name]
    names = {engine.name for engine in suite.engines} | ({"truth"} if suite.truth else set())
    assert {member for members in suite.documents.values() for member in members} <= names
    assert {engine.model for engine in suite.engines} <= set(MODELS)
    assert len(names) == len(suite.engines) + suite.truth


@pytest.mark.parametrize("name", SUITES)
def test_commands_are_ones_that_the_engine_script_takes(name: str, tmp_path: Path) -> None:
    import sglang_engine

    places = engine_suite.Places(name, tmp_path, tmp_path)
    for step in engine_suite.engine_steps(places, SUITES[name].engines, ["0"], 31_000):
        known = sglang_engine.parser().parse_args(step.command[2:])
        assert known.model.startswith(str(tmp_path))
        assert not any("{" in word for word in step.command)


def test_a_step_that_fails_or_is_late_is_recorded_with_its_log(tmp_path: Path) -> None:
    def step(code: str, limit: float = 20.0) -> engine_suite.Step:
        return engine_suite.Step("one", (sys.executable, "-c", code), tmp_path / "log", limit)

    assert engine_suite.run_step(step("pass")) is None
    failed = engine_suite.run_step(step("raise SystemExit('no such kernel')"))
    assert failed is not None
    assert failed["why"] == "exit status 1"
    assert failed["log"] == ["no such kernel"]
    began = time.monotonic()
    late = engine_suite.run_step(step("import time; time.sleep(60)", limit=0.5))
    assert late is not None
    assert "longer than" in late["why"]
    assert time.monotonic() - began < 20
    spent = engine_suite.run_step(step("pass"), deadline=time.monotonic())
    assert spent is not None
    assert spent["why"] == "the budget was spent"


def test_documents_name_what_is_missing_and_what_failed(tmp_path: Path) -> None:
    suite = Suite(engines=(Engine(name="a"), Engine(name="b"), Engine(name="c")), documents={"all": ("a", "b", "c")})
    places = engine_suite.Places("made_up", tmp_path, tmp_path)
    for tag, value in (("a", -1.0), ("b", -1.5)):
        places.result(tag).write_text(json.dumps(result(tag, [value], [1, 2])))
    engine_suite.write_documents(places, suite, {"b", "c"}, [{"name": "c", "why": "exit status 1"}])
    said = json.loads((tmp_path / "engine_all.json").read_text())
    assert said["missing"] == ["c"]
    assert said["failures"][0]["name"] == "c"
    assert [row["prompt_logprobs"]["max"] for row in said["rows"]] == [0.0, 0.5]
    assert said["engine"] == {"dtype": "x"}, "arguments that all share stand apart"


def test_engines_that_were_not_asked_for_are_not_missing(tmp_path: Path) -> None:
    suite = Suite(
        engines=(Engine(name="a"), Engine(name="b"), Engine(name="c")),
        documents={"all": ("a", "b", "c"), "some": ("c", "a"), "failed": ("b", "a")},
    )
    places = engine_suite.Places("made_up", tmp_path, tmp_path)
    places.result("a").write_text(json.dumps(result("a", [-1.0], [1, 2])))
    engine_suite.write_documents(places, suite, {"a", "b"}, [])
    said = json.loads((tmp_path / "engine_all.json").read_text())
    assert (said["missing"], [row["tag"] for row in said["rows"]]) == (["b"], ["a"])
    assert json.loads((tmp_path / "engine_failed.json").read_text())["missing"] == ["b"]
    assert not (tmp_path / "engine_some.json").exists(), "its first engine has no result and was not asked for"


def test_only_asks_for_the_engines_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine_suite.main(
        ["refresh", "--out", str(tmp_path), "--work", str(tmp_path), "--budget", "0", "--only", "triton_cold"]
    )
    said = json.loads((tmp_path / "engine_refresh_triton.json").read_text())
    assert said["missing"] == ["triton_cold"]
    assert {failure["why"] for failure in said["failures"]} == {"the budget was spent"}
    assert not (tmp_path / "engine_refresh_flashinfer.json").exists()
    assert "the budget was spent" in capsys.readouterr().out


def test_only_the_measures_that_are_named_are_taken() -> None:
    assert [measure.name for measure in engine_suite.measures_of("8192,8")] == [
        "decode tokens/s, batch 8", "prefill tokens/s, 8192 tokens",
    ]  # fmt: skip
    with pytest.raises(argparse.ArgumentTypeError, match="no measure of 7: of 1, 8, 64, 128, 8192"):
        engine_suite.measures_of("8,7")


def test_an_update_has_an_engine_that_does_not_notice_it() -> None:
    engines = {engine.name: engine for engine in SUITES["refresh"].engines}
    cold, updated, forgetful = (engines[name] for name in SUITES["refresh"].documents["refresh_flashinfer"])
    assert (cold.model, updated.model, forgetful.model) == ("other", "small", "small")
    assert set(updated.flags) < set(forgetful.flags), "loaded as the other is, by an adapter of the benchmark's"


def test_the_suite_of_logprobs_holds_both_of_sglangs_own_kernels() -> None:
    assert differing("small", "off", "off_flashinfer") == {
        f"linear_attn_{phase}_backend": ["triton", "flashinfer"] for phase in ("prefill", "decode")
    }


def test_outputs_are_compared_as_long_as_both_chose_the_same() -> None:
    first = result("a", [-1.0], [7, 8, 9], **chosen(-0.5, -0.25, -4.0))
    other = result("b", [-1.0], [7, 8, 5], **chosen(-0.5, -0.75, -1.0))
    apart = result("c", [-1.0], [6, 8, 9], **chosen(-0.5, -0.25, -4.0))
    short, silent = result("d", [-1.0], [7, 8, 9], **chosen(-0.5)), result("e", [-1.0], [7, 8, 9])
    whole, two, *none = document([first, other, apart, short, silent])["rows"]
    assert whole["output_logprobs"] == {"mean": 0.0, "max": 0.0, "tokens": 3}
    assert two["output_logprobs"] == {"mean": 0.25, "max": 0.5, "tokens": 2}, "the third ids differ"
    assert not any("output_logprobs" in row for row in none)


def by_place(ids: list[int]) -> torch.Tensor:
    """A log-probability of -(place + id / 8) for every id, so that each value says where it was taken."""
    return -(torch.arange(len(ids))[:, None] + torch.arange(8) / 8)


def test_what_an_engine_decoded_is_judged_on_its_own_ids(tmp_path: Path) -> None:
    truth = judged(by_place, [[1, 2, 3], [5]], [[4, 0], [7, 6]])
    assert truth == [[-2.5, -3.0], [-0.875, -1.75]]
    run = result("a", [-1.0], [4, 0]) | {
        "output_ids": [[4, 0], [7, 6]], "output_logprobs": [[-9.0, -3.25], [-9.0, -1.0]],
        "output_logprobs_truth": truth,
    }  # fmt: skip
    (row,) = document([run])["rows"]
    assert row["decoded_from_truth"] == {"mean": 0.5, "max": 0.75, "tokens": 2}, "the first id of each is extend's"
    (short,) = document([run | {"output_logprobs": [[-9.0], [-9.0, -1.0]]}])["rows"]
    assert short["decoded_from_truth"] == {"mean": 0.75, "max": 0.75, "tokens": 1}
    (silent,) = document([result("a", [-1.0], [4, 0])])["rows"]
    assert "decoded_from_truth" not in silent


def test_suites_of_the_small_model_have_transformers_judge_every_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suite in ("small", "spec", "fusion"):
        engine_suite.main([suite, "--out", str(tmp_path), "--work", str(tmp_path), "--gpus", "2", "--list"])
        last = capsys.readouterr().out.splitlines()[-1].split()
        at = last.index("judge")
        assert last[at + 1] == str(tmp_path / "small")
        assert last[at + 2 :] == [str(tmp_path / f"{suite}-{engine.name}.json") for engine in SUITES[suite].engines]


def test_transformers_goes_on_greedily_and_has_one_log_probability_an_id() -> None:
    def logprobs(ids: list[int]) -> torch.Tensor:
        rows = torch.full((len(ids), 5), -9.0)
        for place, token in enumerate(ids):
            rows[place, (token + 1) % 5] = -0.125 * (place + 1)
        return rows

    found = continued(logprobs, [[0, 1, 3]], 3)
    assert found == {
        "prompt_logprobs": [[-0.125, -9.0]], "output_ids": [[4, 0, 1]], "output_logprobs": [[-0.375, -0.5, -0.625]],
    }  # fmt: skip


def test_a_result_says_how_many_rounds_its_figures_are_of(tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    one.write_text(json.dumps(result("one", [-1.0], [1])))
    turns = engine_suite.Turns([], tmp_path / "socket", time.monotonic())
    turns.rounds, turns.samples = {"one": {"decode": 3, "prefill": 0}}, {"one": {"decode": [1.0, 4.0, 2.0]}}
    engine_suite.record_turns(one, turns, "one", 15)
    said = json.loads(one.read_text())
    assert said["bench"] == {"decode": 2.0}
    (row,) = document([said])["rows"]
    assert row["rounds"] == {"asked": 15, "made": {"decode": 3, "prefill": 0}}


def differing(suite: str, *names: str) -> dict[str, list[Any]]:
    """SGLang's arguments that two engines do not share, the port apart."""
    import sglang_engine

    places = engine_suite.Places(suite, Path("out"), Path("work"))
    engines = [next(engine for engine in SUITES[suite].engines if engine.name == name) for name in names]
    asked = [
        sglang_engine.engine_arguments(sglang_engine.parser().parse_args(step.command[2:]))
        for step in engine_suite.engine_steps(places, engines, ["0"], 31_000)
    ]
    found = {name: [args.get(name) for args in asked] for name in set().union(*asked)}
    return {name: values for name, values in found.items() if values[0] != values[1]}


def test_every_kernel_choice_is_compared_with_itself() -> None:
    def engines(suite: str, document: str) -> list[Engine]:
        of = {engine.name: engine for engine in SUITES[suite].engines}
        return [of[name] for name in SUITES[suite].documents[document] if name != "truth"]

    small = engines("small", "small_eager")
    assert {engine.name for engine in small} <= {engine.name for engine in engines("small", "truth")}
    assert {engine.settings for engine in small if engine.engine == EAGER} == {(), TRITON, FLASHINFER, MIXED}
    first, *drafts = engines("spec", "spec_triton")
    assert (first.plugin, first.settings, first.engine) == ("on", TRITON, ())
    assert all(set(TRITON) < set(engine.settings) and engine.engine for engine in drafts)
    for name, settings in (("triton", TRITON), ("flashinfer", FLASHINFER)):
        assert {engine.settings for engine in engines("radix", f"radix_{name}")} == {settings}
        assert differing("radix", f"{name}_no_cache", f"{name}_cache") == {"disable_radix_cache": [True, False]}
    assert differing("radix", "off_no_buffer", "triton_no_buffer") == {}


def test_defaults_are_compared_with_prefill_graphs_too() -> None:
    pair = SUITES["defaults"].documents["defaults_prefill_graphs"]
    of = {engine.name: engine.plugin for engine in SUITES["defaults"].engines}
    assert [of[name] for name in pair] == ["absent", "on"]
    assert differing("defaults", *pair) == {}
    assert differing("defaults", "defaults", pair[1]) == {"disable_prefill_cuda_graph": [True, False]}


def test_a_weight_update_is_compared_with_the_cold_engine() -> None:
    new = {"prompt_logprobs": [[-2.0]], "output_ids": [[7]]}
    cold, equal = result("cold", [-2.0], [7]), result("updated", [-1.0], [5], after_update=new)
    stale = result("stale", [-1.0], [5], after_update={"prompt_logprobs": [[-1.0]], "output_ids": [[5]]})
    _, first, second = document([cold, equal, stale])["rows"]
    assert first["after_update"]["equal_to_cold"] is True
    assert first["after_update"]["moved"]["max"] == 1.0
    assert second["after_update"]["equal_to_cold"] is False
    assert second["after_update"]["from_cold"]["max"] == 1.0


def test_divergences_and_unchanged_ids_of_a_shadowed_engine_are_said() -> None:
    counted = {"qwen35_shadow_divergences_total phase=decode what=out": 3.0, "qwen35_calls_total phase=decode": 9.0,
               "qwen35_shadow_divergences_total phase=extend what=out": 4.0}  # fmt: skip
    runs = [result("a", [-1.0], [1]), result("b", [-1.0], [1], settings=["gdn_shadow=wrong:1"], counters=counted)]
    plain, shadowed = document(runs)["rows"]
    assert shadowed["divergences"] == 7
    assert shadowed["same_ids"] is True
    assert "divergences" not in plain


def test_a_second_pass_is_compared_with_the_first_and_the_cache_is_counted() -> None:
    more = {"prompt_logprobs_second": [[-1.25]], "cached_tokens": {"first": [0, 64], "second": [128, 128]}}
    (row,) = document([result("a", [-1.0], [1], **more)])["rows"]
    assert row["second_pass"]["max"] == 0.25
    assert row["cached_tokens"] == {"first": 64, "second": 256}


def test_a_suite_that_needs_two_gpus_says_so() -> None:
    with pytest.raises(SystemExit, match="requires 2 GPUs"):
        engine_suite.gpu_slots(SUITES["fusion"], ["0"])
    assert engine_suite.gpu_slots(SUITES["fusion"], ["0", "1"]) == ["0,1"]
    assert engine_suite.gpu_slots(SUITES["radix"], ["0", "1"]) == ["0", "1"]
    assert engine_suite.gpu_slots(SUITES["throughput"], ["0", "1"]) == ["0"], "timed engines run alone"
