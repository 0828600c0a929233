"""``qwen35 generate``: a checkpoint on the adapters of your choice, and two choices compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qwen35.cli import parse
from qwen35.cli.house import DEVICE_HELP, open_registry, refuse_unwritable, settings_in_force
from qwen35.cli.launch import joined
from qwen35.cli.screen import errors, output
from qwen35.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from qwen35.container import Container
    from qwen35.model import Generation, Model, Sampling, TensorParallel
    from qwen35.settings import Settings

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StepError:
    """How far the logits of one step are from the first run's: largest difference, and relative (Frobenius)."""

    step: int
    max_error: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another adapter given the same tokens. ``first_difference`` is the step at which it would have chosen
    another token, ``token`` that token; both None where it never did."""

    adapter: str
    first_difference: int | None
    token: int | None
    steps: tuple[StepError, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run gave: who served the latest call of each phase of the gated delta rule, which adapter of the fused
    finalize the ranks agreed on (None: none was used), and among how many ranks."""

    result: Generation
    served_by: dict[str, str]
    finalized_by: str | None
    ranks: int
    comparison: Comparison | None


def generate(
    checkpoint: Path = typer.Argument(help="Checkpoint folder: config.json, safetensors, perhaps tokenizer.json."),
    prompt: str = typer.Option("", help="Text to continue; the checkpoint needs a tokenizer.json."),
    token_ids: str = typer.Option("", help="Token ids to continue, joined by commas, instead of --prompt."),
    max_new_tokens: int = typer.Option(32, min=1, help="New tokens at most."),
    temperature: float = typer.Option(0.0, help="0 takes the likeliest token."),
    top_p: float = typer.Option(1.0, help="Keep the fewest tokens whose probabilities reach this."),
    top_k: int = typer.Option(0, help="Keep this many tokens; 0 keeps all."),
    seed: int = typer.Option(0, help="Seed of the draws."),
    gdn_decode: str = typer.Option("", help="Adapter of the gated delta rule for decode."),
    gdn_extend: str = typer.Option("", help="Adapter for prefill."),
    gdn_verify: str = typer.Option("", help="Adapter for verify."),
    conv: str = typer.Option("", help="Adapter of the short convolution."),
    finalize: str = typer.Option(
        "", help="Adapter of the fused finalize, among ranks that torchrun started (refused for one alone); or off."
    ),
    device: str = typer.Option("", help=DEVICE_HELP),
    dtype: str = typer.Option("", help="float32, bfloat16, float16; default: bfloat16 on a GPU, else float32."),
    compare: str = typer.Option("", help="Run this adapter of the gated delta rule on the same tokens, compare."),
    logits: Path | None = typer.Option(None, help="Write the logits of every step to this safetensors file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Continue a prompt; with --compare, say where another adapter would have chosen another token.

    Started by torchrun, the ranks share the model: torchrun --nproc-per-node 2 -m qwen35 generate ...
    """
    from qwen35.model import Sampling
    from qwen35.settings import launch_environment

    given = prompt_of(prompt, token_ids)
    chosen = settings_in_force(
        device, gdn_decode=gdn_decode, gdn_extend=gdn_extend, gdn_verify=gdn_verify, conv=conv, finalize=finalize,
        dtype=dtype,
    )  # fmt: skip
    refuse_fusion_alone(finalize, chosen)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    if logits is not None and launch_environment().rank == 0:
        refuse_unwritable("--logits", logits)
    with joined(chosen) as (settings, ranks):
        report = generate_and_compare(settings, ranks, checkpoint, given, max_new_tokens, sampling, compare)
    if ranks.rank:
        return
    if logits is not None:
        save_logits(report.result, report.served_by, logits)
    if as_json:
        typer.echo(json.dumps(document(report), indent=1, allow_nan=False))
    else:
        show(report)


def generate_and_compare(
    settings: Settings, ranks: TensorParallel, checkpoint: Path, prompt: str | tuple[int, ...],
    max_new_tokens: int, sampling: Sampling, compare: str,
) -> Report:  # fmt: skip
    """The generation and, where ``compare`` names an adapter, the comparison with it. All ranks call this."""
    from qwen35.container import build, close

    containers = [build(settings)]
    try:
        if compare:
            containers.append(build(settings, **gated_delta_rule_by(compare)))
        result = run(containers[0], settings, checkpoint, prompt, max_new_tokens, sampling, ranks)
        comparison = None
        if compare:
            model = load(containers[1], settings, checkpoint, ranks)
            comparison = compare_with(model, settings, result, sampling, compare)
        return Report(result, served_by(containers[0]), finalized_by(containers[0], ranks), ranks.size, comparison)
    finally:
        for container in containers:
            close(container)


def prompt_of(prompt: str, token_ids: str) -> str | tuple[int, ...]:
    """The one of the two options that was given. Raises ``ConfigurationError`` for none or both."""
    if bool(prompt) == bool(token_ids):
        raise ConfigurationError("give either --prompt TEXT or --token-ids 1,2,3")
    if prompt:
        return prompt
    ids = []
    for word in token_ids.split(","):
        if not parse.is_whole(word.strip()):
            raise ConfigurationError(
                f"--token-ids must be token ids (0 or more) joined by commas, got {word.strip()!r}"
            )
        ids.append(int(word))
    return tuple(ids)


def refuse_fusion_alone(name: str, settings: Settings) -> None:
    """Raise ``ConfigurationError`` where ``--finalize`` names an adapter and this process has no other rank: nothing
    would be fused. A setting may name one all the same: it may be meant for other commands too."""
    from qwen35.services.finalize_choice import PORT
    from qwen35.services.finalize_fusion import OFF
    from qwen35.services.named import named_by
    from qwen35.services.registry import AUTO
    from qwen35.settings import launch_environment

    if name in ("", AUTO, OFF) or launch_environment().world_size > 1:
        return
    with named_by(settings, "finalize"):
        open_registry(settings).entry(PORT, name)
    raise ConfigurationError(
        f"--finalize {name} fuses what several ranks do together, got one rank, which has nothing to fuse; leave it "
        "out, or start the ranks: torchrun --nproc-per-node 2 -m qwen35 generate ..."
    )


def gated_delta_rule_by(adapter: str) -> dict[str, Any]:
    """Settings by which ``adapter`` serves every phase of the gated delta rule."""
    return {"gdn_decode": adapter, "gdn_extend": adapter, "gdn_verify": adapter}


def load(container: Container, settings: Settings, checkpoint: Path, ranks: TensorParallel | None = None) -> Model:
    """The checkpoint on the container's services; ``ranks`` None: on this process alone."""
    from qwen35.model import TensorParallel, load_model

    platform = container.platform()
    return load_model(
        checkpoint, gated_delta_rule=container.gated_delta_rule(),
        short_convolution=container.short_convolution(), finalize=container.finalize(),
        tensor_parallel=ranks or TensorParallel(), device=platform.device,
        dtype=parse.token_dtype(settings.dtype, platform.device_type), quiet=_quiet(ranks),
    )  # fmt: skip


def _quiet(ranks: TensorParallel | None) -> bool:
    """One bar, on a terminal."""
    return (ranks is not None and ranks.rank > 0) or not errors().is_terminal


def run(
    container: Container, settings: Settings, checkpoint: Path, prompt: str | tuple[int, ...],
    max_new_tokens: int, sampling: Sampling, ranks: TensorParallel | None = None,
) -> Generation:  # fmt: skip
    """Load and generate, keeping the logits of every step."""
    from qwen35.model import GenerateOptions
    from qwen35.model import generate as continue_prompts

    options = GenerateOptions(
        max_new_tokens=max_new_tokens, sampling=sampling, state_dtype=parse.state_dtype(settings.state_dtype),
        logits=True, quiet=_quiet(ranks),
    )  # fmt: skip
    return continue_prompts(load(container, settings, checkpoint, ranks), [prompt], options)[0]


def compare_with(model: Model, settings: Settings, first: Generation, sampling: Sampling, name: str) -> Comparison:
    """Give ``model``, on the adapter called ``name``, the tokens of ``first``; compare each step's logits and choice.

    The draws are those of the first run, so up to the first difference this is what the second run would do.
    """
    from qwen35.model import Session
    from qwen35.model.sampling import choose

    state_dtype = parse.state_dtype(settings.state_dtype)
    model.prepare(max_batch=1, max_tokens=len(first.prompt), state_dtype=state_dtype)
    session = Session(model, slots=1, max_length=len(first.prompt) + len(first.tokens), state_dtype=state_dtype)
    slot, generators = session.open(), sampling.generators(1)
    logits = session.extend([slot], [first.prompt])
    steps, difference, other = [], None, None
    for step, token in enumerate(first.tokens):
        chosen = int(choose(logits, sampling, generators)[0])
        if difference is None and chosen != token:
            difference, other = step, chosen
        steps.append(_step_error(step, logits[0].cpu(), _logits(first)[step]))
        if step + 1 < len(first.tokens):
            logits = session.decode([slot], [token])
    return Comparison(name, difference, other, tuple(steps))


def _logits(result: Generation) -> Any:
    if result.logits is None:
        raise ConfigurationError("the generation kept no logits")
    return result.logits


def _step_error(step: int, got: Any, want: Any) -> StepError:
    from qwen35.testing.measure import relative_error

    return StepError(step, float((got - want).abs().max()), relative_error(got, want))


def save_logits(result: Generation, served: dict[str, str], path: Path) -> None:
    """``logits`` [steps, vocabulary] float32 and ``tokens`` [steps] int64; ``served`` as JSON in the metadata."""
    import torch
    from safetensors.torch import save_file

    tensors = {"logits": _logits(result).contiguous(), "tokens": torch.tensor(result.tokens)}
    save_file(tensors, str(path), metadata={"served_by": json.dumps(served)})


def served_by(container: Container) -> dict[str, str]:
    """Which adapter served the latest call of each phase of the gated delta rule."""
    return {str(d.phase): d.adapter for d in container.gated_delta_rule().decisions}


def finalized_by(container: Container, ranks: TensorParallel) -> str | None:
    """The adapter that served fused calls of these ranks, None where none did."""
    choice = container.finalize().choice
    served = container.counters().total("calls", port="finalize_fusion")
    return choice.name if ranks.divided and served and choice is not None else None


def document(report: Report) -> dict[str, Any]:
    """What ``--json`` prints."""
    result = report.result
    return {
        "schema": SCHEMA, "kind": "generate", "prompt": list(result.prompt), "tokens": list(result.tokens),
        "finish": result.finish, "text": result.text, "served_by": report.served_by, "ranks": report.ranks,
        "finalized_by": report.finalized_by,
        "compare": None if report.comparison is None else asdict(report.comparison),
    }  # fmt: skip


def show(report: Report) -> None:
    """The continuation, who served it, and the comparison."""
    served, result, comparison = report.served_by, report.result, report.comparison
    typer.echo(f"served by  decode: {served['decode']}, extend: {served['extend']}")
    if report.ranks > 1:
        typer.echo(f"ranks      {report.ranks}, fused finalize: {report.finalized_by or 'not used'}")
    typer.echo(f"tokens     {', '.join(map(str, result.tokens))} ({result.finish})")
    if result.text is not None:
        typer.echo(result.text)
    if comparison is None:
        return
    from rich.table import Table

    table = Table("step", "largest logit error", "relative", title=f"{comparison.adapter} on the same tokens")
    for step in comparison.steps:
        table.add_row(str(step.step), f"{step.max_error:.3e}", f"{step.relative_error:.3e}")
    output().print(table)
    if comparison.first_difference is None:
        typer.echo(f"no differing token in {len(comparison.steps)} steps")
    else:
        at = comparison.first_difference
        typer.echo(f"first differing token: step {at}, {result.tokens[at]} against {comparison.token}")
