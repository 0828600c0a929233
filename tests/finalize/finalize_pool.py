"""A standing pool of rank processes: the parent draws and asserts, the workers execute.

A task is a module-level function ``task(ranked, *arguments)``; every rank runs it with the same arguments.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: NVLink multicast stays off in every test.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass
class Ranked:
    """What a task finds in its process; ``kept`` lives from task to task."""

    rank: int
    size: int
    device: str
    group: Any
    kept: dict[str, Any] = field(default_factory=dict)


class Pool:
    """``size`` processes on gloo over the loopback interface, or on NCCL with one GPU each."""

    def __init__(self, size: int, backend: str = "gloo", timeout_s: float = 120.0) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.size, self._timeout = size, timeout_s
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, port, backend, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Every rank's result, in rank order. Raises ``AssertionError`` with a worker's traceback, or where one
        does not answer in time."""
        for pipe in self._pipes:
            pipe.send((task, arguments))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._timeout):
                failures.append(f"rank {rank} did not answer within {self._timeout} s")
                continue
            ok, value = pipe.recv()
            (results if ok else failures).append(value if ok else f"rank {rank}:\n{value}")
        assert not failures, "\n".join(failures)
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _work(rank: int, size: int, port: int, backend: str, pipe: Connection) -> None:
    address = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(MULTICAST_OFF | address)
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, rank=rank, world_size=size, timeout=timedelta(seconds=60),
        device_id=torch.device(device) if backend == "nccl" else None,
    )  # fmt: skip
    ranked = Ranked(rank, size, device, dist.group.WORLD)
    while True:
        request = pipe.recv()
        if request is None:
            break
        task, arguments = request
        try:
            pipe.send((True, task(ranked, *arguments)))
        except Exception:  # noqa: BLE001 - the parent shows it
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
