"""``qwen35 demo``: a small checkpoint, two adapters, transformers as the judge, and the swap table."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qwen35.cli import child, swap
from qwen35.cli import generate as generation
from qwen35.cli.house import make_folder, refuse_existing, settings_in_force
from qwen35.cli.screen import errors
from qwen35.cli.swap_fusion import DOCUMENT
from qwen35.domain.errors import Qwen35Error, UnavailableError

if TYPE_CHECKING:
    from torch import Tensor

    from qwen35.settings import Settings

PROMPT = (11, 42, 7, 99, 3, 58, 120, 64, 23, 5, 77, 201)
NEW_TOKENS = 6
ADAPTERS = ("reference", "triton")
#: Largest relative logit error against transformers, which run on the CPU; float32 throughout, on a GPU as on a CPU.
#: Where the embeddings move by a part of themselves, these logits move by up to 42 times that part (seeds 0 to 7). On a
#: GPU our prefill makes a product of float32 from three of TF32, which is within 2**-21: all four layers' in one
#: direction would be 4 * 42 * 2**-21 = 8e-5. Computed so on a CPU, they came to 1e-6 to 5e-6; one product of TF32 in
#: their place, or in place of torch's own, came to 7e-4 and more (seeds 0 to 3).
TOLERANCE = 1e-4
EXIT_DIFFERS = 1
_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
_CPU_SWAP = swap.Request(
    gdn="triton,reference", decode_batches="1,4", prefill="1x16", verify="2x2", repeats=3, device="cpu"
)
_GPU_SWAP = swap.Request(gdn="triton,reference", decode_batches="1,8,64", prefill="1x2048", verify="8x4")


def demo(
    folder: Path | None = typer.Option(None, "--dir", help="Where to put the checkpoint and the swap report."),
    keep: bool = typer.Option(False, "--keep", help="Keep the temporary folder (one named with --dir stays)."),
    seed: int = typer.Option(0, help="Seed of the checkpoint's weights."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace what an earlier demo left in --dir; without it such a folder is refused."
    ),
) -> None:
    """Make a checkpoint with transformers, run it on reference and Triton, check the logits, show the swap table."""
    if folder is None and not keep:
        with tempfile.TemporaryDirectory(prefix="qwen35-demo-") as temporary:
            _run(Path(temporary), seed)
        typer.echo("the folder is removed again; --keep or --dir FOLDER keeps it")
        return
    folder = folder or Path(tempfile.mkdtemp(prefix="qwen35-demo-"))
    refuse_existing("--dir", written(folder), overwrite)
    make_folder("--dir", folder)
    try:
        _run(folder, seed)
    finally:
        typer.echo(f"kept in {folder}")


def written(folder: Path) -> tuple[Path, ...]:
    """What the demo writes into ``folder``."""
    logits = tuple(_logits_file(folder, adapter) for adapter in ADAPTERS)
    return (folder / "checkpoint", folder / "swap" / DOCUMENT, *logits)


def _logits_file(folder: Path, adapter: str) -> Path:
    return folder / f"{adapter}.safetensors"


def _run(folder: Path, seed: int) -> None:
    from qwen35.services.assembly import make_platform

    settings = settings_in_force(dtype="float32")
    on_gpu = make_platform(settings).device_type == "cuda"
    checkpoint = folder / "checkpoint"
    typer.echo("1. make a small Qwen3.5-MoE checkpoint with transformers")
    theirs = make_checkpoint(checkpoint, seed)
    typer.echo(f"2. generate {NEW_TOKENS} tokens with each adapter in float32, and let transformers judge the logits")
    errors_by_adapter = {}
    for adapter in ADAPTERS:
        with float32_products():
            tokens, logits = _generate(settings, adapter, checkpoint, folder, on_gpu)
            error = errors_by_adapter[adapter] = logit_error(theirs, tokens, logits)
        typer.echo(f"   {adapter}: tokens {', '.join(map(str, tokens))}; max relative logit error {error:.1e}")
    typer.echo("3. swap the adapter under the same calls")
    if not on_gpu:
        typer.echo("   (no GPU here: Triton's kernels are interpreted, so their times say nothing)")
    _swap(checkpoint, folder / "swap", on_gpu)
    judge(errors_by_adapter)


@contextmanager
def float32_products() -> Iterator[None]:
    """Inside, torch multiplies float32 in float32, also where the environment has TF32 in its place
    (``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``, as in some vendors' images)."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def judge(errors_by_adapter: dict[str, float]) -> None:
    """Say whether the logits are transformers'. Raises ``typer.Exit`` with 1 where an error is past ``TOLERANCE``, or
    is no number."""
    wrong = [f"{name} by {error:.1e}" for name, error in errors_by_adapter.items() if not error <= TOLERANCE]
    if wrong:
        typer.echo(f"logits differ from transformers' by more than {TOLERANCE:.0e}: {', '.join(wrong)}")
        raise typer.Exit(EXIT_DIFFERS)
    typer.echo(f"both adapters give transformers' logits within {TOLERANCE:.0e}")


def make_checkpoint(folder: Path, seed: int) -> Any:
    """Write a seeded checkpoint in the layout of Hugging Face into ``folder``; returns transformers' model.

    Raises ``UnavailableError`` where transformers, or its Qwen3.5 class, is not installed.
    """
    try:
        import transformers
        from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
    except ImportError as exc:
        reason = f"transformers >= 5.12 is needed: pip install 'qwen35[report]' ({exc})"
        raise UnavailableError("demo", [reason]) from exc
    import torch

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_SIZES)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # transformers' own initialisation is so small that every prompt repeats one token
            parameter.copy_(noise - 1 if name.endswith("A_log") else noise * 0.2)
    model.save_pretrained(folder)
    return model


def logit_error(model: Any, tokens: list[int], logits: Tensor) -> float:
    """The largest relative error of a step of ``logits`` [steps, vocabulary] against transformers' ``model``."""
    import torch

    from qwen35.testing.measure import relative_error

    with torch.no_grad():
        given = torch.tensor([[*PROMPT, *tokens[:-1]]])
        want = model(input_ids=given).logits[0, len(PROMPT) - 1 :].float()
    return max(relative_error(got, row) for got, row in zip(logits, want, strict=True))


def _generate(
    settings: Settings, adapter: str, checkpoint: Path, folder: Path, on_gpu: bool
) -> tuple[list[int], Tensor]:
    """The tokens and logits of ``adapter``. Triton on a CPU runs in a process of its own, which can be told to
    interpret kernels before Triton is imported."""
    from safetensors.torch import load_file

    path = _logits_file(folder, adapter)
    if adapter == "triton" and not on_gpu:
        words = ["generate", str(checkpoint), "--token-ids", ",".join(map(str, PROMPT)), "--logits", str(path),
                 "--max-new-tokens", str(NEW_TOKENS), "--device", "cpu", "--dtype", "float32"]  # fmt: skip
        for option in ("--gdn-decode", "--gdn-extend", "--gdn-verify", "--conv"):
            words += [option, adapter]
        _interpreted(words, shown=False)
    else:
        from qwen35.container import build, close
        from qwen35.model import Sampling

        container = build(settings, **generation.gated_delta_rule_by(adapter), conv=adapter)
        try:
            result = generation.run(container, settings, checkpoint, PROMPT, NEW_TOKENS, Sampling())
            generation.save_logits(result, generation.served_by(container), path)
        finally:
            close(container)
    saved = load_file(path)
    return saved["tokens"].tolist(), saved["logits"]


def _swap(checkpoint: Path, out: Path, on_gpu: bool) -> None:
    """Raises ``KeyboardInterrupt`` where Ctrl-C ended it, what was measured being written."""
    if on_gpu:
        if swap.measure(_GPU_SWAP, out)["interrupted"]:
            raise KeyboardInterrupt
    else:
        words = shlex.split(replace(_CPU_SWAP, model=checkpoint).command())
        _interpreted([*words[1:], "--out", str(out), "--overwrite"], shown=True)


def _interpreted(words: list[str], shown: bool) -> None:
    """Run one of our commands with Triton's interpreter on; ``shown``: its output goes to ours.

    Raises ``Qwen35Error`` with what the command said where it fails.
    """
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "qwen35", *words]
    try:
        status, said = child.run(command, shown=shown)
    except KeyboardInterrupt as interrupt:
        if shown and str(interrupt).strip() != "interrupted":  # which is said in any case
            errors().print(str(interrupt), end="", markup=False)
        raise
    if status:
        raise Qwen35Error(f"qwen35 {words[0]} under Triton's interpreter ended with {status}: {said}")
