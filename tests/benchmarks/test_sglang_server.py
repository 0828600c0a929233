"""The server's benchmark: SGLang's own parser takes its command, and what the server says is read as it is."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import sglang_engine
import sglang_server

METRICS = """# HELP qwen35_calls_total calls
sglang:num_requests_total{model="m"} 3.0
qwen35_calls_total{adapter="triton",phase="decode"} 7.0
qwen35_fallbacks_total{reason="x requires y, got z"} 1.0
"""
LOG = """INFO: started
[2026-12-01 03:31:57] qwen35 inside SGLang 0.5.20
  decode: triton
[2026-12-01 03:31:58] Capture cuda graph begin of /models/qwen35
  of eight
[2026-12-01 03:31:59] qwen35: stopped
"""


@pytest.fixture
def address() -> Iterator[str]:
    """A server that answers as SGLang's does; of each prompt the length is its one id."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(METRICS if self.path == "/metrics" else "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            params = body["sampling_params"]
            assert params["temperature"] == 0.0
            self.answer(json.dumps({"output_ids": [len(body["input_ids"])] * params["max_new_tokens"]}))

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Silent."""

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_sglangs_own_parser_takes_the_command(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    from sglang.srt.server_args import ServerArgs

    asked = sglang_engine.parser().parse_args(
        ["run", str(tmp_path), "--out", "o", "--engine", "port=31000", "disable_radix_cache=false"]
    )
    arguments = sglang_engine.engine_arguments(asked)
    known = argparse.ArgumentParser()
    ServerArgs.add_cli_args(known)
    _, _, launched, *words = sglang_server.server_command(arguments)
    assert launched == "sglang.launch_server"
    parsed = vars(known.parse_args(words))
    assert {name: parsed[name] for name in arguments} == arguments


def test_a_server_is_asked_for_the_ids_of_every_prompt_and_for_our_counters(address: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        sglang_server.wait_for(server, address)
    assert sglang_server.generated(address, str(tmp_path), 2) == [[n, n] for n in (5, 17, 64, 200, 3, 130, 700)]
    assert sglang_server.ours(sglang_server.asked(f"{address}/metrics")) == {
        'qwen35_calls_total{adapter="triton",phase="decode"}': 7.0,
        'qwen35_fallbacks_total{reason="x requires y, got z"}': 1.0,
    }


def test_a_server_that_ended_is_not_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as server:
        server.wait()
        with pytest.raises(RuntimeError, match="exit status 3"):
            sglang_server.wait_for(server, "http://127.0.0.1:9")


def test_what_our_logger_said_is_kept_with_its_further_lines() -> None:
    assert sglang_server.said_of_us(LOG) == [
        "[2026-12-01 03:31:57] qwen35 inside SGLang 0.5.20",
        "  decode: triton",
        "[2026-12-01 03:31:59] qwen35: stopped",
    ]
