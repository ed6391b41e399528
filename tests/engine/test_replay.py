"""The replayed tree is SGLang's: step by step as in a real engine that serves the same requests.

One engine records the paths of every decode step (`sglang_step_recorder.py`); the replay serves the
same prompts, with the answers that the engine gave. More requests than run at once, in a pool that
is too small for all: requests join and leave, prefixes are split, evicted, and requests retracted.
"""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_engines import Request, generate, running_engine
from sglang_plugins import install_plugin
from sglang_step_recorder import FILE, WAIT_FOR, described

from sglang_pat.cli.demo.tiny_model import NUM_SPECIAL_TOKENS, TinyModel
from sglang_pat.replay.account import Account
from sglang_pat.replay.options import ReplayOptions
from sglang_pat.replay.simulate import Simulator
from sglang_pat.sglang.replay_tree import ReplayReader, ReplayRequest, ReplayTree, new_tree
from sglang_pat.workload.trace import TokenPrompt, Trace, TraceErrors, TraceRequest

pytestmark = pytest.mark.engine

MAX_RUNNING = 7
POOL_TOKENS = 1400
MAX_PREFILL = 4096


def requests() -> list[Request]:
    """Three levels of sharing, some prompts that continue others, some alone."""
    chooser = random.Random(5)

    def tokens(count: int) -> list[int]:
        return chooser.choices(range(NUM_SPECIAL_TOKENS, TinyModel().vocab_size), k=count)

    system = tokens(120)
    tools = [system + tokens(40 + 9 * i) for i in range(3)]
    asked = [Request(tools[i % 3] + tokens(3 + 7 * (i % 5)), 6 + 5 * i % 23) for i in range(18)]
    asked += [Request(asked[i].prompt + tokens(20), 9 + i) for i in range(4)]
    asked += [Request(tokens(150 + 40 * i), 12) for i in range(3)]
    asked += [Request(system + tokens(5 + i), 230) for i in range(7)]  # outgrow the pool together
    asked += [Request(tools[i % 3] + tokens(8 + i), 10) for i in range(6)]
    return asked


def recorded_steps(folder: Path, model: Path, asked: list[Request]) -> tuple[Any, Any]:
    """The engine's decode steps, and its answers."""
    install_plugin(folder, "sglang_step_recorder")
    file = folder / "steps.jsonl"
    with pytest.MonkeyPatch.context() as environment:
        environment.syspath_prepend(folder)  # which the engine's processes inherit
        environment.setenv(FILE, str(file))
        environment.setenv(WAIT_FOR, str(len(asked)))
        with running_engine(
            model,
            "torch_native",
            disable_overlap_schedule=True,
            max_running_requests=MAX_RUNNING,
            max_total_tokens=POOL_TOKENS,
            chunked_prefill_size=MAX_PREFILL,
        ) as engine:
            answers = [answer["output_ids"] for answer in generate(engine, asked)]
    return [json.loads(line) for line in file.read_text().splitlines()], answers


def replayed_steps(
    asked: list[Request], answers: list[list[int]]
) -> tuple[Any, Simulator, ReplayTree]:
    """The replay's decode steps, and what took them."""
    stream = [
        TraceRequest(0.0, TokenPrompt(np.array(r.prompt, dtype=np.int64)), r.num_tokens)
        for r in asked
    ]
    options = ReplayOptions(
        kv_tokens=POOL_TOKENS, max_batch=MAX_RUNNING, prefill_tokens=MAX_PREFILL
    )
    tree = new_tree(options.kv_tokens, options.page_size)

    def with_answer(number: int, tokens: array[int], length: int, row: int) -> ReplayRequest:
        return ReplayRequest(number, tokens[:length] + array("q", answers[number]), length, row)

    simulator = Simulator(
        Trace("engine", "tokens", stream, TraceErrors()),
        tree,
        ReplayReader(tree),
        Account(options.model, ("memory",), 8),
        options,
        with_answer,
    )
    steps = []
    for step in simulator.steps():
        tokens = [request.tokens for request in step.reqs]
        lens = step.batch.seq_lens.tolist()
        steps.append(
            {
                "requests": described(step.reqs, lens, tokens, tree.source),
                "free_tokens": tree.pool.available,
                "evictable_tokens": int(tree.tree.evictable_size()),
            }
        )
    return steps, simulator, tree


def test_every_step_is_the_engines(tmp_path: Path, tiny_model: Path) -> None:
    asked = requests()
    recorded, answers = recorded_steps(tmp_path, tiny_model, asked)
    assert [len(answer) for answer in answers] == [request.num_tokens for request in asked]
    replayed, simulator, tree = replayed_steps(asked, answers)
    for number, (ours, theirs) in enumerate(zip(replayed, recorded, strict=False)):
        # Free and evictable tokens say what was evicted: that and no more.
        assert ours == theirs, f"decode step {number}"
    assert len(replayed) == len(recorded)
    assert simulator.served.finished == len(asked)
    # The scenario shows what it is meant to show.
    assert simulator.served.retracted > 0
    assert simulator.served.prompt_tokens_found > 0
    assert tree.mutations["evicted_tokens"] > 0
    assert len({step["free_tokens"] for step in recorded}) > 10
