"""Requests of the engine tests, and SGLang engines and servers with the tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pkgutil
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import requests
import sglang
from fakes.cuda_graphs import act_out_graphs
from fakes.forks import ForkedServer, forked_processes
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from common.tiny_model import NUM_SPECIAL_TOKENS, TinyModel
from sglang_pat.bench.http_server import HttpServer, as_flags

START_SECONDS = 300  # a busy machine of two cores needs a minute and a half

TINY = TinyModel(num_layers=2, seed=27)  # the fixture `expected` has its answers
HAS_BEAMS = "beam_width" in inspect.signature(SamplingParams).parameters  # not in 0.5.17

# Every scheduler imports all of SGLang's models, which takes 9 of the 20 s of its start. The tests
# need two models.
_MODELS = pkgutil.iter_modules([str(Path(sglang.__file__).parent / "srt" / "models")])
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
    each.name for each in _MODELS if each.name not in ("llama", "qwen3")
)


class EngineDied(BaseException):
    """A process of the engine died. Its traceback is in the captured output."""


def _raise_engine_died(signum: int, frame: FrameType | None) -> None:
    raise EngineDied


class _SignalHandler:
    """Replaces SGLang's handler, which kills the test run when a process of the engine dies."""

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
    """A prompt, the length of its answer, and a stop token."""

    prompt: list[int]
    num_tokens: int
    stop: int | None = None
    num_answers: int = 1
    beam_width: int | None = None

    @property
    def sampling_params(self) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": self.num_tokens, "n": self.num_answers}
        if self.stop is not None:
            params["stop_token_ids"] = [self.stop]
        if self.beam_width is not None:  # not in 0.5.17
            params["beam_width"] = self.beam_width
        return params


class Workload:
    """Seeded requests, the same for every engine; the names say what they test."""

    def __init__(self) -> None:
        self._random = random.Random(3)
        system = self._tokens(160)
        tools = [system + self._tokens(48) for _ in range(3)]
        # Staggered lengths let requests leave one by one.
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
        # More requests than rows: each row is reused as soon as it is free.
        self.crowd = [Request(tools[i % 3] + self._tokens(3 + i), 10 + i % 7) for i in range(16)]
        self.long_prompts = [Request(tools[0] + self._tokens(300 + 40 * i), 12) for i in range(3)]
        # Together longer than a small pool.
        self.long_answers = [Request(system + self._tokens(10 + i), 120) for i in range(6)]
        # Enough to keep the microbatches of a pipeline full.
        self.many = [Request(tools[i % 3] + self._tokens(4 + i % 9), 40) for i in range(72)]
        # The turns of three conversations.
        self.conversations = [
            [Request(opening + self._tokens(9 + i), 30), *self._turns(3)]
            for i, opening in enumerate((system, system, other_root))
        ]
        self.beams = Request(system + self._tokens(12), 24, num_answers=2, beam_width=3)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(NUM_SPECIAL_TOKENS, TINY.vocab_size), k=count)

    def _turns(self, count: int) -> list[Request]:
        return [Request(self._tokens(8 + 3 * i), 20 + i) for i in range(count)]

    def all(self) -> list[Request]:
        """All requests outside of conversations, except `many`."""
        others = ("_random", "many", "conversations", "beams")
        groups = [group for name, group in vars(self).items() if name not in others]
        return [request for group in groups for request in group]


@dataclass
class Expected:
    """SGLang's own answers, and the smallest gap between two tokens."""

    tokens: dict[tuple[tuple[int, ...], int, int | None], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, ...], list[float]] = field(default_factory=dict)  # by prompt
    beams: list[list[int]] = field(default_factory=list)  # the returned beams, best first
    smallest_gap: float = float("inf")  # in log-probability, between the best and the second token

    def of(self, request: Request) -> list[int]:
        return self.tokens[tuple(request.prompt), request.num_tokens, request.stop]

    def logprobs_of(self, request: Request) -> list[float]:
        """Return the log-probability of each token of the answer."""
        return self.logprobs[tuple(request.prompt)][: request.num_tokens]

    def in_conversation(self, turns: Sequence[Request]) -> list[Request]:
        """Return the turns as single requests, whose prompts repeat the conversation so far."""
        whole: list[Request] = []
        said: list[int] = []
        for turn in turns:
            whole.append(Request(said + turn.prompt, turn.num_tokens))
            if (tuple(whole[-1].prompt), turn.num_tokens, None) not in self.tokens:
                break
            said = whole[-1].prompt + self.of(whole[-1])
        return whole

    def record(self, requests_: Sequence[Request], answers: Sequence[dict[str, Any]]) -> None:
        for request, answer in zip(requests_, answers, strict=True):
            key = (tuple(request.prompt), request.num_tokens, request.stop)
            self.tokens[key] = answer["output_ids"]
            best_of_each = [best for best, *_ in answer["meta_info"]["output_top_logprobs"]]
            self.logprobs[key[0]] = [logprob for logprob, *_ in best_of_each]
            for best, second, *_ in answer["meta_info"]["output_top_logprobs"]:
                self.smallest_gap = min(self.smallest_gap, best[0] - second[0])

    def ask(self, engine: Any, requests_: Sequence[Request]) -> None:
        """Record the engine's answers."""
        top_two = {"return_logprob": True, "top_logprobs_num": 2}
        self.record(requests_, generate(engine, requests_, **top_two))


def load_weights(engine: Any, model: Path) -> None:
    """Replace the weights of an idle engine, which empties its cache."""
    flush(engine)  # waits until the engine is idle
    update = UpdateWeightFromDiskReqInput(model_path=str(model))
    success, message, *_ = run(
        engine, engine.tokenizer_manager.update_weights_from_disk(update, None)
    )
    assert success, message


def expected_answers(engine: Any, workload: Workload) -> Expected:
    """Return an engine's answers to the whole workload, conversations turn by turn."""
    expected = Expected()
    expected.ask(engine, workload.all())
    for turn in range(max(map(len, workload.conversations))):
        told = [expected.in_conversation(turns) for turns in workload.conversations]
        expected.ask(engine, [requests_[turn] for requests_ in told if turn < len(requests_)])
    if HAS_BEAMS:
        expected.beams = beams(generate(engine, [workload.beams]))
    return expected


def beams(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of all returned beams."""
    return [
        beam["output_ids"] for answer in answers for beam in answer["meta_info"]["beam_results"]
    ]


@contextlib.contextmanager
def running_engine(model: Path, backend: str | None, **arguments: Any) -> Iterator[Any]:
    """Yield a sglang.Engine of this process and its children."""
    with forked_processes():
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


@contextlib.contextmanager
def running_pat_engine(
    model: Path,
    folder: Path,
    *,
    backend: str | None = "pat",
    has_graphs: bool = False,
    **arguments: Any,
) -> Iterator[tuple[Any, Stats]]:
    """Yield an engine that decodes with `pat` and checks every step, and its statistics.

    has_graphs: simulate CUDA graphs (`fakes.cuda_graphs`) instead of checking steps.
    """
    stats_file = folder / "stats.json"
    with pytest.MonkeyPatch.context() as environment:
        if has_graphs:  # debug mode reuses no plan
            act_out_graphs(folder, environment)
        environment.setenv("SGLANG_PAT_DEBUG", str(int(not has_graphs)))
        environment.setenv("SGLANG_PAT_STATS_FILE", str(stats_file))
        with running_engine(model, backend, **arguments) as engine:
            state = engine.tokenizer_manager.get_internal_state
            yield engine, Stats(stats_file, lambda: run(engine, state()))


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
    """Send all requests at once; return their answers in order."""
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
    """Empty the radix cache. The engine refuses until it has processed its last step."""
    deadline = time.monotonic() + 30
    while not run(engine, engine.tokenizer_manager.flush_cache()).success:
        assert time.monotonic() < deadline, "the engine does not become idle"
        time.sleep(0.1)


def tokens(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


async def start(engine: Any, request: Request, **more: Any) -> AsyncIterator[dict[str, Any]]:
    """Stream the answer to a request."""
    stream: AsyncIterator[dict[str, Any]] = await engine.async_generate(
        input_ids=request.prompt, sampling_params=request.sampling_params, stream=True, **more
    )
    return stream


def run(engine: Any, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return a coroutine's result. Raises EngineDied if the engine has died or dies meanwhile."""
    if engine.tokenizer_manager.has_died:
        coroutine.close()
        raise EngineDied
    try:
        return engine.loop.run_until_complete(asyncio.wait_for(coroutine, timeout=180))
    except asyncio.CancelledError:
        raise EngineDied from None


class Stats:
    """The counters of an engine's backend since the last call of `new()`."""

    def __init__(self, path: Path, ask: Callable[[], object]) -> None:
        """path: the stats file. ask: asks the scheduler, which then writes the file."""
        self._path, self._ask = path, ask
        self._before: dict[str, Any] = {}

    def new(self) -> dict[str, Any]:
        self._ask()
        now = json.loads(self._path.read_text())
        before, self._before = self._before, now
        counted = {
            name: value - before.get(name, 0) for name, value in now.items() if type(value) is int
        }
        for name in ("causes", "steps_without_sharing", "tree_events", "batch_changes"):
            counted[name] = Counter(now[name]) - Counter(before.get(name, {}))
        return counted


class Server(HttpServer):
    """A server that answers requests of the workload."""

    def generate(self, request: Request) -> list[int]:
        body = {"input_ids": request.prompt, "sampling_params": request.sampling_params}
        response = requests.post(f"{self.url}/generate", json=body, timeout=120)
        response.raise_for_status()
        answer: list[int] = response.json()["output_ids"]
        return answer

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = requests.get(f"{self.url}/server_info", timeout=30).json()
        return info

    def metrics(self) -> list[Sample]:
        """Return all samples of /metrics."""
        response = requests.get(f"{self.url}/metrics", timeout=30)
        response.raise_for_status()
        families = text_string_to_metric_families(response.text)
        return [sample for family in families for sample in family.samples]


@contextlib.contextmanager
def running_server(
    command: Sequence[str], model: Path, log: Path, **arguments: Any
) -> Iterator[Server]:
    """Run `command --model-path ...` until the block ends; yield the server when it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"model_path": model, "port": port} | COMMON_ARGUMENTS | arguments
    process: Any = ForkedServer([*command, *as_flags(given)], log)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_until_ready(START_SECONDS)
        yield server
    finally:
        server.kill()


LAUNCH_SERVER = (str(Path(sglang.__file__).parent / "launch_server.py"),)
SGLANG_SERVE = (str(Path(sys.executable).parent / "sglang"), "serve")
