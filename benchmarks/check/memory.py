"""Memory of a running server: resident memory of its processes, and of the GPU."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

import psutil

from sglang_pat.bench.http_server import HttpServer

MIB = 1 << 20


class Memory(NamedTuple):
    """In MiB. host: by process title. device: used on all GPUs, by whomever; None without a GPU."""

    host: dict[str, float]
    device: float | None

    @property
    def schedulers(self) -> float:
        """Memory of the processes that plan and decode: one per rank."""
        return sum(size for title, size in self.host.items() if "scheduler" in title)


def memory_of(server: HttpServer) -> Memory:
    host: dict[str, float] = {}
    for pid in server.processes():
        try:
            process = psutil.Process(pid)
            words = process.cmdline()
            title = words[0] if words and words[0].startswith("sglang::") else "server"
            host[title] = host.get(title, 0) + process.memory_info().rss / MIB
        except psutil.NoSuchProcess:  # ended meanwhile
            continue
    return Memory(host, _device_memory())


def _device_memory() -> float | None:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    sizes = done.stdout.split()
    return sum(map(float, sizes)) if done.returncode == 0 and sizes else None
