"""Starts SGLang's server in its own process group, and waits for its HTTP interface.

`bench`, `check` and the serving benchmarks use this, with or without a GPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

_POLL_SECONDS = 0.5
_KILL_SECONDS = 60
_TAIL_CHARACTERS = 4000
_WRONG_USAGE = 2  # exit status of argparse


class RefusedArguments(RuntimeError):
    """The server has refused its command line. The message is the last line that it printed."""


@dataclass
class HttpServer:
    """A running server. log: the file with the output of all of its processes."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def is_ready(self) -> bool:
        """Return True if the server answers, False if it does not answer yet.

        If the server has ended, raises RefusedArguments if it refused its command line, else
        RuntimeError with the end of the log.
        """
        if self.process.poll() == _WRONG_USAGE:
            raise RefusedArguments(self.tail().rstrip().rpartition("\n")[2])
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{self.tail()}")
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/health", timeout=5).ok
        return False

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the server answers.

        If the server ends instead, raises RuntimeError with the end of the log. Raises TimeoutError
        after `seconds`.
        """
        wait_for_all({self.url: self}, seconds)

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-_TAIL_CHARACTERS:]

    def processes(self) -> list[int]:
        """Return the ids of processes in the server's group that are still running."""
        alive = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, OSError):
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid and state != "Z":
                    alive.append(int(entry.name))
        return alive

    def signal_all(self) -> None:
        """Send SIGKILL to all processes of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill all processes of the server, and wait until they no longer hold GPU memory.

        If some processes do not end, raises TimeoutError with their ids.
        """
        self.signal_all()
        self.process.wait()
        deadline = time.monotonic() + _KILL_SECONDS
        while alive := self.processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running {_KILL_SECONDS} s after SIGKILL: {alive}")
            time.sleep(0.1)


def wait_for_all(servers: Mapping[str, HttpServer], seconds: float) -> dict[str, float]:
    """Wait until all servers answer. Return the seconds that each server took, by name.

    If a server ends instead, raises RuntimeError with the end of its log. Raises TimeoutError after
    `seconds`.
    """
    begun = time.monotonic()
    ready: dict[str, float] = {}
    while True:
        for name, server in servers.items():
            if name not in ready and server.is_ready():
                ready[name] = time.monotonic() - begun
        late = servers.keys() - ready.keys()
        if not late:
            return ready
        if time.monotonic() - begun > seconds:
            tails = "\n".join(servers[name].tail() for name in sorted(late))
            raise TimeoutError(f"no answer of {sorted(late)} within {seconds} s:\n{tails}")
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def running_process(
    command: Sequence[str],
    arguments: Mapping[str, Any],
    log: Path,
    *,
    start_seconds: float | None,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Iterator[HttpServer]:
    """Run the server `command` until the block ends, with `arguments` as flags and a free port.

    arguments: keyword arguments of sglang.Engine. start_seconds: longest time to wait until the
    server answers; None: do not wait. environment: variables in addition to those of this process.
    flags: further flags. Raises like `wait_for_all`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    all_flags = [*as_flags({**arguments, "port": port}), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *all_flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    server = HttpServer(process, f"http://127.0.0.1:{port}", log)
    try:
        if start_seconds is not None:
            server.wait_until_ready(start_seconds)
        yield server
    finally:
        server.kill()


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments of sglang.Engine as command-line flags.

    A switch that is False is left out. A list is a flag with several values.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not False:
            flags += [flag, str(value)]
    return flags
