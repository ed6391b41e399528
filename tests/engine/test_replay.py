"""The simulated server does the same as a real engine with the same requests, step by step.

The engine records the paths of every decode step (`fakes/step_recorder.py`); the simulated server
gets the same prompts with the engine's answers. Neither the rows nor the pool are enough for all
requests: requests queue, join, leave and are retracted, prompts are cut into chunks, and prefixes
are split and evicted.
"""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.plugins import install_plugin
from fakes.step_recorder import FILE, WAIT_FOR, described
from served import SlowClock
from sglang_engines import Request, generate, running_engine

from common.tiny_model import NUM_SPECIAL_TOKENS, TinyModel
from sglang_pat.offline.simulated_cache import SGLangTree, new_tree
from sglang_pat.workload.server import Decode, Prefill, Rules, SimulatedServer, accepted
from sglang_pat.workload.trace import TokenPrompt, TraceRequest

pytestmark = pytest.mark.engine

MAX_RUNNING = 7
POOL_TOKENS = 1400


def requests() -> list[Request]:
    """Return requests of three levels, prompts that continue others, and unshared prompts."""
    chooser = random.Random(5)

    def tokens(count: int) -> list[int]:
        return chooser.choices(range(NUM_SPECIAL_TOKENS, TinyModel().vocab_size), k=count)

    system = tokens(120)
    tools = [system + tokens(40 + 9 * i) for i in range(3)]
    asked = [Request(tools[i % 3] + tokens(3 + 7 * (i % 5)), 6 + 5 * i % 23) for i in range(18)]
    asked += [Request(asked[i].prompt + tokens(20), 9 + i) for i in range(4)]
    asked += [Request(tokens(150 + 40 * i), 12) for i in range(3)]
    asked += [Request(system + tokens(5 + i), 230) for i in range(7)]  # more than the pool
    asked += [Request(tools[i % 3] + tokens(8 + i), 10) for i in range(6)]
    return asked


def recorded_steps(folder: Path, model: Path, asked: list[Request], chunk: int) -> tuple[Any, Any]:
    """Return the engine's decode steps and its answers."""
    install_plugin(folder, "fakes.step_recorder")
    file = folder / "steps.jsonl"
    with pytest.MonkeyPatch.context() as environment:
        environment.syspath_prepend(folder)  # inherited by the engine's processes
        environment.setenv(FILE, str(file))
        environment.setenv(WAIT_FOR, str(len(asked)))
        with running_engine(
            model,
            "torch_native",
            disable_overlap_schedule=True,
            max_running_requests=MAX_RUNNING,
            max_total_tokens=POOL_TOKENS,
            chunked_prefill_size=chunk,
        ) as engine:
            answers = [answer["output_ids"] for answer in generate(engine, asked)]
    return [json.loads(line) for line in file.read_text().splitlines()], answers


def simulated(
    asked: list[Request], answers: list[list[int]], chunk: int
) -> tuple[Any, SimulatedServer, Any]:
    """Return the decode steps of the simulated server, the server, and its forward passes."""
    stream = [
        TraceRequest(0.0, TokenPrompt(np.array(r.prompt, dtype=np.int64)), r.num_tokens)
        for r in asked
    ]
    rules = Rules(max_running_requests=MAX_RUNNING, chunked_prefill_size=chunk, ignore_eos=False)
    tree = new_tree(POOL_TOKENS)
    found, _ = accepted(stream, rules, tree.size)
    for request, answer in zip(found, answers, strict=True):
        request._tokens = np.array([*asked[request.number].prompt, *answer], dtype=np.int64)
    server = SimulatedServer(found, tree, SlowClock(), rules, steps_at_once=1)
    steps, passes = [], []
    for event in server.events():
        if isinstance(event, Prefill):
            passes.append(event.new)
        else:
            steps.append(step_of(event, tree))
    return steps, server, passes


def step_of(event: Decode, tree: SGLangTree) -> dict[str, Any]:
    served = [request.handle for request in event.batch.requests]
    tokens: list[array[int]] = [each.tokens for each in served]
    return {
        "requests": described(served, event.batch.lengths.tolist(), tokens, tree.reader),
        "free_tokens": tree.available,
        "evictable_tokens": tree.evictable,
    }


def test_every_step_is_the_engines(tmp_path: Path, tiny_model: Path) -> None:
    # The simulated server cuts prompts by the rules of 0.5.23.
    chunk = 128 if new_tree(8).refreshes_waiting else 4096
    asked = requests()
    recorded, answers = recorded_steps(tmp_path, tiny_model, asked, chunk)
    assert [len(answer) for answer in answers] == [request.num_tokens for request in asked]
    steps, server, passes = simulated(asked, answers, chunk)
    for number, (ours, theirs) in enumerate(zip(steps, recorded, strict=False)):
        # Equal numbers of free and evictable tokens: both servers evicted the same amount.
        assert ours == theirs, f"decode step {number}"
    assert len(steps) == len(recorded)
    assert len(server.finished) == len(asked)
    # The scenario must contain retractions.
    assert server.retracted > 0
    assert max(passes) <= chunk
    assert (max(passes) == chunk) == (chunk == 128)
    assert sum(passes) < sum(len(request.prompt) for request in asked)
    assert len({step["free_tokens"] for step in recorded}) > 10
