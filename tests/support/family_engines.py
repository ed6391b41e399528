"""Engines of the small models of `model_families`, forked from one process.

Most of an engine's start is the import of SGLang in each of its processes. Here one process imports
SGLang and forks a child for each engine, which starts in a second or two.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import math
import os
import pkgutil
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # pytest sets this path in the test process
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]

from model_families import FAMILIES, VOCAB_SIZE, Family

IMPORT_SECONDS, RUN_SECONDS = 300, 150  # on a busy machine; 10 and 3 on an idle one
NUM_TOKENS = 24
PREFIX = 100  # common tokens at the start of all prompts
_CALLS = "FAMILY_CALLS_FILE"


@dataclass(frozen=True)
class Run:
    """Answers of an engine, and records of the run.

    tokens: one answer per prompt. verify_steps: number of verify steps of each answer;
    first_verify_steps: of the first prompt, which is sent alone before the others. retractions:
    number of retracted requests. from_host: prompt tokens whose KV was loaded from the host tier of
    the cache. aborted: number of requests aborted mid-answer. smallest_gap: smallest difference in
    log-probability between the best and the second token. calls: ("pat" or "default", layer id) ->
    number of decode or verify calls; draft_calls: the same for a draft model. routes: pat's report
    in the server info. stats: pat's counters of the whole run. log: output of the engine's
    processes.
    """

    tokens: list[list[int]]
    verify_steps: list[int]
    first_verify_steps: int
    retractions: int
    from_host: int
    aborted: int
    smallest_gap: float
    calls: Counter[tuple[str, int]]
    draft_calls: Counter[tuple[str, int]]
    routes: dict[str, Any] | None
    stats: dict[str, Any]
    log: str

    def layers_of(self, route: str) -> tuple[int, ...]:
        """Return the ids of the layers that this backend decoded, in order."""
        return tuple(sorted(layer for who, layer in self.calls if who == route))


@dataclass(frozen=True)
class Asked:
    """Options of a run.

    stop_tokens: one stop token for each prompt. ranks: environment of several ranks
    (`environment_of_ranks`). answers: known answers, for right drafts (`fakes.draft_blocks`).
    environment: SGLang's variables. has_graphs: simulate CUDA graphs (`fakes.cuda_graphs`); steps
    are then unchecked, since debug mode reuses no plan, and every other prompt is sent twice, so
    that duplicate KV is computed and freed. aborts: first send all prompts while copies of them are
    aborted. conversations: prompts start conversations, whose answers are concatenated; in "whole"
    conversations a turn repeats the earlier text, in "session" and "streaming" ones SGLang keeps it
    ("streaming" with its KV, corrected for drafts by `fakes.speculation`). evictions: send the
    prompts twice, and in between others that fill the pool.
    """

    stop_tokens: list[int] | None = None
    ranks: dict[str, str] | None = None
    answers: list[list[int]] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    has_graphs: bool = False
    aborts: bool = False
    conversations: str | None = None
    evictions: bool = False


class EngineFailed(RuntimeError):
    """The engine gave no answers. The message is its log."""


class FamilyEngines:
    """Starts engines one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._alone: dict[str, Run] = {}
        self._log = (folder / "imports.log").open("w")
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            assert self._answer(IMPORT_SECONDS) == "ready"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; no engine may be running."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def alone(self, family: Family) -> Run:
        """Answer the prompts on SGLang's default backend without options; cached for all tests."""
        if family.name not in self._alone:
            self._alone[family.name] = self.run(family, None)
        return self._alone[family.name]

    def run(self, family: Family, backend: str | None, **options: Any) -> Run:
        """Answer the prompts with an engine of this family.

        backend: None is SGLang's default. options: fields of `Asked` and arguments of
        sglang.Engine.
        """
        self._count += 1
        folder = family.write(self._folder / f"{self._count}-{family.name}-{backend}")
        if backend is not None:
            options["attention_backend"] = backend
        names = {each.name for each in fields(Asked)} & options.keys()
        asked = {name: options.pop(name) for name in names}
        order = {"family": family.name, "folder": str(folder), "arguments": options, "asked": asked}
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        status = self._answer(RUN_SECONDS + 30)
        log = (folder / "log").read_text()
        if status != "0":
            raise EngineFailed(f"{family.name} with {backend}: status {status}\n{log[-6000:]}")
        found = json.loads((folder / "run.json").read_text())
        stats = folder / "stats.json"
        lines = (file.read_text() if (file := folder / "calls").exists() else "").splitlines()
        noted = Counter((what, who, int(layer)) for what, who, layer in map(str.split, lines))
        calls, draft_calls = (
            Counter({(who, layer): n for (of, who, layer), n in noted.items() if of == what})
            for what in ("model", "draft")
        )
        return Run(
            **found,
            calls=calls,
            draft_calls=draft_calls,
            stats=json.loads(stats.read_text()) if stats.exists() else {},
            log=log,
        )

    def _answer(self, seconds: float) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            log = Path(self._log.name).read_text()
            what = "the process has ended" if ready else f"no answer within {seconds} s"
            raise EngineFailed(f"{what}\n{log[-6000:]}")
        return line.strip()


# --- the process that imports SGLang, and its children ---


def serve() -> None:
    """Read orders, fork an engine for each, and report how it ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to stderr
    gc.disable()  # imported objects are never freed
    _import_sglang()
    gc.freeze()  # garbage collection then does not copy their pages
    gc.enable()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        log = os.open(Path(order["folder"]) / "log", os.O_WRONLY | os.O_CREAT)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            asked = Asked(**order["asked"])
            _in_child(FAMILIES[order["family"]], Path(order["folder"]), order["arguments"], asked)
        os.close(log)
        print(_ended(child), file=answers, flush=True)
    os._exit(0)  # a normal exit would take seconds to free all modules


def _ended(child: int) -> str:
    """Return the exit status of a child, and end its own children."""
    deadline = time.monotonic() + RUN_SECONDS
    status = "too slow"
    while time.monotonic() < deadline:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = str(os.waitstatus_to_exitcode(code))
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status == "too slow":
        os.waitpid(child, 0)
    return status


def _in_child(family: Family, folder: Path, arguments: dict[str, Any], asked: Asked) -> None:
    status = 1
    try:
        os.environ.update(asked.environment)
        if asked.ranks is not None or asked.evictions:
            from fakes import driver

            driver.register()
            os.environ.update(asked.ranks or {})
        if asked.conversations == "streaming":
            from fakes import speculation

            speculation.mend_streaming_sessions()
        if asked.has_graphs:
            from fakes import cuda_graphs

            cuda_graphs.register()
        if asked.answers is not None:
            from fakes import draft_blocks

            pairs = zip(_prompts(are_twins=asked.has_graphs), asked.answers, strict=True)
            draft_blocks.answers += [prompt + answer for prompt, answer in pairs]
        _answer_prompts(family, folder, arguments, asked)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _import_sglang() -> None:
    """Import everything that an engine's processes need, with the models of all families."""
    import multiprocessing

    from fakes.forks import patch_methods_alone

    from sglang_pat.sglang.cpu import enable_cpu_engine

    assert enable_cpu_engine()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling small functions takes half a minute
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    models = Path(package.submodule_search_locations[0]) / "srt" / "models"
    needed = {module for family in FAMILIES.values() for module in family.modules}
    needed |= {"llama_eagle", "llama_eagle3", "dflash"}  # EAGLE heads and draft models
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
        each.name for each in pkgutil.iter_modules([str(models)]) if each.name not in needed
    )
    from fakes import speculation

    speculation.define_kernels()
    from fakes import cpu_kernels

    cpu_kernels.install()
    speculation.install()
    from fakes import draft_blocks

    draft_blocks.install()
    from sglang.srt.plugins import load_plugins

    from common import random_weights

    load_plugins()
    random_weights.register()
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401  # imports the models

    patch_methods_alone()

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]
    _record_calls()


def _record_calls() -> None:
    """Record which backend decodes each layer, or verifies drafts in it."""
    from fakes import speculation
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sglang_pat.sglang.layer.attention import LayerAttention

    init, attend = LayerAttention.__init__, LayerAttention.attend
    init_default = TorchNativeAttnBackend.__init__
    forward_decode = TorchNativeAttnBackend.forward_decode
    forward_extend = TorchNativeAttnBackend.forward_extend

    def note(who: str, layer: Any, *, is_draft: bool = False) -> None:
        with Path(os.environ[_CALLS]).open("a") as file:
            file.write(f"{'draft' if is_draft else 'model'} {who} {layer.layer_id}\n")

    def init_and_note(self: Any, model_runner: Any, layer_support: Any) -> None:
        init(self, model_runner, layer_support)
        self.is_draft = model_runner.is_draft_worker

    def attend_and_note(
        self: Any, plans: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **more: Any
    ) -> Any:
        note("pat", layer, is_draft=self.is_draft)
        return attend(self, plans, q, k, v, layer, *rest, **more)

    def decode_and_note(
        self: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **more: Any
    ) -> Any:
        note("default", layer, is_draft=speculation.is_draft_step(self))
        return forward_decode(self, q, k, v, layer, *rest, **more)

    def extend_and_note(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **more: Any
    ) -> Any:
        mode = batch.forward_mode
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            note("default", layer, is_draft=self.is_draft)
        return forward_extend(self, q, k, v, layer, batch, *rest, **more)

    def init_default_and_note(self: Any, model_runner: Any, *rest: Any, **more: Any) -> None:
        init_default(self, model_runner, *rest, **more)
        self.is_draft = model_runner.is_draft_worker

    TorchNativeAttnBackend.__init__ = init_default_and_note
    LayerAttention.__init__ = init_and_note  # type: ignore[method-assign]
    LayerAttention.attend = attend_and_note  # type: ignore[assignment]
    TorchNativeAttnBackend.forward_decode = decode_and_note
    TorchNativeAttnBackend.forward_extend = extend_and_note


def _prompts(*, are_twins: bool) -> list[list[int]]:
    prefix, *ends = _texts(5, [PREFIX, *(5 + 3 * i for i in range(8))])
    prompts = [prefix + end for end in ends]
    return twice(prompts) if are_twins else prompts


def _texts(seed: int, counts: list[int]) -> list[list[int]]:
    """Return random texts with these numbers of tokens."""
    chooser = random.Random(seed)
    return [[chooser.randrange(3, VOCAB_SIZE) for _ in range(count)] for count in counts]


def twice(items: list[Any]) -> list[Any]:
    """Return every other item twice."""
    return [item for item in items[::2] for _ in range(2)]


def _answer_prompts(family: Family, folder: Path, arguments: dict[str, Any], asked: Asked) -> None:
    import sglang
    from fakes import draft_blocks

    os.environ[_CALLS] = str(folder / "calls")
    os.environ["SGLANG_PAT_STATS_FILE"] = str(folder / "stats.json")
    os.environ["SGLANG_PAT_DEBUG"] = str(int(not asked.has_graphs))
    common: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "disable_cuda_graph": True,
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "random_seed": 0,
        "sleep_on_idle": True,
        "log_level": "info",
        "custom_sigquit_handler": _died,
    }
    engine = sglang.Engine(**(common | family.arguments | arguments))
    prompts = _prompts(are_twins=asked.has_graphs)
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    # The first prompt fills the tree, so that the others share its prefix.
    first = engine.generate(input_ids=prompts[:1], sampling_params=params)
    before, aborted = _answers_among_aborts(engine, prompts, params) if asked.aborts else ([], 0)
    sampling = [params] * len(prompts)
    if asked.stop_tokens is not None:
        stops = {"ignore_eos": False}
        sampling = [params | stops | {"stop_token_ids": [each]} for each in asked.stop_tokens]
    # SGLang 0.5.17 returns no log-probabilities with block drafts.
    scores = {} if draft_blocks.answers else {"return_logprob": True, "top_logprobs_num": 2}
    if asked.conversations is not None:
        turns = _turns(engine, prompts, {"sampling_params": params} | scores, asked.conversations)
    else:
        turns = [engine.generate(input_ids=prompts, sampling_params=sampling, **scores)]
    if asked.evictions:
        engine.generate(input_ids=_texts(6, [90] * 8), sampling_params=params)
        turns.append(engine.generate(input_ids=prompts, sampling_params=sampling, **scores))
    answers = [*zip(*turns, strict=True)]  # the turns of each prompt
    again = turns[0][0]["output_ids"]
    assert first[0]["output_ids"][: len(again)] == again, "the cache changes the answer"
    for early, later in zip(before, turns[0], strict=asked.aborts):
        assert early == later["output_ids"], "aborts of others change the answer"
    told = [[answer["meta_info"] for answer in each] for each in answers]
    run = {
        "tokens": [[token for turn in each for token in turn["output_ids"]] for each in answers],
        "verify_steps": [sum(turn.get("spec_verify_ct", 0) for turn in each) for each in told],
        "first_verify_steps": first[0]["meta_info"].get("spec_verify_ct", 0),
        "smallest_gap": min(
            (
                best[0] - second[0]
                for turn in chain(*told)
                for best, second in turn.get("output_top_logprobs", ())
            ),
            default=math.inf,
        ),
        "retractions": sum(turn["num_retractions"] for turn in chain(*told)),
        "from_host": sum(
            (turn.get("cached_tokens_details") or {}).get("host", 0) for turn in chain(*told)
        ),
        "aborted": aborted,
        "routes": engine.get_server_info().get("pat"),  # pat writes the stats file now
    }
    (folder / "run.json").write_text(json.dumps(run))
    engine.shutdown()


def _turns(
    engine: Any, prompts: list[list[int]], asked: dict[str, Any], kind: str
) -> list[list[dict[str, Any]]]:
    """Run a conversation from each prompt; return the answers by turn. kind: see `Asked`."""
    sessions = [
        None if kind == "whole" else engine.open_session(10_000, streaming=kind == "streaming")
        for _ in prompts
    ]
    said: list[list[int]] = [[] for _ in prompts]
    turns: list[list[dict[str, Any]]] = []

    async def answer(i: int, text: list[int]) -> dict[str, Any]:
        if sessions[i] is None:
            return await engine.async_generate(input_ids=said[i] + text, **asked)
        session = {"id": sessions[i]}
        if kind == "session" and turns:
            session["rid"] = turns[-1][i]["meta_info"]["id"]
        return await engine.async_generate(input_ids=text, session_params=session, **asked)

    async def answer_all(texts: list[list[int]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*(answer(i, text) for i, text in enumerate(texts)))

    for texts in (prompts, *(_texts(seed, list(range(4, 12))) for seed in (7, 8))):
        turns.append(engine.loop.run_until_complete(answer_all(texts)))
        for i, text in enumerate(texts):
            said[i] += text + turns[-1][i]["output_ids"]
    for session in filter(None, sessions):
        engine.close_session(session)
    return turns


def _answers_among_aborts(
    engine: Any, prompts: list[list[int]], params: dict[str, Any]
) -> tuple[list[list[int]], int]:
    """Return the answers of all prompts, and how many copies were aborted meanwhile."""

    async def read(prompt: list[int], rid: str, most: int) -> list[int]:
        received: list[int] = []
        chunks = await engine.async_generate(
            input_ids=prompt, sampling_params=params, stream=True, rid=rid
        )
        async for chunk in chunks:
            received = chunk["output_ids"]
            if len(received) >= most:
                engine.tokenizer_manager.abort_request(rid=rid)
        return received

    async def read_all() -> list[list[int]]:
        whole = [read(prompt, f"whole {i}", NUM_TOKENS + 1) for i, prompt in enumerate(prompts)]
        some = [read(prompt, f"some {i}", 2 + i) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(
            *(each for pair in zip(some, whole, strict=True) for each in pair)
        )

    found = engine.loop.run_until_complete(read_all())
    return found[1::2], sum(len(each) < NUM_TOKENS for each in found[::2])


def _died(*args: object) -> None:
    os._exit(70)


@contextlib.contextmanager
def family_engines(folder: Path) -> Iterator[FamilyEngines]:
    """Yield engines until the block ends."""
    engines = FamilyEngines(folder)
    try:
        yield engines
    finally:
        engines.close()


if __name__ == "__main__":
    serve()
