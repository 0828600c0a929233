"""A real SGLang engine with the plugin on or off: what it generates, how fast, by which kernels, and how that compares.

    python benchmarks/sglang_engine.py make-model DIR [--geometry 35B-A3B --layers 8 --config-only]
    python benchmarks/sglang_engine.py truth DIR --out truth.json [--dtype float32]
    python benchmarks/sglang_engine.py run DIR --out off.json --plugin off
    python benchmarks/sglang_engine.py run DIR --out triton.json --set gdn_decode=triton gdn_extend=triton [--profile]
    python benchmarks/sglang_engine.py compare truth.json off.json triton.json --out engine.json

``run`` makes one engine (one process a run): ``--set`` are our settings, ``--engine`` SGLang's arguments as key=value
(JSON values). The plugin is found by its entry point: installed, or as tools/make_dist_info.py says. engine_suite.py
runs several engines and compares them.

Two GPUs, a checkpoint with weights (SGLang leaves the norms' 1 + weight at one where weights are dummies):

    run DIR --out plain.json --plugin off --engine tp_size=2 enforce_disable_flashinfer_allreduce_fusion=true
    run DIR --out ipc.json --plugin off --engine tp_size=2 flashinfer_allreduce_fusion_backend=trtllm
    run DIR --out ours.json --set finalize=triton --engine tp_size=2 enforce_disable_flashinfer_allreduce_fusion=true

NVLink multicast stays off. Counters are the first rank's; kernel names are kept for each rank.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_compare import compare, say
from engine_extras import bring_extras
from engine_model import judge, logprobs_of, make_model, prompts, truth, vocabulary_of, where_and_when
from engine_observed import counters, profile, steps_of
from engine_recorder import CALLS, DIRECTORY
from engine_shared import shared
from engine_turns import serve

#: NCCL and torch use no NVLink multicast. SGLang: its own all-reduce is off below, and never name mnnvl or auto.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
#: New tokens that a request has left when it is cancelled, or nearly: an engine needs longer than that delay for them.
LONG = 1000


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that every compared engine shares, then those of the command line."""
    arguments: dict[str, Any] = {
        "model_path": args.model, "skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": "triton",
        "sampling_backend": "pytorch", "grammar_backend": "none", "linear_attn_backend": "triton",
        "linear_attn_prefill_backend": "triton", "linear_attn_decode_backend": "triton", "mamba_ssm_dtype": "float32",
        "disable_radix_cache": True, "disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": args.batch,
        "max_running_requests": args.batch, "context_length": args.context, "chunked_prefill_size": args.context,
        "max_total_tokens": 2 * args.batch * args.context, "max_mamba_cache_size": max(128, 4 * args.batch),
        "mem_fraction_static": 0.85, "disable_custom_all_reduce": True, "skip_server_warmup": True, "random_seed": 0,
        "enable_metrics": True, "log_level": "warning",
        "load_format": "auto" if list(Path(args.model).glob("*.safetensors")) else "dummy",
    }  # fmt: skip
    for pair in args.engine:
        key, _, value = pair.partition("=")
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments


def run(args: argparse.Namespace) -> None:
    """One engine, everything that was asked of it, one JSON file."""
    set_environment(args)
    import sglang

    arguments = engine_arguments(args)
    began = time.perf_counter()
    engine = sglang.Engine(**arguments)
    result: dict[str, Any] = {
        "tag": args.tag or Path(args.out).stem, "plugin": args.plugin, "settings": args.set, "engine": arguments,
        "start_s": time.perf_counter() - began, **where_and_when(),
    }  # fmt: skip
    try:
        result |= shared(engine, args) if args.shared else generated(engine, args)
        if args.then_load:
            updated, said, *_ = engine.update_weights_from_disk(args.then_load)
            if not updated:
                raise RuntimeError(f"SGLang did not load {args.then_load}: {said}")
            result["after_update"] = generated(engine, args)
        if args.stress:
            result["stress"] = engine.loop.run_until_complete(stress(engine, args))
        if args.profile:
            result["kernels_by_rank"] = profile(engine, args, ranks=int(arguments.get("tp_size", 1)))
            result["kernels"] = result["kernels_by_rank"]["TP-0"]
        if args.turns:
            serve(args.turns, result["tag"], {"seconds": timed(engine, args), "device": steps_of(engine, args)})
        time.sleep(2)  # a period of the metrics thread
        result["counters"] = counters()
    finally:
        engine.shutdown()
    Path(args.out).write_text(json.dumps(result, indent=1))
    say(json.dumps({name: result[name] for name in ("tag", "start_s", "counters")}, indent=1))


def set_environment(args: argparse.Namespace) -> None:
    """Before SGLang is imported: its processes inherit all of it. Other models' code is left out, half of the start."""
    os.environ.update(MULTICAST_OFF)
    package = importlib.util.find_spec("sglang")
    models = Path(package.origin).parent / "srt" / "models" if package and package.origin else Path()
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
        sorted(path.stem for path in models.glob("*.py") if not path.stem.startswith("qwen3_5"))
    )
    if args.plugin == "absent":
        os.environ["SGLANG_PLUGINS"] = "none"
    else:
        os.environ["QWEN35_SGLANG_PLUGIN"] = args.plugin
    for pair in args.set:
        name, _, value = pair.partition("=")
        os.environ[f"QWEN35_{name.upper()}"] = value
    if args.record:
        os.environ |= {DIRECTORY: str(Path(args.record).resolve()), CALLS: str(args.record_calls)}
    if args.record or args.extras:
        bring_extras(Path(tempfile.mkdtemp(prefix="qwen35-extras-")))


def generated(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy ids and the log-probabilities of prompts and outputs, one by one and in one batch."""
    greedy = {"temperature": 0.0, "max_new_tokens": args.new, "ignore_eos": True}
    asked = {"sampling_params": greedy, "return_logprob": True, "logprob_start_len": 0}
    ids = prompts(vocabulary_of(args.model))
    single = [engine.generate(input_ids=one, **asked) for one in ids]
    batch = engine.generate(input_ids=ids, **asked)
    return {
        "prompt_logprobs": logprobs_of(single, "input_token_logprobs"),
        "prompt_logprobs_batch": logprobs_of(batch, "input_token_logprobs"),
        "output_logprobs": logprobs_of(single, "output_token_logprobs"),
        "output_ids": [one["output_ids"] for one in single], "output_ids_batch": [one["output_ids"] for one in batch],
        "accepted": accepted([*single, *batch]),
    }  # fmt: skip


def accepted(outputs: list[Any]) -> dict[str, int]:
    """Speculative decoding: verified drafts, and the tokens that they gave."""
    said = [one["meta_info"] for one in outputs if one["meta_info"].get("spec_verify_ct")]
    return {
        "verify_calls": sum(one["spec_verify_ct"] for one in said),
        "tokens": sum(one["completion_tokens"] for one in said),
    }  # fmt: skip


async def stress(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Requests of mixed lengths at random times, a fifth of them cancelled; the others must equal a quiet run's ids.

    Those that are cancelled ask for ``LONG`` more tokens, so that they are not done by then; ``ended``: how many of
    them came back with fewer than they asked for. Names are of one length: SGLang ends every request whose name begins
    with the one that is to end.
    """
    source = random.Random(1)
    ids = prompts(vocabulary_of(args.model), tuple(source.choice((3, 17, 64, 130, 400)) for _ in range(args.stress)), 2)
    new = [source.randrange(1, 40) for _ in ids]
    cancelled = {i for i in range(len(ids)) if source.random() < 0.2}
    for i in cancelled:
        new[i] += LONG

    async def one(index: int, name: str, delay: float) -> list[int] | None:
        await asyncio.sleep(delay)
        params = {"temperature": 0.0, "max_new_tokens": new[index], "ignore_eos": True}
        wanted = asyncio.ensure_future(engine.async_generate(input_ids=ids[index], sampling_params=params, rid=name))
        if index in cancelled and name.startswith("busy"):
            await asyncio.sleep(source.random() * 0.2)
            engine.tokenizer_manager.abort_request(rid=name)
        try:
            return list((await wanted)["output_ids"])
        except (ValueError, asyncio.CancelledError):
            return None

    busy = await asyncio.gather(*(one(i, f"busy-{i:05d}", source.random() * args.stress / 50) for i in range(len(ids))))
    served = [i for i in range(len(ids)) if i not in cancelled]
    quiet = {i: await one(i, f"quiet-{i:05d}", 0.0) for i in served[:20]}
    return {
        "requests": len(ids), "cancelled": len(cancelled),
        "ended": sum(len(busy[i] or ()) < new[i] for i in cancelled), "of": len(served),
        "complete": sum(len(busy[i] or ()) == new[i] for i in served),
        "same_ids_as_alone": sum(busy[i] == quiet[i] for i in quiet), "compared_alone": len(quiet),
    }  # fmt: skip


def timed(engine: Any, args: argparse.Namespace) -> Callable[..., float]:
    """Seconds of one batch of prompts."""
    vocabulary = vocabulary_of(args.model)

    def seconds(batch: int, length: int, new: int, seed: int) -> float:
        ids = prompts(vocabulary, (length,) * batch, seed)
        began = time.perf_counter()
        engine.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True})
        return time.perf_counter() - began

    return seconds


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = whole.add_subparsers(required=True)

    def command(name: str, function: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=function.__doc__)
        one.set_defaults(function=function)
        return one

    one = command("make-model", make_model)
    one.add_argument("model")
    one.add_argument("--geometry", default="")
    one.add_argument("--layers", type=int, default=0)
    one.add_argument("--config-only", action="store_true")
    one.add_argument("--top-k", type=int, default=0, help="all experts: no token is near a choice of experts")
    one.add_argument("--scale", type=float, default=0.06, help="standard deviation of the weights")
    one.add_argument("--seed", type=int, default=0)
    one = command("truth", truth)
    one.add_argument("model")
    one.add_argument("--out", required=True)
    one.add_argument("--dtype", default="float32")
    one.add_argument("--new", type=int, default=16)
    one = command("judge", judge)
    one.add_argument("model")
    one.add_argument("results", nargs="+")
    one.add_argument("--dtype", default="float32")
    one = command("run", run)
    one.add_argument("model")
    one.add_argument("--out", required=True)
    one.add_argument("--tag", default="")
    one.add_argument("--plugin", choices=("on", "off", "absent"), default="on",
                     help="off: loaded, and does nothing; absent: SGLang loads no plugin at all")  # fmt: skip
    one.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE")
    one.add_argument("--engine", nargs="*", default=[], metavar="ARGUMENT=VALUE")
    one.add_argument("--new", type=int, default=16)
    one.add_argument("--batch", type=int, default=8, help="largest batch, and largest captured graph")
    one.add_argument("--context", type=int, default=2048)
    one.add_argument("--then-load", default="", metavar="DIR", help="update the weights from DIR and generate again")
    one.add_argument("--shared", action="store_true", help="prompts with shared prefixes, asked twice and in a batch")
    one.add_argument("--record", default="", metavar="DIR", help="record the first GDN calls; needs eager decode")
    one.add_argument("--record-calls", type=int, default=8, help="of each layer and phase")
    one.add_argument("--extras", action="store_true", help="bring the adapters 'wrong' and 'forgetful'")
    one.add_argument("--stress", type=int, default=0, metavar="REQUESTS")
    one.add_argument("--turns", default="", metavar="SOCKET", help="answer what engine_turns.py asks for")
    one.add_argument("--profile", action="store_true")
    one = command("compare", compare)
    one.add_argument("results", nargs="+")
    one.add_argument("--out", default="")
    return whole


if __name__ == "__main__":
    chosen = parser().parse_args()
    chosen.function(chosen)
