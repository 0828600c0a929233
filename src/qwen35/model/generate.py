"""Generation: prompts in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from rich.progress import Progress
from torch import Tensor

from qwen35.domain.errors import ConfigurationError, Qwen35Error, ValueRangeError
from qwen35.model.model import Model
from qwen35.model.pools import is_list
from qwen35.model.progress import progress_bar
from qwen35.model.sampling import Sampling, choose
from qwen35.model.session import Session, check_token_ids

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to generate. Raises ``ConfigurationError`` naming the option that is out of range or of another type.

    ``stop_tokens`` None takes the checkpoint's; an empty set never stops early. ``extend_tokens`` bounds the tokens
    of one prefill pass: longer prompts are split. ``logits`` keeps the logits of every step. ``quiet`` shows no
    progress bar.
    """

    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] | None = None
    extend_tokens: int = 8192
    state_dtype: torch.dtype = torch.float32
    logits: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        for name, value in (("max_new_tokens", self.max_new_tokens), ("extend_tokens", self.extend_tokens)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name} must be an int of at least 1, got {value!r}")
        for name, given, kind in (
            ("sampling", self.sampling, Sampling), ("state_dtype", self.state_dtype, torch.dtype),
            ("logits", self.logits, bool), ("quiet", self.quiet, bool),
        ):  # fmt: skip
            if not isinstance(given, kind):
                raise ConfigurationError(f"{name} must be a {kind.__name__}, got {given!r}")
        stop = self.stop_tokens
        if stop is not None and not (isinstance(stop, Set) and all(type(token) is int for token in stop)):
            raise ConfigurationError(f"stop_tokens must be a set of token ids or None, got {stop!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of one prompt.

    ``tokens`` are the new ones, the stop token included; ``finish`` is "stop" or "length"; ``text`` is None without
    a tokenizer; ``logits`` [steps, vocabulary] float32 on the CPU, row t the logits that ``tokens[t]`` was chosen
    from, None unless asked for.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    text: str | None
    logits: Tensor | None


def generate(model: Model, prompts: Sequence[Prompt], options: GenerateOptions | None = None) -> list[Generation]:
    """Continue every prompt, all in one batch; returns one ``Generation`` a prompt, in order.

    A prompt is text (the checkpoint needs a tokenizer) or token ids. Raises ``ConfigurationError`` or
    ``ValueRangeError`` for bad input before anything runs.
    """
    if not isinstance(model, Model):
        raise ConfigurationError(f"model must be a Model, as load_model gives it, got {type(model).__name__}")
    if not isinstance(options, GenerateOptions | None):
        raise ConfigurationError(f"options must be GenerateOptions or None, got {options!r}")
    if not is_list(prompts):
        raise ConfigurationError(f"prompts must be a list of prompts, got {prompts!r}; give one prompt as [prompt]")
    options = options or GenerateOptions()
    tokenised = [_token_ids(model, f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
    for i, tokens in enumerate(tokenised):
        if len(tokens) + options.max_new_tokens > model.config.max_positions:
            raise ValueRangeError(
                f"prompts[{i}] has {len(tokens)} tokens and max_new_tokens is {options.max_new_tokens}: together "
                f"they must not exceed the model's {model.config.max_positions} positions"
            )
    requests = [_Request(tokens) for tokens in tokenised]
    if requests:
        with progress_bar(options.quiet) as bar:
            _Run(model, requests, options, bar).run()
    return [request.result(model) for request in requests]


def _token_ids(model: Model, name: str, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ConfigurationError(f"{name} is text, but the checkpoint has no tokenizer.json; give token ids")
        given: Sequence[int] = model.tokenizer.encode(prompt)
    else:
        given = prompt
    if not is_list(given):
        raise ConfigurationError(
            f"{name} must be text or a list of token ids, got {given!r}; prompts is a list of prompts"
        )
    check_token_ids(name, given, model.config.vocabulary)
    return tuple(given)


def plan_chunks(lengths: Sequence[int], budget: int) -> Iterator[list[tuple[int, int, int]]]:
    """Passes of at most ``budget`` tokens that cover prompts of these lengths: (prompt, start, stop) each."""
    part: list[tuple[int, int, int]] = []
    room = budget
    for prompt, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            part.append((prompt, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield part
                part, room = [], budget
    if part:
        yield part


class _Request:
    """One prompt under way."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logits: list[Tensor] = []
        self.finish: Literal["stop", "length"] = "length"

    def result(self, model: Model) -> Generation:
        text = None if model.tokenizer is None else model.tokenizer.decode(self.tokens)
        return Generation(
            prompt=self.prompt, tokens=tuple(self.tokens), finish=self.finish, text=text,
            logits=torch.stack(self.logits) if self.logits else None,
        )  # fmt: skip


class _Run:
    """All requests of one call, from prefill to their last token."""

    def __init__(self, model: Model, requests: list[_Request], options: GenerateOptions, bar: Progress) -> None:
        self._requests, self._options, self._bar = requests, options, bar
        longest = max(len(r.prompt) for r in requests)
        total = sum(len(r.prompt) for r in requests)
        model.prepare(
            max_batch=len(requests), max_tokens=min(total, options.extend_tokens), state_dtype=options.state_dtype
        )
        self._session = Session(
            model, slots=len(requests), max_length=longest + options.max_new_tokens, state_dtype=options.state_dtype
        )
        self._slots = [self._session.open() for _ in requests]
        self._generators = options.sampling.generators(len(requests))
        stop = options.stop_tokens
        self._stop = model.config.stop_tokens if stop is None else stop

    def run(self) -> None:
        live = self._prefill()
        left = self._options.max_new_tokens - 1
        task = self._bar.add_task("Decoding", total=left)
        for _ in range(left):
            if not live:
                break
            logits = self._session.decode([self._slots[i] for i in live], [self._requests[i].tokens[-1] for i in live])
            live = self._take(live, logits)
            self._bar.advance(task)

    def _prefill(self) -> list[int]:
        """Run the prompts and take each one's first token; returns the requests that go on."""
        lengths = [len(request.prompt) for request in self._requests]
        task = self._bar.add_task("Prefilling", total=sum(lengths))
        live = []
        for part in plan_chunks(lengths, self._options.extend_tokens):
            chunks = [self._requests[i].prompt[start:stop] for i, start, stop in part]
            logits = self._session.extend([self._slots[i] for i, _, _ in part], chunks)
            done = [row for row, (i, _, stop) in enumerate(part) if stop == lengths[i]]
            live += self._take([part[row][0] for row in done], logits[done])
            self._bar.advance(task, sum(stop - start for _, start, stop in part))
        return live

    def _take(self, which: list[int], logits: Tensor) -> list[int]:
        """Choose a token for each of ``which`` from its row of ``logits``; returns those that go on."""
        if not which:
            return []
        finite = torch.isfinite(logits).all(-1)
        generators = [self._generators[i] for i in which]
        tokens = choose(logits.masked_fill(~finite[:, None], 0), self._options.sampling, generators)
        kept = logits.cpu() if self._options.logits else None
        going = []
        rows = torch.stack((tokens, finite.long()), dim=1).tolist()
        for row, (i, (token, ok)) in enumerate(zip(which, rows, strict=True)):
            request = self._requests[i]
            if not ok:
                raise Qwen35Error(f"prompts[{i}]: the logits of step {len(request.tokens)} are not finite")
            request.tokens.append(token)
            if kept is not None:
                request.logits.append(kept[row])
            if token in self._stop:
                request.finish = "stop"
                self._session.close(self._slots[i])
            else:
                going.append(i)
        return going
