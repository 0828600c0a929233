"""Generation: options, stop tokens, chunks, sampling, text, and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import build, load

import qwen35
from fakes import FakeGatedDeltaRule
from qwen35.domain.errors import CheckpointError, ConfigurationError, Qwen35Error, ValueRangeError
from qwen35.model import GenerateOptions, Model, Sampling, generate, load_model
from qwen35.model.generate import plan_chunks
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall
from word_tokenizer import write_tokenizer

PROMPTS = [[5, 9, 200, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
QUIET = GenerateOptions(max_new_tokens=6, quiet=True)
WORDS = {"<unk>": 0, "hello": 1, "world": 2, "again": 3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    path = tmp_path_factory.mktemp("dense")
    build("dense", seed).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load(directory)


def test_each_prompt_is_continued_as_it_would_be_alone(model: Model, seed: int) -> None:
    together = generate(model, PROMPTS, QUIET)
    for prompt, result in zip(PROMPTS, together, strict=True):
        (alone,) = generate(model, [prompt], QUIET)
        assert result.prompt == tuple(prompt)
        assert result.tokens == alone.tokens, f"seed {seed}"
        assert len(result.tokens) == 6
        assert result.finish == "length"
        assert result.text is None
        assert result.logits is None


def test_logits_are_those_that_the_tokens_were_chosen_from(model: Model, seed: int) -> None:
    for result in generate(model, PROMPTS, replace(QUIET, logits=True)):
        assert result.logits is not None
        assert result.logits.shape == (6, model.config.vocabulary)
        assert result.logits.argmax(-1).tolist() == list(result.tokens), f"seed {seed}"


@pytest.mark.parametrize("budget", [1, 3, 5, 13])
def test_prefill_in_passes_of_any_size_gives_the_same_tokens(model: Model, budget: int, seed: int) -> None:
    whole = [r.tokens for r in generate(model, PROMPTS, QUIET)]
    parts = [r.tokens for r in generate(model, PROMPTS, replace(QUIET, extend_tokens=budget))]
    assert parts == whole, f"seed {seed}"


def test_chunks_cover_every_prompt_once_in_passes_within_the_budget() -> None:
    assert list(plan_chunks([4, 1, 9], 5)) == [[(0, 0, 4), (1, 0, 1)], [(2, 0, 5)], [(2, 5, 9)]]
    assert list(plan_chunks([4, 2], 3)) == [[(0, 0, 3)], [(0, 3, 4), (1, 0, 2)]]
    assert list(plan_chunks([2], 100)) == [[(0, 0, 2)]]
    assert list(plan_chunks([], 5)) == []


def test_a_stop_token_ends_its_own_request_only(model: Model, seed: int) -> None:
    free = generate(model, PROMPTS, QUIET)
    stop = free[0].tokens[2]
    stopped = generate(model, PROMPTS, replace(QUIET, stop_tokens=frozenset({stop})))
    for before, after in zip(free, stopped, strict=True):
        length = before.tokens.index(stop) + 1 if stop in before.tokens else 6
        assert after.tokens == before.tokens[:length], f"seed {seed}"
        assert after.finish == ("stop" if stop in before.tokens else "length")


def test_the_checkpoints_stop_tokens_are_the_default(directory: Path, model: Model, tmp_path: Path) -> None:
    (free,) = generate(model, [PROMPTS[0]], QUIET)
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [free.tokens[1], 210]}))
    stopping = load(tmp_path)
    assert generate(stopping, [PROMPTS[0]], QUIET)[0].tokens == free.tokens[: free.tokens.index(free.tokens[1]) + 1]
    unstopped = replace(QUIET, stop_tokens=frozenset())
    assert generate(stopping, [PROMPTS[0]], unstopped)[0].tokens == free.tokens


def test_a_seed_fixes_the_draws_of_each_request_whatever_else_runs(model: Model, seed: int) -> None:
    options = replace(QUIET, sampling=Sampling(temperature=1.5, top_p=0.95, top_k=50, seed=seed))
    first = [r.tokens for r in generate(model, PROMPTS, options)]
    assert [r.tokens for r in generate(model, PROMPTS, options)] == first, f"seed {seed}"
    assert generate(model, PROMPTS[:1], options)[0].tokens == first[0], f"seed {seed}"
    other = replace(options, sampling=replace(options.sampling, seed=seed + 1000))
    assert [r.tokens for r in generate(model, PROMPTS, other)] != first, f"seed {seed}"
    twins = generate(model, [PROMPTS[2]] * 2, replace(options, sampling=Sampling(temperature=3.0, seed=seed)))
    assert twins[0].tokens != twins[1].tokens, f"seed {seed}"


def test_no_prompts_give_nothing_and_one_token_is_one(model: Model) -> None:
    assert generate(model, [], QUIET) == []
    assert len(generate(model, [[1]], replace(QUIET, max_new_tokens=1))[0].tokens) == 1


def test_text_goes_in_and_comes_out_where_there_is_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_tokenizer(tmp_path, WORDS, "<unk>")
    model = load(tmp_path)
    assert model.tokenizer is not None
    assert model.tokenizer.decode([1, 2]) == "hello world"
    text, ids = generate(model, ["hello again", [1, 3]], QUIET)
    assert text.prompt == (1, 3)
    assert text.tokens == ids.tokens
    assert isinstance(text.text, str)
    with pytest.raises(ValueRangeError, match=r"prompts\[0\] must hold at least one token"):
        generate(model, [""], QUIET)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("prompts", "error", "match"),
    [
        ([[1], []], ValueRangeError, r"prompts\[1\] must hold at least one token"),
        ([[1, 211]], ValueRangeError, r"prompts\[0\]\[1\] must be a token id in 0\.\.210, got 211"),
        ([[-1]], ValueRangeError, r"got -1"),
        ([[1.5]], ValueRangeError, r"got 1\.5"),
        (["hello"], ConfigurationError, r"prompts\[0\] is text, but the checkpoint has no tokenizer\.json"),
        ([[1] * 510], ValueRangeError, r"must not exceed the model's 512 positions"),
    ],
)
def test_bad_prompts_are_refused(model: Model, prompts: list[object], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        generate(model, prompts, QUIET)  # type: ignore[arg-type]


class Anything:
    """No model, no options."""


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompts": "hello"}, r"prompts must be a list of prompts, got 'hello'; give one prompt as \[prompt\]"),
        ({"prompts": 5}, "prompts must be a list of prompts, got 5"),
        ({"prompts": None}, "prompts must be a list of prompts, got None"),
        ({"prompts": [1, 2, 3]}, r"prompts\[0\] must be text or a list of token ids, got 1; prompts is a list of"),
        ({"prompts": [[1], b"hello"]}, r"prompts\[1\] must be text or a list of token ids, got b'hello'"),
        ({"model": Anything()}, "model must be a Model, as load_model gives it, got Anything"),
        ({"options": {"max_new_tokens": 3}}, "options must be GenerateOptions or None, got {'max_new_tokens': 3}"),
    ],
)
def test_what_is_no_list_of_prompts_no_model_or_no_options_is_refused_by_name(
    model: Model, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        generate(**{"model": model, "prompts": PROMPTS, "options": QUIET, **change})


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_and_tokens_reach_the_kernels_in_the_dtypes_asked_for(
    directory: Path, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    rule = FakeGatedDeltaRule(0.5)
    model = load_model(
        directory, gated_delta_rule=rule, dtype=dtype, quiet=True,
        short_convolution=qwen35.adapter("short_convolution", "reference", device="cpu"),
    )  # fmt: skip
    generate(model, PROMPTS, replace(QUIET, state_dtype=state_dtype))
    assert {(plan.state_dtype, plan.token_dtype) for plan in rule.plans} == {(state_dtype, dtype)}
    assert {type(call) for call in rule.calls} == {ExtendCall, DecodeCall}
    for call in rule.calls:
        assert isinstance(call, ExtendCall | DecodeCall)
        assert (call.states.dtype, call.q.dtype, call.v.dtype) == (state_dtype, dtype, dtype)


def test_a_prompt_may_fill_the_models_positions_to_the_last(model: Model) -> None:
    assert model.config.max_positions == 512
    (result,) = generate(model, [[1] * 511], replace(QUIET, max_new_tokens=1))
    assert len(result.tokens) == 1
    with pytest.raises(ValueRangeError, match=r"must not exceed the model's 512 positions"):
        generate(model, [[1] * 511], replace(QUIET, max_new_tokens=2))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0.0),
        ("top_p", 1.1), ("top_p", float("nan")), ("top_k", -1), ("seed", -1),
    ],
)  # fmt: skip
def test_bad_sampling_options_are_refused(option: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} must be .*got {value}"):
        Sampling(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("temperature", "hot", "a number"), ("temperature", True, "a number"), ("temperature", None, "a number"),
        ("top_p", "1", "a number"), ("top_p", 1j, "a number"), ("top_k", 2.5, "an int"), ("top_k", True, "an int"),
        ("seed", 1.5, "an int"), ("seed", "1", "an int"), ("seed", None, "an int"),
    ],
)  # fmt: skip
def test_sampling_options_of_another_type_are_refused_by_name(option: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"{option} must be {kind}, got {value!r}")):
        Sampling(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("sampling", None, "a Sampling"), ("sampling", {"top_k": 3}, "a Sampling"),
        ("stop_tokens", 5, "a set of token ids or None"), ("stop_tokens", [5], "a set of token ids or None"),
        ("stop_tokens", frozenset({"5"}), "a set of token ids or None"), ("state_dtype", "bfloat16", "a dtype"),
        ("logits", 1, "a bool"), ("quiet", "no", "a bool"),
    ],
)  # fmt: skip
def test_generation_options_of_another_type_are_refused_by_name(option: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"{option} must be {kind}, got {value!r}")):
        GenerateOptions(**{option: value})


@pytest.mark.parametrize("option", ["max_new_tokens", "extend_tokens"])
@pytest.mark.parametrize("value", [-1, 0, 2.0, True, "3"])
def test_bad_generation_options_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} must be an int of at least 1, got {value!r}"):
        GenerateOptions(**{option: value})


def test_logits_that_are_not_finite_are_an_error_not_a_token(directory: Path) -> None:
    model = load_model(
        directory, gated_delta_rule=qwen35.adapter("gated_delta_rule", "reference"),
        short_convolution=qwen35.adapter("short_convolution", "reference"), dtype=torch.float32, quiet=True,
    )  # fmt: skip
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(Qwen35Error, match=r"prompts\[0\]: the logits of step 0 are not finite"):
            generate(model, PROMPTS, replace(QUIET, sampling=sampling))


def test_progress_goes_to_standard_error_unless_quiet(
    directory: Path, model: Model, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes standard error for a terminal
    load(directory)
    generate(model, PROMPTS, QUIET)
    assert capfd.readouterr() == ("", "")
    generate(model, PROMPTS, replace(QUIET, quiet=False))
    load_model(
        directory, gated_delta_rule=model.gated_delta_rule, short_convolution=model.short_convolution,
        dtype=torch.float32,
    )  # fmt: skip
    out, err = capfd.readouterr()
    assert out == "", "progress must not mix with the output"
    assert all(word in err for word in ("Prefilling", "Decoding", "Loading weights"))
