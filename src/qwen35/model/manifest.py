"""Matching the tensors of a checkpoint to the weights of the model, and saying everything that does not match."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from qwen35.domain.errors import CheckpointError
from qwen35.model.config import TextConfig
from qwen35.model.safetensors_files import Stored
from qwen35.model.weights import Part, WeightSpec

#: Prefixes of the text model in text-only and multimodal checkpoints, longest first, and what they become.
PREFIXES = (
    ("model.language_model.", ""),
    ("language_model.model.", ""),
    ("language_model.lm_head.", "lm_head."),
    ("model.", ""),
)
#: Stands beside the text model in every layout, not inside.
HEAD = "lm_head."
#: Tensors that are no part of the text model and are passed over: the vision tower, and the extra layers that
#: predict several tokens at once.
SKIPPED = ("model.visual.", "visual.", "model.mtp.", "mtp.")
#: Layers or experts that config.json may name beyond twice those that are stored; what is missing is then listed.
SPARE = 256
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

_LAYER, _EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")
_PACKED = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True, slots=True)
class Source:
    """``stored`` fills the whole of ``weight``, or its ``part``."""

    stored: Stored
    weight: str
    part: Part | None = None


def refuse_far_more(config: TextConfig, stored: Iterable[Stored]) -> None:
    """Raise ``CheckpointError`` where config.json names far more layers or experts than are ``stored``.

    For those a table of weights could take all memory before anything is found missing.
    """
    layers, experts, packed = set(), set(), 0
    for tensor in stored:
        if tensor.name.startswith(SKIPPED):
            continue
        layers |= set(_LAYER.findall(tensor.name))
        experts |= set(_EXPERT.findall(tensor.name))
        if tensor.name.endswith(_PACKED) and tensor.shape:
            packed = max(packed, tensor.shape[0])
    named = {"num_hidden_layers": (config.layers, len(layers))}
    if config.moe is not None:
        named["num_experts"] = (config.moe.experts, max(packed, len(experts)))
    for key, (count, found) in named.items():
        if count > 2 * found + SPARE:
            raise CheckpointError(f"config.json: {key} must fit the stored tensors, which are of {found}, got {count}")


def match(table: Mapping[str, WeightSpec], stored: Iterable[Stored], tied: bool) -> list[Source]:
    """What to read for each weight of ``table``, in file order.

    Raises ``CheckpointError`` listing every tensor that is missing, unexpected, of the wrong shape or of a dtype
    that is no float. With ``tied`` embeddings a stored lm_head.weight is taken along as a source of that name,
    for the loader to compare.
    """
    named, problems, spelling = _by_model_name(stored)
    sources, missing = [], []
    wanted = dict(table)
    if tied and "lm_head.weight" in named:
        wanted["lm_head.weight"] = table["embed_tokens.weight"]
    for name, spec in wanted.items():
        parts = {part.name: part for part in spec.parts}
        if name in named or not parts.keys() & named.keys():
            parts = {}
        for key in parts or (name,):
            found = named.pop(key, None)
            if found is None:
                missing.append(key)
                continue
            part = parts.get(key)
            problems += _mismatches(found, spec.shape if part is None else _part_shape(spec, part))
            sources.append(Source(found, name, part))
    if missing:
        problems.insert(0, f"missing: {', '.join(map(spelling, missing))}")
    if named:
        problems.append(f"unexpected: {', '.join(s.name for s in named.values())}")
    if problems:
        raise CheckpointError(f"the checkpoint does not fit its config.json: {'; '.join(problems)}")
    return sorted(sources, key=lambda source: str(source.stored.path))


def _by_model_name(stored: Iterable[Stored]) -> tuple[dict[str, Stored], list[str], Callable[[str], str]]:
    """The tensors by the model's own names, what is wrong with that, and how the checkpoint spells such a name."""
    named: dict[str, Stored] = {}
    problems = []
    seen: Counter[str] = Counter()
    for tensor in stored:
        if tensor.name.startswith(SKIPPED):
            continue
        name = tensor.name
        for prefix, becomes in PREFIXES:
            if name.startswith(prefix):
                name = becomes + name.removeprefix(prefix)
                break
        else:
            prefix = ""
        if not name.startswith(HEAD):
            seen[prefix] += 1
        if name in named:
            problems.append(f"{tensor.name} and {named[name].name} are the same weight")
        named[name] = tensor
    used = seen.most_common(1)[0][0] if seen else "model."
    head = "language_model." if used == "language_model.model." else ""
    return named, problems, lambda name: (head if name.startswith(HEAD) else used) + name


def _part_shape(spec: WeightSpec, part: Part) -> tuple[int, ...]:
    return (part.stop - part.start, *spec.shape[2:])


def _mismatches(found: Stored, shape: tuple[int, ...]) -> list[str]:
    problems = []
    if found.shape != shape:
        problems.append(f"{found.name} must have shape {list(shape)}, got {list(found.shape)}")
    if found.dtype not in FLOATS:
        problems.append(f"{found.name} must be a float of {', '.join(sorted(FLOATS))}, got {found.dtype}")
    return problems
