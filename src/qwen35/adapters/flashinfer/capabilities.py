"""What FlashInfer's kernels can do, by compute capability."""

from __future__ import annotations

from types import MappingProxyType

import torch

from qwen35.adapters.flashinfer.entries import MIN_COMPUTE_CAPABILITY
from qwen35.adapters.flashinfer.mends import ALIGNMENT, CHUNK
from qwen35.adapters.flashinfer.release import FlashInferKernels
from qwen35.domain.capabilities import Capabilities, Phase
from qwen35.domain.errors import UnavailableError
from qwen35.domain.platform import Platform
from qwen35.domain.precision import Precision


def capabilities_of(kernels: FlashInferKernels, platform: Platform) -> Capabilities:
    """Prefill exists for 9, 10 (with CUDA 13) and 12, verify is tested on 9 and 10.

    Raises ``UnavailableError`` where decode, the float32 verify or, on Hopper, prefill is missing.
    """
    major = platform.compute_capability[0] if platform.compute_capability else 9
    missing = [n for n, k in (("decode", kernels.decode), ("mtp", kernels.mtp)) if k is None]
    if major == 9 and kernels.prefill is None:
        missing.append("prefill")
    if missing:
        raise UnavailableError("FlashInfer", [f"missing the {name} kernel" for name in missing])
    cuda = int((torch.version.cuda or "13").partition(".")[0])
    phases = {Phase.DECODE, Phase.COMMIT}
    if kernels.prefill is not None and (major in (9, 12) or (major == 10 and cuda >= 13)):
        phases.add(Phase.EXTEND)
    if major in (9, 10):
        phases.add(Phase.VERIFY)
    step = Precision(products="float32")
    return Capabilities(
        phases=frozenset(phases), token_dtypes=frozenset({"bfloat16"}),
        state_dtypes=frozenset({"float32"} if kernels.mtp_bf16 is None else {"float32", "bfloat16"}),
        key_widths=frozenset({128}), value_widths=frozenset({128}), device_types=frozenset({platform.device_type}),
        min_compute_capability=MIN_COMPUTE_CAPABILITY, raw_only=frozenset({Phase.DECODE, Phase.VERIFY}),
        checkpoints=True, checkpoint_multiple=CHUNK, byte_alignment=ALIGNMENT,
        precision=MappingProxyType({
            Phase.DECODE: step, Phase.VERIFY: step, Phase.COMMIT: step,
            # Normalised q and k, and each chunk's products, are rounded to the tokens' dtype.
            Phase.EXTEND: Precision(products=None, roundings=2.0),
        }),
    )  # fmt: skip
