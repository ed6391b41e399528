"""An SGLang server whose attention backend is one of the contenders, and requests to the server.

Clients send requests over HTTP: one start of the server is enough for all measurements, and the
client runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import requests

from sglang_pat.bench.http_server import HttpServer, running_process, wait_for_all

START_SECONDS = 420  # with FlashInfer, the server compiles kernels before it answers
ANSWER_SECONDS = 600  # FlashInfer also compiles for each new shape
MAX_RUNNING_REQUESTS = 256
LAUNCH = (sys.executable, "-m", "sglang_pat.sglang.cpu")


@dataclass(frozen=True, slots=True)
class Contender:
    """A kind of server to measure.

    name: for tables. backend: SGLang's name of the attention backend; None: SGLang's choice.
    environment: environment variables of the server.
    """

    name: str
    backend: str | None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_pat(self) -> bool:
        return self.backend == "pat"


# `pat-replan` makes a new plan in every other step, to measure the cost of planning.
REPLAN = Contender("pat-replan", "pat", {"SGLANG_PAT_GROWTH_TOKENS": "1"})
DEFAULT = Contender("default", None)
_SPECIAL = {special.name: special for special in (REPLAN, DEFAULT)}


def contender(name: str) -> Contender:
    """Return a contender. name: `pat-replan`, `default`, or SGLang's name of a backend."""
    return _SPECIAL.get(name, Contender(name, name))


def sampling_of(num_tokens: int, temperature: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return SGLang's sampling parameters for an answer of exactly this many tokens."""
    return {"temperature": temperature, "max_new_tokens": num_tokens, "ignore_eos": True, **more}


class Server:
    """A running server. `stats_file`: the file to which pat writes its counters."""

    def __init__(self, process: HttpServer, stats_file: Path | None) -> None:
        self.process = process
        self.url = process.url
        self.stats_file = stats_file

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Any, **more: Any
    ) -> list[dict[str, Any]]:
        """Send all prompts as one batch. Return the answers in the same order.

        sampling: parameters for all prompts, or a list with parameters for each.
        """
        body = {"input_ids": prompts, "sampling_params": sampling, **more}
        answers: list[dict[str, Any]] = orjson.loads(self._post("generate", body).content)
        return answers

    def answer(self, prompt: Sequence[int], sampling: Any, **more: Any) -> dict[str, Any]:
        """Return the answer to one prompt. After an abort, the answer has the tokens so far."""
        body = {"input_ids": prompt, "sampling_params": sampling, **more}
        answer: dict[str, Any] = orjson.loads(self._post("generate", body).content)
        return answer

    def stream(self, prompts: Sequence[Sequence[int]], sampling: Any) -> Iterator[dict[str, Any]]:
        """Yield each answer whenever it has grown; `index` is the index of its prompt."""
        body = {"input_ids": prompts, "sampling_params": sampling, "stream": True}
        with self._post("generate", body, stream=True) as response:
            try:
                for line in response.iter_lines():
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield orjson.loads(line.removeprefix(b"data: "))
            except requests.RequestException as error:
                raise RuntimeError(f"stream: {error}\n{self.process.tail()}") from error

    def flush(self) -> None:
        """Empty the radix cache, after the last step has ended."""
        self._post("flush_cache?timeout=30", {})

    def abort(self, rid: str) -> None:
        self._post("abort_request", {"rid": rid})

    def release_memory(self) -> None:
        """Make a server with `enable_memory_saver` free the GPU memory of weights and KV pool."""
        self.flush()  # waits until the server is idle
        self._post("release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def resume_memory(self, tag: str) -> None:
        """Make the server allocate memory again. tag: `weights` or `kv_cache`."""
        self._post("resume_memory_occupation", {"tags": [tag]})

    def update_weights(self, serialized: str) -> None:
        """Send the server new weights, which empties its cache.

        serialized: names and tensors, pickled for another process, in base64.
        """
        try:
            self._post("begin_weight_update", {})
            has_sessions = True
        except RuntimeError as error:  # SGLang 0.5.17 lacks this endpoint
            if not str(error).startswith("begin_weight_update: 404"):
                raise
            has_sessions = False
        self._post("update_weights_from_tensor", {"serialized_named_tensors": [serialized]})
        if has_sessions:
            self._post("end_weight_update", {})

    def start_profile(self, **options: Any) -> None:
        """Start a profile. options: those of SGLang's ProfileReq."""
        self._post("start_profile", options)

    def info(self) -> dict[str, Any]:
        """Return SGLang's server info, which has all resolved arguments."""
        response = requests.get(f"{self.url}/server_info", timeout=ANSWER_SECONDS)
        response.raise_for_status()
        info: dict[str, Any] = response.json()
        return info

    def stats(self) -> dict[str, Any]:
        """Return pat's counters, which include all steps of the answers received so far.

        Returns {} if the server runs without pat, or if pat decodes no layer.
        """
        # info() makes the scheduler write the file.
        if self.stats_file is None or not self.info()["pat"]["pat_layers"]:
            return {}
        stats: dict[str, Any] = json.loads(self.stats_file.read_text())
        return stats

    def _post(self, path: str, body: dict[str, Any], *, stream: bool = False) -> requests.Response:
        """Send a request. If it fails, raise RuntimeError with the answer or the end of the log."""
        try:
            response = requests.post(
                f"{self.url}/{path}",
                data=orjson.dumps(body),
                headers={"Content-Type": "application/json"},
                timeout=ANSWER_SECONDS,
                stream=stream,
            )
        except requests.RequestException as error:
            raise RuntimeError(f"{path}: {error}\n{self.process.tail()}") from error
        if not response.ok:
            raise RuntimeError(f"{path}: {response.status_code} {response.text}")
        return response


@contextlib.contextmanager
def running_server(
    contender: Contender,
    model: Path,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    name: str | None = None,
    wait: bool = True,
    flags: Sequence[str] = (),
    **arguments: Any,
) -> Iterator[Server]:
    """Run a server until the block ends.

    Parameters
    ----------
    contender
        The server's backend.
    model
        The folder of the model.
    folder
        The folder for the log and pat's counters.
    environment
        Environment variables in addition to the contender's.
    name
        Name of the files in `folder`. None: the contender's name.
    wait
        Whether to wait until the server answers. Otherwise call `http_server.wait_for_all`.
    flags
        Flags at the end of the server's command line.
    arguments
        Arguments of sglang.Engine.

    Raises
    ------
    RuntimeError, TimeoutError
        The server does not start. The message has the end of the log.
    """
    # On SIGTERM, a benchmark must also end its servers, which are in other process groups.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    name = contender.name if name is None else name
    stats_file = folder / f"{name}-stats.json" if contender.is_pat else None
    variables = {"HF_HUB_OFFLINE": "1", **contender.environment, **(environment or {})}
    if stats_file is not None:
        variables["SGLANG_PAT_STATS_FILE"] = str(stats_file)
    if contender.backend is not None:
        arguments = {"attention_backend": contender.backend, **arguments}
    arguments = {
        "model_path": model,
        "max_running_requests": MAX_RUNNING_REQUESTS,
        "random_seed": 1,
        "log_level": "warning",
        **arguments,
    }
    log = folder / f"{name}.log"
    seconds = START_SECONDS if wait else None
    off = [f"--off={switch}" for switch, value in arguments.items() if value is False]
    with running_process(
        [*LAUNCH, *off], arguments, log, flags=flags, start_seconds=seconds, environment=variables
    ) as process:
        yield Server(process, stats_file)


def unused_ports(count: int) -> list[int]:
    """Return ports that no outgoing connection can take before a server listens on them.

    SGLang 0.5.17 chooses a port from the kernel's ephemeral range, and listens on it seconds later.
    If several servers start together, some then find their port in use.
    """
    candidates = random.sample(range(20_000, 30_000), 100)
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in candidates:
            if len(found) == count:
                break
            listener = stack.enter_context(socket.socket())
            try:
                listener.bind(("", port))
            except OSError:
                continue
            found.append(port)
        return found


class Start(NamedTuple):
    """Arguments of `running_server` for one of several servers."""

    contender: Contender
    model: Path
    arguments: dict[str, Any]
    environment: dict[str, str]


@contextlib.contextmanager
def running_servers(
    starts: Mapping[str, Start], folder: Path, *, wait: bool = True
) -> Iterator[dict[str, Server]]:
    """Start servers at the same time, and run them until the block ends.

    The servers share the device, so each needs `max_total_tokens`. Otherwise the size of a server's
    KV pool would depend on the memory that the other servers leave free. If this process gets
    SIGTERM, it prints the end of each log.

    Parameters
    ----------
    starts
        The servers to start, by name.
    folder
        The folder for logs and pat's counters.
    wait
        Whether to wait until all servers answer.

    Raises
    ------
    ValueError, RuntimeError, TimeoutError
        `max_total_tokens` is missing or, with `wait`, a server does not start.
    """
    for name, start in starts.items():
        if "max_total_tokens" not in start.arguments:
            raise ValueError(f"{name}: servers that share a device need max_total_tokens")
    ports = unused_ports(len(starts))
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for port, (name, start) in zip(ports, starts.items(), strict=True):
            contender, model, arguments, environment = start
            # With data parallelism, each group needs a port, and SGLang finds those ports itself.
            own_port = {} if "dp_size" in arguments else {"nccl_port": port}
            more = {"environment": environment, "name": name, "wait": False}
            options = {**own_port, **arguments, **more}
            server = running_server(contender, model, folder, **options)
            servers[name] = stack.enter_context(server)
        # After the block, these callbacks run before any server is waited for, because each server
        # takes time to free GPU memory.
        for started in servers.values():
            stack.callback(started.process.signal_all)
        try:
            if wait:
                processes = {name: server.process for name, server in servers.items()}
                wait_for_all(processes, START_SECONDS)
            yield servers
        except SystemExit:  # on SIGTERM, e.g. after a time limit
            for name, each in servers.items():
                print(f"--- the log of {name} ends:\n{each.process.tail()}", file=sys.stderr)
            raise
