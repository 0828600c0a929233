"""A real SGLang server with the plugin, over HTTP: what it says at its start, what it generates, and what /metrics has.

    python benchmarks/sglang_server.py DIR --out server.json --set gdn_decode=triton gdn_extend=triton \\
        [--against triton.json] [--engine port=31000]

DIR is a checkpoint of ``sglang_engine.py make-model``. ``--set`` are our settings, ``--engine`` SGLang's arguments, as
there; ``--against``: a result of ``sglang_engine.py run``, whose ids the server's are to equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import sglang_engine
from engine_compare import say
from engine_model import prompts, vocabulary_of, where_and_when

UP_S, ANSWER_S, END_S = 240.0, 60.0, 60.0
#: The counters' thread copies once a second.
COPIED_S = 3.0
PREFIX = "qwen35_"


def server_command(arguments: Mapping[str, Any]) -> list[str]:
    """``sglang.launch_server`` with SGLang's ``arguments``: of a flag that is false, none."""
    words = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def asked(address: str, body: Mapping[str, Any] | None = None, limit_s: float = ANSWER_S) -> str:
    """The server's answer to a GET, or to a POST of ``body``. Raises ``OSError``."""
    request = Request(address, headers={"Content-Type": "application/json"})
    with urlopen(request, None if body is None else json.dumps(body).encode(), timeout=limit_s) as answer:
        return str(answer.read().decode())


def wait_for(server: subprocess.Popen[bytes], address: str) -> None:
    """Until it answers. Raises ``RuntimeError`` where it ended or is late."""
    late = time.monotonic() + UP_S
    while server.poll() is None and time.monotonic() < late:
        with suppress(OSError):
            asked(f"{address}/health")
            return
        time.sleep(0.5)
    raise RuntimeError(f"no server at {address}: exit status {server.poll()} after at most {UP_S:.0f} s")


def generated(address: str, model: str, new: int) -> list[list[int]]:
    """Greedy ids of the prompts that engines are compared on, one by one."""
    params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
    bodies = [{"input_ids": ids, "sampling_params": params} for ids in prompts(vocabulary_of(model))]
    return [list(json.loads(asked(f"{address}/generate", body))["output_ids"]) for body in bodies]


def ours(metrics: str) -> dict[str, float]:
    """Of the text of /metrics, our counters."""
    lines = [line.rpartition(" ") for line in metrics.splitlines() if line.startswith(PREFIX)]
    return {name: float(value) for name, _, value in lines}


def said_of_us(log: str) -> list[str]:
    """The lines of the server's log that begin with our name, with the lines that go on from them."""
    found: list[str] = []
    inside = False
    for line in log.splitlines():
        if line.startswith("["):
            inside = line.partition("] ")[2].startswith("qwen35")
        if inside:
            found.append(line)
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One server, from its start to its end."""
    sglang_engine.set_environment(args)
    arguments = sglang_engine.engine_arguments(args)
    command, address = server_command(arguments), f"http://127.0.0.1:{arguments['port']}"
    log, began = Path(args.out).with_suffix(".log"), time.monotonic()
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for(server, address)
        up_s = time.monotonic() - began
        ids = generated(address, args.model, args.new)
        time.sleep(COPIED_S)
        metrics = ours(asked(f"{address}/metrics"))
        server.terminate()
        status = server.wait(END_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    return {
        "kind": "server", **where_and_when(), "server_command": shlex.join(["python", *command[1:]]),
        "settings": args.set, "up_s": up_s, "exit_status": status, "output_ids": ids, "metrics": metrics,
        "said": said_of_us(log.read_text(errors="replace")),
    }  # fmt: skip


def main() -> int:
    """Run it; 1 where its ids are others than those it is to equal, or /metrics has nothing of ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", required=True)
    parser.add_argument("--against", type=Path, help="a result with the ids to expect")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--engine", nargs="*", default=[], metavar="ARGUMENT=VALUE")
    asked_for = parser.parse_args()
    defaults = ["port=31000", "log_level=info"]
    args = sglang_engine.parser().parse_args([
        "run", asked_for.model, "--out", asked_for.out, "--set", *asked_for.set,
        "--engine", *defaults, *asked_for.engine,
    ])  # fmt: skip
    found = run(args)
    if asked_for.against:
        expected = json.loads(asked_for.against.read_text())["output_ids"]
        found |= {"expected_ids": expected, "same_ids": found["output_ids"] == expected}
    Path(asked_for.out).write_text(json.dumps(found, indent=1) + "\n")
    say(json.dumps({name: value for name, value in found.items() if name in ("up_s", "same_ids", "metrics")}, indent=1))
    return 0 if found["metrics"] and found.get("same_ids", True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
