"""For what a fusion workspace is made: its signature, and how many tokens it must take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from qwen35.domain.errors import ConfigurationError

#: Element types of tokens, residual and gamma that the contract knows.
TOKEN_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSignature:
    """Everything that a workspace is compiled and sized for.

    ``group`` is the process group over which the sum runs, held strongly: its identity is part of the
    signature, and the number of a group that died could be given to another; None in an example, by which an adapter is
    asked what it would serve, and for one rank. ``device`` carries an index
    ("cuda:0") or is "cpu". ``weight_bias`` is added to gamma (0.0 where gamma already is the checkpoint's
    weight plus one). ``speculative``: graphs of draft and verify steps may alternate, so a kernel must not load the
    shared expert's output before the kernel ahead of it has ended; true unless the engine knows that it does not
    speculate. Raises ``ConfigurationError`` naming the field, before any device work.
    """

    group: object
    tp_size: int
    rank: int
    hidden: int
    top_k: int
    max_m: int
    dtype: str = "bfloat16"
    eps: float = 1e-6
    weight_bias: float = 0.0
    shared_expert: bool = True
    device: str = "cpu"
    speculative: bool = True

    def __post_init__(self) -> None:
        for name in ("tp_size", "hidden", "top_k", "max_m"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.tp_size:
            raise ConfigurationError(f"rank must be in 0..{self.tp_size - 1}, got {self.rank}")
        if self.dtype not in TOKEN_DTYPES:
            raise ConfigurationError(f"dtype must be {' or '.join(TOKEN_DTYPES)}, got {self.dtype!r}")
        if not self.eps > 0:
            raise ConfigurationError(f"eps must be positive, got {self.eps}")
        kind, colon, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (kind == "cuda") != (colon == ":" and index.isdigit()):
            raise ConfigurationError(f"device must be 'cpu' or 'cuda:N', got {self.device!r}")

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    def differences(self, asked: WorkspaceSignature) -> tuple[str, ...]:
        """ "hidden: has 2048, asked 4096" for every field in which this signature does not cover ``asked``."""
        out = []
        for field in fields(self):
            have, want = getattr(self, field.name), getattr(asked, field.name)
            if field.name == "group":
                if have is not want:
                    out.append("group: asked for another process group")
            elif have < want if field.name in ("max_m", "speculative") else have != want:
                out.append(f"{field.name}: has {have}, asked {want}")
        return tuple(out)

    def covers(self, asked: WorkspaceSignature) -> bool:
        """Whether a workspace of this signature serves ``asked``: all alike, ``max_m`` at least as large.

        One that is safe under speculation serves an engine without it too.
        """
        return not self.differences(asked)

    def shared(self) -> dict[str, object]:
        """The fields on which every rank must agree, as plain values that can be sent."""
        apart = {"group", "rank", "device"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart} | {
            "device_type": self.device_type
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBounds:
    """What an engine knows of how many tokens one step can bring; None where it does not say.

    ``moe_tokens`` MoE capacity, ``running_requests``, and of both CUDA graph configurations the largest batch
    size and the list of sizes. ``draft_tokens`` is how many tokens a decode row brings under speculation.
    """

    moe_tokens: int | None = None
    running_requests: int | None = None
    decode_max_bs: int | None = None
    decode_bs: Iterable[int | None] | None = None
    prefill_max_bs: int | None = None
    prefill_bs: Iterable[int | None] | None = None
    draft_tokens: int | None = None

    def resolve_max_m(self) -> int:
        """The largest positive bound; raises ``ConfigurationError`` where there is none."""
        draft = max(self.draft_tokens or 1, 1)
        decode = [self.decode_max_bs, *(self.decode_bs or ())]
        prefill = [self.prefill_max_bs, *(self.prefill_bs or ())]
        bounds = [self.moe_tokens, self.running_requests, *prefill, *(b * draft for b in decode if b is not None)]
        positive = [int(b) for b in bounds if b is not None and b > 0]
        if not positive:
            raise ConfigurationError(
                "max_m cannot be resolved: none of moe_tokens, running_requests and the graph batch sizes is positive"
            )
        return max(positive)


def scattered_tokens(counts: Sequence[int], attention_tp_size: int) -> int:
    """The most tokens that one rank brings where each data-parallel group's tokens are split over its attention ranks.

    ``counts`` holds every group's tokens; the largest decides, so that every rank sizes and decides alike, one
    without tokens included: a rank that went by its own count would stay out of a collective that the others enter.
    Raises ``ConfigurationError`` for no group, a negative count or no attention rank.
    """
    if attention_tp_size < 1:
        raise ConfigurationError(f"attention_tp_size must be at least 1, got {attention_tp_size}")
    if not counts or min(counts) < 0:
        raise ConfigurationError(f"counts must be one number of tokens for each group, got {list(counts)}")
    return -(-max(counts) // attention_tp_size)
