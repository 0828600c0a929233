"""Which engines are run and compared, suite by suite; engine_suite.py runs them.

An engine's result is ``SUITE-ENGINE.json``, a document ``engine_NAME.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: How each model is made, as arguments of ``sglang_engine.py make-model``. With all experts chosen and these weights no
#: token is near a choice of experts, so log-probabilities of two right engines are near each other.
NEAR = ("--top-k", "8", "--scale", "0.03")
MODELS = {
    "small": NEAR, "other": (*NEAR, "--seed", "1"),
    "heavy": ("--geometry", "35B-A3B", "--layers", "8", "--config-only"),
}  # fmt: skip
EAGER = ("disable_decode_cuda_graph=true",)
#: SGLang's default: prefill in graphs too, which break where attention is.
PREFILL_GRAPHS = ("disable_prefill_cuda_graph=false",)
TRITON = ("gdn_decode=triton", "gdn_extend=triton")
FLASHINFER = ("gdn_decode=flashinfer", "gdn_extend=flashinfer")
MIXED = ("gdn_decode=triton", "gdn_extend=flashinfer")
#: SGLang's kernels through our port, with our gates.
SGLANG = ("gdn_decode=sglang", "gdn_extend=sglang")
#: SGLang's own choice of GDN kernels.
_FI_DECODE, _FI_PREFILL = "linear_attn_decode_backend=flashinfer", "linear_attn_prefill_backend=flashinfer"
STRESS = ("--stress", "200")
BENCH = ("--batch", "64", "--context", "9216")
#: Engines that are timed in turn share a GPU's memory.
BESIDE = ("max_total_tokens=73728", "mem_fraction_static=0.9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One run: ``settings`` are ours, ``engine`` SGLang's arguments, ``flags`` those of ``run``. Cut off after
    ``limit_s``. ``{model:NAME}`` stands for a model's directory and ``{work}`` for the folder beside them."""

    name: str
    model: str = "small"
    plugin: str = "on"
    settings: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    gpus: int = 1
    limit_s: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """``documents``: by name, engines that are compared with the first of them. ``truth``: transformers answers too, as
    the engine "truth". ``in_turn``: all engines are up together, and are timed in turn. ``scripts``: run at the end."""

    engines: tuple[Engine, ...]
    documents: Mapping[str, tuple[str, ...]]
    truth: bool = False
    in_turn: bool = False
    scripts: tuple[tuple[str, ...], ...] = field(default=())


def _all(*engines: Engine) -> tuple[str, ...]:
    return tuple(engine.name for engine in engines)


def _judged(suite: str, *engines: Engine) -> tuple[tuple[str, ...], ...]:
    """transformers judges what the engines of ``suite`` decoded."""
    results = (f"{{out}}/{suite}-{engine.name}.json" for engine in engines)
    return (("sglang_engine.py", "judge", "{model:small}", *results),)


_SMALL = (
    Engine(name="off", plugin="off", flags=("--profile", *STRESS)),
    Engine(name="off_flashinfer", plugin="off", engine=(_FI_DECODE, _FI_PREFILL), flags=("--profile",)),
    Engine(name="triton", settings=TRITON, flags=("--profile", *STRESS)),
    Engine(name="flashinfer", settings=FLASHINFER, flags=("--profile", *STRESS)),
    Engine(name="mixed", settings=MIXED, flags=("--profile", *STRESS)),
    Engine(name="sglang", settings=SGLANG, flags=("--profile", *STRESS)),
    Engine(name="triton_eager", settings=TRITON, engine=EAGER),
    Engine(name="flashinfer_eager", settings=FLASHINFER, engine=EAGER),
    Engine(name="mixed_eager", settings=MIXED, engine=EAGER),
    Engine(name="off_eager", plugin="off", engine=EAGER),
    Engine(name="off_prefill_graphs", plugin="off", engine=PREFILL_GRAPHS, flags=("--profile",)),
    Engine(name="triton_prefill_graphs", settings=TRITON, engine=PREFILL_GRAPHS, flags=("--profile",)),
    Engine(name="flashinfer_prefill_graphs", settings=FLASHINFER, engine=PREFILL_GRAPHS),
)
_ON = ("disable_radix_cache=false",)
_NO_BUFFER = (*_ON, "mamba_radix_cache_strategy=no_buffer", "disable_overlap_schedule=true")
_RADIX = (
    Engine(name="off_no_cache", plugin="off", flags=("--shared",)),
    Engine(name="off_cache", plugin="off", engine=_ON, flags=("--shared", *STRESS)),
    Engine(name="off_no_buffer", plugin="off", engine=_NO_BUFFER, flags=("--shared",)),
    Engine(name="triton_no_cache", settings=TRITON, flags=("--shared",)),
    Engine(name="triton_cache", settings=TRITON, engine=_ON, flags=("--shared", *STRESS)),
    Engine(name="triton_no_buffer", settings=TRITON, engine=_NO_BUFFER, flags=("--shared",)),
    Engine(name="flashinfer_no_cache", settings=FLASHINFER, flags=("--shared",)),
    Engine(name="flashinfer_cache", settings=FLASHINFER, engine=_ON, flags=("--shared", *STRESS)),
    Engine(name="flashinfer_no_buffer", settings=FLASHINFER, engine=_NO_BUFFER, flags=("--shared",)),
    Engine(name="mixed_no_cache", settings=MIXED, flags=("--shared",)),
    Engine(name="mixed_cache", settings=MIXED, engine=_ON, flags=("--shared", *STRESS)),
)
_LOAD = ("--then-load", "{model:other}")
#: FlashInfer's kernels whose adapter refreshes no copy: what an update that is not noticed would look like.
_FORGETFUL = ("gdn_decode=forgetful", "gdn_extend=forgetful")
_REFRESH = (
    *(
        engine for name, settings in (("triton", TRITON), ("flashinfer", FLASHINFER)) for engine in (
            Engine(name=f"{name}_cold", model="other", settings=settings),
            Engine(name=f"{name}_updated", settings=settings, flags=_LOAD),
        )
    ),
    Engine(name="flashinfer_forgetful", settings=_FORGETFUL, flags=(*_LOAD, "--extras")),
)  # fmt: skip
_SHADOW = (
    Engine(name="triton", settings=TRITON, engine=EAGER),
    Engine(name="triton_again", settings=TRITON, engine=EAGER),
    Engine(name="shadowed_by_wrong", settings=(*TRITON, "gdn_shadow=wrong:1"), engine=EAGER, flags=("--extras",)),
    Engine(name="shadowed_by_flashinfer", settings=(*TRITON, "gdn_shadow=flashinfer:1"), engine=EAGER),
)
_DEFAULTS = tuple(
    Engine(name=name, plugin=plugin, engine=(*BESIDE, *engine), flags=BENCH)
    for name, plugin, engine in (
        ("absent", "absent", ()), ("defaults", "on", ()), ("absent_again", "absent", ()),
        ("absent_prefill_graphs", "absent", PREFILL_GRAPHS), ("defaults_prefill_graphs", "on", PREFILL_GRAPHS),
    )
)  # fmt: skip
_THROUGHPUT = tuple(
    Engine(name=name, model="heavy", plugin=plugin, settings=settings, engine=(*BESIDE, *engine), flags=BENCH)
    for name, plugin, settings, engine in (
        ("sglang_triton", "absent", (), ()),
        ("sglang_flashinfer_decode", "absent", (), (_FI_DECODE,)),
        ("sglang_flashinfer_prefill", "absent", (), (_FI_PREFILL,)),
        ("triton", "on", TRITON, ()),
        ("mixed", "on", MIXED, ()),
    )
)
_UNFUSED = "enforce_disable_flashinfer_allreduce_fusion=true"
_FUSION = tuple(
    Engine(name=name, plugin=plugin, settings=settings, engine=("tp_size=2", *BESIDE, engine), gpus=2,
           flags=("--profile", *BENCH))
    for name, plugin, settings, engine in (
        ("unfused", "off", (), _UNFUSED), ("triton", "on", ("finalize=triton",), _UNFUSED),
        ("triton_everywhere", "on", ("finalize=triton", *TRITON), _UNFUSED),
        ("sglang_ipc", "off", (), "flashinfer_allreduce_fusion_backend=trtllm"),
    )
)  # fmt: skip
#: Trees of twelve nodes, at most four to a level; drafts come from what was generated before, so prompts asked again
#: are accepted nearly whole.
_NGRAM = ("speculative_algorithm=NGRAM", "speculative_num_draft_tokens=12", "speculative_ngram_max_bfs_breadth=4")
#: Chains of four by a draft model of dummy weights, of which next to nothing is accepted. Eager: SGLang 0.5.20 wants
#: DeepGEMM, of all things, to capture a draft's graphs.
_NEXTN = (
    *EAGER, "speculative_algorithm=NEXTN", "speculative_draft_model_path={model:small}",
    "speculative_draft_load_format=dummy",
    "speculative_num_steps=3", "speculative_eagle_topk=1", "speculative_num_draft_tokens=4",
)  # fmt: skip
_ALL_TRITON = (*TRITON, "gdn_verify=triton")
_SPEC = (
    Engine(name="plain", plugin="off"),
    Engine(name="triton", settings=TRITON),
    Engine(name="ngram_off", plugin="off", engine=_NGRAM),
    Engine(name="ngram_triton", settings=_ALL_TRITON, engine=_NGRAM, flags=("--profile",)),
    Engine(name="nextn_off", plugin="off", engine=_NEXTN),
    Engine(name="nextn_triton", settings=_ALL_TRITON, engine=_NEXTN),
    Engine(name="nextn_flashinfer", settings=(*FLASHINFER, "gdn_verify=flashinfer"), engine=_NEXTN),
)
_PARITY = tuple(
    Engine(name=name, plugin=plugin, settings=settings, engine=EAGER, flags=("--record", f"{{work}}/recorded-{name}"))
    for name, plugin, settings in (("off", "off", ()), ("flashinfer", "on", FLASHINFER), ("triton", "on", TRITON))
)
#: Calls of verify: of trees, and of chains.
_PARITY_DRAFTS = tuple(
    Engine(name=name, plugin="off", engine=engine, flags=("--record", f"{{work}}/recorded-{name}"))
    for name, engine in (("trees", (*_NGRAM, *EAGER)), ("chains", _NEXTN))
)

SUITES = {
    "small": Suite(
        engines=_SMALL, truth=True, scripts=_judged("small", *_SMALL), documents={
            "truth": ("truth", *_all(*_SMALL)), "small": _all(*_SMALL), "small_sglang": ("off", "sglang"),
            "small_eager": (
                "off_eager", "off", "triton_eager", "triton", "flashinfer_eager", "flashinfer", "mixed_eager", "mixed",
            ),
            "prefill_graphs": (
                "off_prefill_graphs", "off", "triton_prefill_graphs", "triton", "flashinfer_prefill_graphs",
            ),
        },
    ),
    "radix": Suite(
        engines=_RADIX, documents={
            "radix": _all(*_RADIX), "radix_triton": ("triton_no_cache", "triton_cache", "triton_no_buffer"),
            "radix_flashinfer": ("flashinfer_no_cache", "flashinfer_cache", "flashinfer_no_buffer"),
            "radix_mixed": ("mixed_no_cache", "mixed_cache"),
        },
    ),
    "refresh": Suite(
        engines=_REFRESH, documents={
            "refresh_triton": ("triton_cold", "triton_updated"),
            "refresh_flashinfer": ("flashinfer_cold", "flashinfer_updated", "flashinfer_forgetful"),
        },
    ),
    "shadow": Suite(engines=_SHADOW, documents={"shadow": _all(*_SHADOW)}),
    "defaults": Suite(
        engines=_DEFAULTS, in_turn=True, documents={
            "defaults": ("absent", "defaults", "absent_again"),
            "defaults_prefill_graphs": ("absent_prefill_graphs", "defaults_prefill_graphs"),
        },
    ),
    "throughput": Suite(
        engines=_THROUGHPUT, in_turn=True, documents={
            "throughput": _all(*_THROUGHPUT),
            "throughput_against_flashinfer": ("sglang_flashinfer_decode", "triton", "mixed"),
        },
    ),
    "fusion": Suite(
        engines=_FUSION, truth=True, in_turn=True, scripts=_judged("fusion", *_FUSION),
        documents={"fusion": _all(*_FUSION), "fusion_truth": ("truth", *_all(*_FUSION))},
    ),
    "spec": Suite(
        engines=_SPEC, documents={"spec": _all(*_SPEC), "spec_triton": ("triton", "ngram_triton", "nextn_triton")},
        scripts=_judged("spec", *_SPEC),
    ),
    "parity": Suite(
        engines=_PARITY, documents={"parity_runs": _all(*_PARITY)}, scripts=((
            "engine_parity.py", *(f"{{work}}/recorded-{name}" for name in _all(*_PARITY)), "--out",
            "{out}/engine_parity.json",
        ),),
    ),
    "parity_drafts": Suite(
        engines=_PARITY_DRAFTS, documents={"parity_drafts_runs": _all(*_PARITY_DRAFTS)}, scripts=tuple(
            ("engine_parity.py", f"{{work}}/recorded-{name}", "--out", f"{{out}}/engine_parity_{name}.json")
            for name in _all(*_PARITY_DRAFTS)
        ),
    ),
}  # fmt: skip
