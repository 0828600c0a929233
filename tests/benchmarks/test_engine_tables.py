"""Documents of engines as tables: every figure in its engine's row, no empty column, what is missing named."""

from __future__ import annotations

from typing import Any

from engine_tables import engines_table, parity_table

USED = {"device": "H200", "created": "2026-01-02T03:04", "versions": {"sglang": "0.5.20", "torch": "2.11.0"}}


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]


def test_engines_are_rows_and_only_columns_that_hold_something_are_there() -> None:
    same: dict[str, Any] = {
        "tag": "off",
        "prompt_logprobs": {"mean": 0.0, "max": 0.0},
        "equal_leading_ids": [4],
        "same_ids": True,
    }
    ratio = {"decode tokens/s, batch 8": {"median": 1.25, "low": 1.2, "high": 1.3}}
    other = {
        "tag": "triton", "prompt_logprobs": {"mean": 0.02, "max": 0.5}, "equal_leading_ids": [4, 0], "same_ids": False,
        "bench": {"decode tokens/s, batch 8": 1.0}, "throughput_ratio": ratio, "counters": {
            "qwen35_calls_total adapter=triton mode=eager phase=decode": 2.0,
            "qwen35_calls_total adapter=triton mode=captured phase=decode": 3.0, "qwen35_refreshes_total": 9.0,
        },
    }  # fmt: skip
    table = engines_table({**USED, "against": "off", "rows": [same, other], "missing": ["mixed"]})
    heads, _, first, second = cells(table)
    assert [head.split(",")[0] for head in heads] == [
        "engine", "prompt log-probabilities from off's", "leading ids as there", "decode", "our calls counted",
    ]  # fmt: skip
    assert first == ["off", "0.0000 (0.000)", "all", "", ""]
    assert second == ["triton", "0.0200 (0.500)", "4, 0", "1.25 (1.20 to 1.30)", "triton decode 5"]
    assert "not in this run: mixed" in table


def test_the_devices_part_of_a_step_stands_beside_tokens_a_second() -> None:
    name = "decode tokens/s, batch 8"
    rows = [
        {
            "tag": tag, "bench": {name: 1.0}, "throughput_ratio": {name: {"median": 1.0, "low": 1.0, "high": 1.0}},
            "device_steps": {name: {"span_us": us} if us else {"replays": 0}, "eager": {"replays": 0}},
        } for tag, us in (("sglang", 1500.0), ("triton", 1200.0), ("no_graphs", None))
    ]  # fmt: skip
    heads, _, *engines = cells(engines_table({**USED, "against": "sglang", "rows": rows}))
    assert heads[1:] == ["decode, batch 8", "device's part of a decode, batch 8"]
    assert [row[2] for row in engines] == ["1500 us, 1.000", "1200 us, 1.250", ""]


def test_a_prefill_on_the_device_is_the_sum_of_its_kernels() -> None:
    decode, prefill = "decode tokens/s, batch 8", "prefill tokens/s, 128 tokens"
    same = {"median": 1.0, "low": 1.0, "high": 1.0}
    rows = [
        {
            "tag": tag, "throughput_ratio": {decode: same, prefill: same},
            "device_steps": {
                decode: {"replays": 24, "span_us": us, "kernels_us": 7.0},
                prefill: {"forwards": 8, "span_us": 9000.0, "kernels_us": us} if us else {"forwards": 0},
            },
        } for tag, us in (("sglang", 1500.0), ("triton", 1200.0))
    ]  # fmt: skip
    table = engines_table({**USED, "against": "sglang", "rows": rows})
    heads, _, _, triton = cells(table)
    assert heads[3:] == ["device's part of a decode, batch 8", "device's part of a prefill, 128 tokens"]
    assert triton[3:] == ["1200 us, 1.250", "1200 us, 1.250"]
    assert "of a prefill the sum of its kernels' times" in table
    untimed = [{name: value for name, value in row.items() if name != "throughput_ratio"} for row in rows]
    alone = engines_table({**USED, "against": "sglang", "rows": untimed})
    assert "Ratios" not in alone
    assert "of a prefill the sum of its kernels' times" in alone
    for common, own in (({"tp_size": 2}, {}), ({}, {"tp_size": 2})):
        several = [row | {"engine": own} for row in rows]
        heads, *_ = cells(engines_table({**USED, "against": "sglang", "engine": common, "rows": several}))
        assert heads[1:] == ["decode, batch 8", "prefill, 128 tokens"], "kernels that wait for the other rank"


def timed(tag: str, plugin: str, samples: list[float], **engine: Any) -> dict[str, Any]:
    samples_of = {"decode tokens/s, batch 8": samples, "prefill tokens/s, 128 tokens": samples[::-1]}
    return {"tag": tag, "plugin": plugin, "engine": engine, "samples": samples_of}


def test_both_ratios_are_shown_where_they_disagree() -> None:
    rows = [timed("sglang", "off", [1.0, 4.0, 2.0]), timed("triton", "on", [1.5, 1.6, 2.2])]
    table = engines_table({**USED, "against": "sglang", "rows": rows})
    _, _, first, triton, _ = cells(table)
    assert first[1:] == ["1.00", "1.00"]
    assert triton[1:] == ["1.10 (0.40 to 1.50), 0.80"] * 2
    assert "then that of the engines' own medians" in table


def test_a_ratio_stands_beside_how_far_one_engines_own_rounds_are_apart() -> None:
    rows = [timed("sglang", "off", [4.0, 2.0, 1.0, 10.0, 5.0]), timed("triton", "on", [4.0, 3.0, 2.0, 10.0, 6.0])]
    table = engines_table({**USED, "against": "sglang", "rows": rows})
    assert cells(table)[-1] == ["the first engine's own rounds: quartiles", "0.50 to 1.25", "0.50 to 1.25"]
    assert "nor where a ratio lies between the quartiles of one engine's own rounds" in table
    ratio = {"decode tokens/s, batch 8": {"median": 1.25, "low": 1.2, "high": 1.3}}
    without: list[dict[str, Any]] = [{"tag": tag, "throughput_ratio": ratio} for tag in ("sglang", "triton")]
    once = [timed("sglang", "off", [4.0]), timed("triton", "on", [4.0])]
    for rows in (without, once):
        assert "own rounds" not in engines_table({**USED, "against": "sglang", "rows": rows})


def test_the_caption_says_which_rounds_were_cut_off() -> None:
    rows = [timed("sglang", "off", [4.0, 2.0]), timed("triton", "on", [4.0, 3.0])]
    report = {**USED, "against": "sglang", "rows": rows}
    assert "cut off" not in engines_table(report), "older documents do not say what was asked for"
    decode, prefill = rows[0]["samples"]
    for row, made in zip(rows, (8, 7), strict=True):
        row["rounds"] = {"asked": 8, "made": {decode: made, prefill: 6}}
    assert "Rounds were cut off (decode, batch 8: 7 to 8 of 8; prefill, 128 tokens: 6 of 8)." in engines_table(report)
    for row in rows:
        row["rounds"]["made"] = {decode: 8, prefill: 8}
    assert "cut off" not in engines_table(report)
    none = {"tag": "sglang", "samples": {}, "rounds": {"asked": 8, "made": {decode: 0}}}
    assert "decode, batch 8: 0 of 8" in engines_table({**report, "rows": [none]})


def test_several_traces_of_the_device_show_how_far_they_are_apart() -> None:
    name = "decode tokens/s, batch 8"
    rows = [timed("sglang", "off", [4.0]), timed("triton", "on", [4.0])]
    for row, us in zip(rows, (1500.0, 1200.0), strict=True):
        row["device_steps"] = {name: {"span_us": us, "span_us_range": [us - 1.25, us + 3], "traces": 3}}
    table = engines_table({**USED, "against": "sglang", "rows": rows})
    assert [row[3] for row in cells(table)[2:]] == [
        "1500 us (1498.8 to 1503.0), 1.000", "1200 us (1198.8 to 1203.0), 1.250",
    ]  # fmt: skip
    assert "the median (lowest to highest) of several traces" in table
    for row in rows:
        row["device_steps"][name]["traces"] = 1
    once = engines_table({**USED, "against": "sglang", "rows": rows})
    assert "1200 us, 1.250" in once
    assert "several traces" not in once


def test_decoded_ids_and_batches_are_shown_where_they_were_compared() -> None:
    apart = {"mean": 0.25, "max": 0.5}
    row: dict[str, Any] = {"tag": "cache", "noise": apart, "output_logprobs": {**apart, "tokens": 12}}
    heads, _, shown = cells(engines_table({**USED, "against": "cache", "rows": [row]}))
    assert heads[1:] == ["log-probabilities of those ids, mean (largest) of how many"]
    assert shown[1:] == ["0.2500 (0.500) of 12"]
    radix = {"tag": "cache", "noise": apart, "second_pass": {"mean": 0.0, "max": 0.0}}
    heads, _, shown = cells(engines_table({**USED, "against": "cache", "rows": [radix]}))
    assert heads[1:] == ["a second pass, which hits the cache", "a batch of all, from one by one"]
    assert shown[1:] == ["0.0000 (0.000)", "0.2500 (0.500)"]


def test_ours_stands_against_sglangs_best_setting_of_each_measure() -> None:
    slow, fast = timed("a", "off", [1.0, 2.0, 3.0], port=1), timed("b", "absent", [2.0, 4.0, 2.0], port=2, kernels="fi")
    fast["samples"]["prefill tokens/s, 128 tokens"] = [1.0, 1.0, 9.0]
    rows = [slow, timed("ours", "on", [4.0, 2.0, 6.0], port=3), fast]
    _, _, *shown = cells(engines_table({**USED, "against": "a", "rows": rows}))
    best = ["SGLang's best setting, by its median", "that setting's own rounds: quartiles", "ours, against that"]
    assert [row[0] for row in shown[4:]] == best
    assert shown[4][1:] == ["a", "a"], "of two that are equal, the first"
    fast["samples"]["decode tokens/s, batch 8"] = [2.5, 4.0, 2.5]
    _, _, *shown = cells(engines_table({**USED, "against": "a", "rows": rows}))
    assert shown[4][1:] == ["b", "a"]
    assert shown[5][1:] == ["1.00 to 1.60", "0.50 to 1.50"], "of b, then of a"
    assert shown[6][1:] == ["1.60 (0.50 to 2.40), 1.60", "2.00 (1.00 to 4.00), 2.00"]


def test_one_setting_of_sglang_has_no_best() -> None:
    rows = [
        timed("absent", "absent", [1.0], port=1),
        timed("ours", "on", [2.0]),
        timed("again", "absent", [3.0], port=2),
    ]
    assert "best" not in engines_table({**USED, "against": "absent", "rows": rows})
    untimed: dict[str, Any] = {"tag": "truth", "prompt_logprobs": {"mean": 0.0, "max": 0.0}}
    several = [untimed, *(row | {"engine": {"kernels": row["tag"]}, "bench": {"decode": 1.0}} for row in rows)]
    assert "best" not in engines_table({**USED, "against": "truth", "rows": several}), "no ratio is shown there"


def test_parity_shows_errors_by_adapter_and_drift_by_layer() -> None:
    def figures(value: float) -> dict[str, float]:
        return {"median": value, "max": 2 * value}

    error = [
        {"phase": "extend", "layer": layer, "who": "triton", "calls": 2, "out": figures(at), "states": figures(at / 2)}
        for layer, at in ((0, 0.001), (1, 0.003))
    ]
    drift = [
        {"against": "recorded-fi", "phase": phase, "layer": layer, "v": figures(v), "out": figures(0.02)}
        for phase, layer, v in (("extend", 0, 0.0), ("extend", 1, 0.01), ("decode", 0, 0.9), ("decode", 1, 0.8))
    ]
    table = parity_table({**USED, "tokens": [3, 7], "error": error, "refused": {"fi": "no"}, "drift": drift})
    rows = cells(table)
    assert ["extend", "triton", "4", "2.0e-03, 6.0e-03", "1.0e-03, 3.0e-03"] in rows
    assert ["extend", "1", "1.0e-02, 2.0e-02"] in rows
    assert not any(row[:2] == ["decode", "1"] for row in rows), "those engines were given different tokens"
    assert "refused by fi: no" in table
