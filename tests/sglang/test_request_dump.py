"""Request dumps that a real engine writes, read back as traces."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from sglang.srt.managers.io_struct import ConfigureLoggingReq
from sglang_engines import Workload, generate, run, running_engine

from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.trace import token_ids

pytestmark = pytest.mark.engine


def read(folder: Path) -> list[tuple[list[int], int]]:
    trace = open_trace(folder, strict=True)
    assert trace.format == "sglang-dump"
    return [(token_ids(r.prompt).tolist(), r.output_length) for r in trace.stream]


def test_dump_of_finished_requests_and_crash_dump(
    tiny_model: Path, workload: Workload, tmp_path: Path
) -> None:
    dumps, crash_dumps = tmp_path / "dumps", tmp_path / "crash"
    asked = workload.no_sharing
    with running_engine(tiny_model, "torch_native", max_total_tokens=8192) as engine:
        manager = engine.tokenizer_manager
        manager.configure_logging(
            ConfigureLoggingReq(
                dump_requests_folder=str(dumps),
                dump_requests_threshold=len(asked),
                crash_dump_folder=str(crash_dumps),
            )
        )
        answers = generate(engine, asked)
        manager.dump_requests_before_crash("host")
        # The other dump is written by a thread that the engine's event loop starts.
        deadline = time.monotonic() + 60
        while not list(dumps.glob("*.pkl")) and time.monotonic() < deadline:
            run(engine, asyncio.sleep(0.2))

    expected = [
        (request.prompt, len(answer["output_ids"]))
        for request, answer in zip(asked, answers, strict=True)
    ]
    assert sorted(read(dumps)) == sorted(expected)
    assert sorted(read(crash_dumps)) == sorted(expected)
