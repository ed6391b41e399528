"""What the engine tests send, and how: real SGLang engines and servers on the tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import requests
import sglang
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from serving.http_server import HttpServer, running_process

from sglang_pat.cli.demo.tiny_model import NUM_SPECIAL_TOKENS, TinyModel
from sglang_pat.sglang.sinks import read_stats

START_SECONDS = 300  # a busy machine of two cores needs a minute and a half


class EngineDied(BaseException):
    """A process of the engine died. Its traceback is in the captured output."""


def _raise_engine_died(signum: int, frame: FrameType | None) -> None:
    raise EngineDied


class _SignalHandler:
    """In place of SGLang's own, which kills the test run when a process of the engine dies."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager

    def sigterm_handler(self, *args: object) -> None:
        raise SystemExit

    def running_phase_sigquit_handler(self, *args: object) -> None:
        self._manager.has_died = True
        for task in asyncio.all_tasks(self._manager.event_loop):
            task.cancel()


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens to answer it with, and a token that ends the answer."""

    prompt: list[int]
    num_tokens: int
    stop: int | None = None

    @property
    def sampling_params(self) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": self.num_tokens}
        return params if self.stop is None else params | {"stop_token_ids": [self.stop]}


class Workload:
    """The same requests for every engine. Seeded; named by what they are to show."""

    def __init__(self) -> None:
        self._random = random.Random(3)
        system = self._tokens(160)
        tools = [system + self._tokens(48) for _ in range(3)]
        # Staggered lengths, so that requests leave one by one.
        self.three_levels = [
            Request(tools[i % 3] + self._tokens(5 + 3 * i), 12 + 4 * i) for i in range(9)
        ]
        other_root = self._tokens(90)
        self.two_roots = [
            Request((system if i % 2 else other_root) + self._tokens(7 + i), 16) for i in range(6)
        ]
        self.no_sharing = [Request(self._tokens(30 + 20 * i), 16) for i in range(4)]
        same = self._tokens(75)
        self.identical = [Request(same, 20)] * 4
        # More than the engines run at once: rows are taken over as soon as they are free.
        self.crowd = [Request(tools[i % 3] + self._tokens(3 + i), 10 + i % 7) for i in range(16)]
        self.long_prompts = [Request(tools[0] + self._tokens(300 + 40 * i), 12) for i in range(3)]
        # Outgrow a small pool together.
        self.long_answers = [Request(system + self._tokens(10 + i), 120) for i in range(6)]

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(NUM_SPECIAL_TOKENS, TinyModel().vocab_size), k=count)

    def all(self) -> list[Request]:
        groups: list[list[Request]] = [g for g in vars(self).values() if isinstance(g, list)]
        return [request for group in groups for request in group]


@dataclass
class Expected:
    """SGLang's own answers, and how clear-cut they are."""

    tokens: dict[tuple[tuple[int, ...], int, int | None], list[int]] = field(default_factory=dict)
    smallest_gap: float = float("inf")  # in log-probability, between the best and the second token

    def of(self, request: Request) -> list[int]:
        return self.tokens[tuple(request.prompt), request.num_tokens, request.stop]

    def record(self, requests_: Sequence[Request], answers: Sequence[dict[str, Any]]) -> None:
        for request, answer in zip(requests_, answers, strict=True):
            key = (tuple(request.prompt), request.num_tokens, request.stop)
            self.tokens[key] = answer["output_ids"]
            for best, second, *_ in answer["meta_info"]["output_top_logprobs"]:
                self.smallest_gap = min(self.smallest_gap, best[0] - second[0])


@contextlib.contextmanager
def running_engine(model: Path, backend: str, **arguments: Any) -> Iterator[Any]:
    """A sglang.Engine in this process and its children."""
    engine = sglang.Engine(
        model_path=str(model),
        attention_backend=backend,
        custom_sigquit_handler=_raise_engine_died,
        **(COMMON_ARGUMENTS | arguments),
    )
    engine.tokenizer_manager.signal_handler_class = _SignalHandler
    engine.tokenizer_manager.has_died = False
    try:
        yield engine
    finally:
        engine.shutdown()


COMMON_ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "device": "cpu",
    "disable_cuda_graph": True,
    "random_seed": 0,
    "sleep_on_idle": True,
    "log_level": "warning",
}


def generate(engine: Any, requests_: Sequence[Request], **more: Any) -> list[dict[str, Any]]:
    """Send all requests at once; their answers in order."""
    answers: list[dict[str, Any]] = run(
        engine,
        engine.async_generate(
            input_ids=[request.prompt for request in requests_],
            sampling_params=[request.sampling_params for request in requests_],
            **more,
        ),
    )
    return answers


def flush(engine: Any) -> None:
    """Empty the radix cache. The engine refuses until its last step has been dealt with."""
    deadline = time.monotonic() + 30
    while not run(engine, engine.tokenizer_manager.flush_cache()).success:
        assert time.monotonic() < deadline, "the engine does not become idle"
        time.sleep(0.1)


def tokens(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


async def start(engine: Any, request: Request, **more: Any) -> AsyncIterator[dict[str, Any]]:
    """The answers to one request as they grow."""
    stream: AsyncIterator[dict[str, Any]] = await engine.async_generate(
        input_ids=request.prompt, sampling_params=request.sampling_params, stream=True, **more
    )
    return stream


def run(engine: Any, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The coroutine's result; EngineDied if the engine has died or dies meanwhile."""
    if engine.tokenizer_manager.has_died:
        coroutine.close()
        raise EngineDied
    try:
        return engine.loop.run_until_complete(asyncio.wait_for(coroutine, timeout=180))
    except asyncio.CancelledError:
        raise EngineDied from None


class Stats:
    """What the backend of one engine has counted since the last call of `new()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before: dict[str, Any] = {}

    def new(self) -> dict[str, Any]:
        now = read_stats(self.path)
        before, self._before = self._before, now
        return {
            name: value - before.get(name, 0) for name, value in now.items() if type(value) is int
        } | {"causes": now["causes"], "private_steps": now["private_steps"]}


class Server(HttpServer):
    """A server that answers requests of the workload."""

    def generate(self, request: Request) -> list[int]:
        body = {"input_ids": request.prompt, "sampling_params": request.sampling_params}
        response = requests.post(f"{self.url}/generate", json=body, timeout=120)
        response.raise_for_status()
        answer: list[int] = response.json()["output_ids"]
        return answer

    def metrics(self) -> list[Sample]:
        """Everything on the page of metrics."""
        response = requests.get(f"{self.url}/metrics", timeout=30)
        response.raise_for_status()
        families = text_string_to_metric_families(response.text)
        return [sample for family in families for sample in family.samples]


@contextlib.contextmanager
def running_server(
    command: Sequence[str], model: Path, log: Path, **arguments: Any
) -> Iterator[Server]:
    """`command --model-path ...` until the block ends, ready to be asked."""
    arguments = {"model_path": model} | COMMON_ARGUMENTS | arguments
    with running_process(command, arguments, log, start_seconds=START_SECONDS) as process:
        yield Server(process.process, process.url, process.log)


LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
SGLANG_SERVE = (str(Path(sys.executable).parent / "sglang"), "serve")
