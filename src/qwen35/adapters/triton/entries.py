"""The Triton adapters, as entry points find them. Importing this imports neither Triton nor torch."""

from __future__ import annotations

from typing import Any

from qwen35.adapters._kernels.sources import found_spec
from qwen35.domain.capabilities import Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions

#: The oldest GPUs with bfloat16 matrix products.
MIN_COMPUTE_CAPABILITY = (8, 0)


def probe(platform: Platform) -> Support:
    """Whether our Triton kernels run there: a GPU of compute capability 8.0, or Triton's interpreter."""
    if found_spec("triton") is None:
        return Support.of("triton is not installed")
    if platform.device_type != "cuda":
        import triton

        if platform.device_type == "cpu" and triton.knobs.runtime.interpret:
            return Support(ok=True)
        return Support.of(f"device requires cuda (or TRITON_INTERPRET=1 on a CPU), got {platform.device_type}")
    return Support.of(*platform.below(MIN_COMPUTE_CAPABILITY))


def _gated_delta_rule(_platform: Platform, _options: AdapterOptions) -> Any:
    from qwen35.adapters.triton.gated_delta_rule import TritonGatedDeltaRule

    return TritonGatedDeltaRule()


def _short_convolution(_platform: Platform, _options: AdapterOptions) -> Any:
    from qwen35.adapters.triton.short_convolution import TritonShortConvolution

    return TritonShortConvolution()


GATED_DELTA_RULE = AdapterEntry(
    port="gated_delta_rule", name="triton", summary="our Triton kernels: fused decode, chunked prefill, trees",
    probe=probe, create=_gated_delta_rule, rank=50,
)  # fmt: skip

SHORT_CONVOLUTION = AdapterEntry(
    port="short_convolution", name="triton", summary="our Triton kernels, every phase one launch",
    probe=probe, create=_short_convolution, rank=50,
)  # fmt: skip
