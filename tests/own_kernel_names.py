"""What the profiler calls the kernels of each adapter, so that a test can say whose kernels ran."""

from __future__ import annotations

import re

from qwen35.domain.capabilities import Phase

#: The kernel that does the phase's work. CuTe DSL puts "kernel_cutlass_" before a name.
OWN: dict[str, dict[Phase, str]] = {
    "triton": {
        Phase.DECODE: r"^decode_kernel", Phase.EXTEND: r"^(chunk|scan)_kernel", Phase.VERIFY: r"^verify_kernel",
        Phase.COMMIT: r"^commit_kernel",
    },
    "flashinfer": {
        Phase.DECODE: r"gdn_decode|gdn_wide_vec", Phase.EXTEND: r"kernel_cutlass",
        Phase.VERIFY: r"gdn_verify|gdn_decode_bf16state_mtp|gdn_wide_vec", Phase.COMMIT: r"^_commit",
    },
    "sglang": {
        Phase.DECODE: r"packed_decode_kernel", Phase.EXTEND: r"^chunk_gated_delta_rule_fwd",
        Phase.VERIFY: r"fused_sigmoid_gating_delta_rule_update", Phase.COMMIT: r"^_commit",
    },
}  # fmt: skip


def owners(names: list[str], phase: Phase) -> set[str]:
    """The adapters whose kernel of ``phase`` is among ``names``; commit's are shared by two."""
    return {name for name, own in OWN.items() if any(re.search(own[phase], found) for found in names)}


def expected(name: str, phase: Phase) -> set[str]:
    """What ``owners`` says where ``name`` served."""
    return {"flashinfer", "sglang"} if phase is Phase.COMMIT and name != "triton" else {name}
