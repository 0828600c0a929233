"""Prompts that share prefixes, asked one after another, once more, and all together: what a radix cache is for."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from engine_model import logprobs_of, prompts, vocabulary_of

#: Tokens of the shared prefixes, and of what follows them.
PREFIXES, TAILS = (640, 333), (9, 33, 64, 150)


def shared_prompts(vocabulary: int) -> list[tuple[int, list[int]]]:
    """Every tail after every prefix, prefixes in turn: where the tail begins, and the whole prompt."""
    first = prompts(vocabulary, PREFIXES, seed=3)
    tails = iter(prompts(vocabulary, TAILS * len(PREFIXES), seed=4))
    return [(len(prefix), prefix + next(tails)) for _ in TAILS for prefix in first]


def shared(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy ids and the log-probabilities of tails and outputs of two passes and one batch, and the tokens that the
    cache spared. A log-probability that is asked for must be computed, so only those of tails are."""
    asked = shared_prompts(vocabulary_of(args.model))
    greedy = {"temperature": 0.0, "max_new_tokens": args.new, "ignore_eos": True}

    def one(start: int, ids: list[int]) -> Any:
        return engine.generate(input_ids=ids, sampling_params=greedy, return_logprob=True, logprob_start_len=start)

    first, second = ([one(*prompt) for prompt in asked] for _ in range(2))
    starts, ids = [start for start, _ in asked], [prompt for _, prompt in asked]
    batch = engine.generate(input_ids=ids, sampling_params=greedy, return_logprob=True, logprob_start_len=starts)
    tails = partial(logprobs_of, which="input_token_logprobs")
    return {
        "prompt_logprobs": tails(first), "prompt_logprobs_second": tails(second),
        "prompt_logprobs_batch": tails(batch), "output_ids": [said["output_ids"] for said in first],
        "output_ids_second": [said["output_ids"] for said in second],
        "output_logprobs": logprobs_of(first, "output_token_logprobs"),
        "cached_tokens": {
            name: [said["meta_info"]["cached_tokens"] for said in outputs]
            for name, outputs in (("first", first), ("second", second), ("batch", batch))
        },
    }  # fmt: skip
