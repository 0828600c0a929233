"""The whole model on a GPU, GDN and convolution by our Triton kernels, against plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import VOCABULARY, build, load, worst_error
from torch import Tensor

import qwen35
from qwen35.container import Container
from qwen35.domain.precision import UNIT_ROUNDOFF
from qwen35.model import GenerateOptions, Model, Session, generate, load_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: Widths of the public models: what Triton compiles there is what is compiled here.
WIDE: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LENGTHS, STEPS = [70, 1, 5, 37], 6
#: Ten times what the CPU is held to against transformers, whose sums run in nearly the same order. Here every matrix
#: product sums in another order, and prefill multiplies float32 by three TF32 products, a few units worse than one in
#: float32; a product in plain TF32 (2**-11 a rounding, over four layers) would stand out.
FLOAT32 = 10 * 1e-4
#: How far logits may move where the embeddings do by 16 units in the last place, about what other orders of summation
#: come to over the layers: else the prompts stand where two experts nearly tie, and rounding alone decides.
STEADY = FLOAT32 / 2
#: Each of four layers rounds about ten times to the dtype of the tokens on the way to its residual, and independent
#: roundings add up like a random walk; twice that, for layers that pass an error on larger than it came.
BFLOAT16 = 2 * (4 * 10) ** 0.5 * UNIT_ROUNDOFF["bfloat16"]


@dataclass(frozen=True)
class Case:
    """A checkpoint, its model in plain torch on the CPU in float32, and requests with the logits that it gives."""

    name: str
    directory: Path
    seed: int
    requests: list[list[int]]
    prefill: Tensor
    decoded: Tensor


@pytest.fixture(scope="module", params=["dense", "moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    # Stored in bfloat16, so that float32 and bfloat16 models have the very same weights.
    build(request.param, seed, **WIDE).bfloat16().save_pretrained(directory)
    reference = load(directory)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(20):
        requests = [torch.randint(VOCABULARY, (n + STEPS,), generator=chance).tolist() for n in LENGTHS]
        prefill, decoded = logits(reference, requests)
        if _moved(reference, requests, (prefill, decoded)) < STEADY:
            return Case(request.param, directory, seed, requests, prefill, decoded)
    raise AssertionError(f"{request.param}: no steady prompts in 20 draws, seed {seed}")


@pytest.fixture(scope="module")
def triton() -> Iterator[Container]:
    container = qwen35.build(
        device="cuda", gdn_decode="triton", gdn_extend="triton", gdn_verify="triton", conv="triton"
    )
    yield container
    qwen35.close(container)


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """torch's own products in float32 proper: one product in TF32 would be an error 2**13 times as large."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


def on_gpu(case: Case, container: Container, dtype: torch.dtype) -> Model:
    return load_model(
        case.directory, gated_delta_rule=container.gated_delta_rule(), short_convolution=container.short_convolution(),
        device="cuda", dtype=dtype, quiet=True,
    )  # fmt: skip


def logits(model: Model, requests: list[list[int]]) -> tuple[Tensor, Tensor]:
    """On the CPU: those after every token of the packed prompts [T, vocabulary], and of ``STEPS`` decodes after them
    [STEPS, B, vocabulary], each fed the request's own next token."""
    model.prepare(max_batch=len(requests), max_tokens=sum(LENGTHS))
    session = Session(model, slots=len(requests), max_length=max(LENGTHS) + STEPS)
    slots = [session.open() for _ in requests]
    prompts = [tokens[:-STEPS] for tokens in requests]
    prefill = session.extend(slots, prompts, every_token=True)
    steps = [session.decode(slots, [tokens[step] for tokens in requests]) for step in range(-STEPS, 0)]
    return prefill.cpu(), torch.stack(steps).cpu()


def _moved(model: Model, requests: list[list[int]], before: tuple[Tensor, Tensor]) -> float:
    """The worst error of a row where every element of the embedding is moved up or down by 16 units."""
    weight = model.embed_tokens.weight
    kept = weight.clone()
    signs = torch.randn(kept.shape, generator=torch.Generator().manual_seed(1)).sign()
    worst = 0.0
    for shift in (2.0**-19, -(2.0**-19)):
        weight.copy_(kept * (1 + shift * signs))
        moved = logits(model, requests)
        worst = max(worst, *(worst_error(x, y) for x, y in zip(moved, before, strict=True)))
    weight.copy_(kept)
    return worst


def rows_error(got: Tensor, want: Tensor) -> Tensor:
    """||got - want|| / ||want|| of every row."""
    assert got.shape == want.shape
    assert bool(torch.isfinite(got).all())
    error: Tensor = (got - want).norm(dim=-1) / want.norm(dim=-1)
    return error.flatten()


def served(container: Container, phase: str) -> Callable[[], tuple[int, int]]:
    """Calls of ``phase`` since now: (GDN, convolution) by Triton. Nobody else may have served any call."""
    counters = container.counters()

    def total() -> tuple[int, int]:
        assert counters.total("calls") == counters.total("calls", adapter="triton")
        rule, convolution = (
            counters.total("calls", port=port, phase=phase, adapter="triton")
            for port in ("gated_delta_rule", "short_convolution")
        )
        return rule, convolution

    before = total()
    return lambda: (total()[0] - before[0], total()[1] - before[1])


def test_float32_logits_are_those_of_the_cpu(case: Case, triton: Container) -> None:
    prefill, decoded = logits(on_gpu(case, triton, torch.float32), case.requests)
    assert case.prefill.std() > 0.5, "the checkpoint's logits hardly vary: the comparison would show nothing"
    assert worst_error(prefill, case.prefill) < FLOAT32, f"prefill of {case.name}, seed {case.seed}"
    for step, (got, want) in enumerate(zip(decoded, case.decoded, strict=True)):
        assert worst_error(got, want) < FLOAT32, f"step {step} of {case.name}, seed {case.seed}"


def test_bfloat16_logits_are_near_those_of_float32_on_the_cpu(case: Case, triton: Container) -> None:
    prefill, decoded = logits(on_gpu(case, triton, torch.bfloat16), case.requests)
    # One rounding may turn a close choice of experts, so the median row is judged, not the worst.
    for what, got, want in (("prefill", prefill, case.prefill), ("decode", decoded, case.decoded)):
        error = rows_error(got, want).median()
        assert error < BFLOAT16, f"{what} of {case.name}: {error:.2e}, bound {BFLOAT16:.2e}, seed {case.seed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_generate_gives_the_tokens_asked_for_and_triton_serves_them(
    dtype: torch.dtype, case: Case, triton: Container
) -> None:
    model = on_gpu(case, triton, dtype)
    prompts = [tokens[:-STEPS] for tokens in case.requests]
    extended, decoded = served(triton, "extend"), served(triton, "decode")
    options = GenerateOptions(max_new_tokens=9, stop_tokens=frozenset(), logits=True, quiet=True)
    results = generate(model, prompts, options)
    layers = sum(kind == "linear_attention" for kind in model.config.layer_types)
    assert extended() == (layers, layers)  # one pass holds every prompt
    assert decoded() == (8 * layers, 8 * layers)  # the first of the nine tokens is prefill's
    for prompt, result in zip(prompts, results, strict=True):
        where = f"{case.name}, length {len(prompt)}, seed {case.seed}"
        assert result.prompt == tuple(prompt), where
        assert (len(result.tokens), result.finish) == (9, "length"), where
        assert result.logits is not None
        assert result.logits.argmax(-1).tolist() == list(result.tokens), where
