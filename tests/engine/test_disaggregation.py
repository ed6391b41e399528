"""A decode server with a radix cache shares prefixes whose KV a prefill server has computed.

The KV is sent as files (`fakes.kv_files`). The prefill server has no radix cache: with one, SGLang
records CUDA events before it sends.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_files import ARGUMENTS, tokens_kept, transfer_by_files
from sglang.srt.server_args import ServerArgs
from sglang_engines import (
    Expected,
    Request,
    Stats,
    Workload,
    run,
    running_engine,
    running_pat_engine,
    tokens,
)

KEEPS_PREFIXES = {"disaggregation_decode_enable_radix_cache": True}
# A pool that cannot hold all answers at once.
IS_SMALL = {
    "max_total_tokens": 600,
    "schedule_conservativeness": 0.05,
    "num_reserved_decode_tokens": 8,
}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.skipif(
        "disaggregation_decode_retraction_backup" not in inspect.signature(ServerArgs).parameters,
        reason="the transfer by files is written for SGLang 0.5.23",
    ),
]


@dataclass
class Pair:
    """A prefill and a decode server, the decode server's statistics, and its cached prefixes."""

    prefill: Any
    decode: Any
    stats: Stats
    folder: Path
    kept: list[int] = field(default_factory=list)  # cached tokens of each of the last prompts
    rooms: Iterator[int] = field(default_factory=lambda: count(1))

    def generate(self, requests_: list[Request]) -> list[list[int]]:
        """Send requests to both, as SGLang's router does. Returns the decode server's answers."""
        rooms = [next(self.rooms) for _ in requests_]

        async def ask(engine: Any) -> Any:
            return await engine.async_generate(
                input_ids=[request.prompt for request in requests_],
                sampling_params=[request.sampling_params for request in requests_],
                bootstrap_host=["127.0.0.1"] * len(rooms),
                bootstrap_port=[8998] * len(rooms),
                bootstrap_room=list(rooms),
            )

        async def ask_both() -> Any:
            return await asyncio.gather(ask(self.decode), ask(self.prefill))

        answers, _ = run(self.decode, ask_both())
        self.kept = [tokens_kept(self.folder, room) for room in rooms]
        return tokens(answers)


@contextmanager
def running_pair(
    model: Path, folder: Path, page_size: int, **decode_arguments: Any
) -> Iterator[Pair]:
    transfer_by_files(folder, environment := pytest.MonkeyPatch())
    common = {
        "max_running_requests": 8,
        "max_total_tokens": 16384,
        "page_size": page_size,
        **ARGUMENTS,
    }
    try:
        with (
            running_engine(
                model,
                "torch_native",
                disaggregation_mode="prefill",
                disable_radix_cache=True,
                **common,
            ) as prefill,
            running_pat_engine(
                model, folder, disaggregation_mode="decode", **(common | decode_arguments)
            ) as (decode, stats),
        ):
            yield Pair(prefill, decode, stats, folder)
    finally:
        environment.undo()


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefixes_are_read_once_with_a_radix_cache(
    page_size: int, tiny_model: Path, tmp_path: Path, workload: Workload, expected: Expected
) -> None:
    asked = workload.three_levels
    with running_pair(tiny_model, tmp_path, page_size, **KEEPS_PREFIXES) as pair:
        for wave in range(2):
            assert pair.generate(asked) == [expected.of(request) for request in asked]
            # In the first wave nothing is cached; in the second, a prefix of each prompt is.
            assert all(kept == 0 if wave == 0 else kept >= 208 for kept in pair.kept)
            counted = pair.stats.new()
            assert counted["steps_without_sharing"] == {}
            assert counted["kv_tokens_planned"] < 0.55 * counted["kv_tokens_query_centric"]
            assert counted["plans_reused"] > counted["plans_built"] > 0


def test_requests_are_retracted(
    tiny_model: Path, tmp_path: Path, workload: Workload, expected: Expected
) -> None:
    asked = workload.long_answers
    with running_pair(tiny_model, tmp_path, 1, **KEEPS_PREFIXES, **IS_SMALL) as pair:
        assert pair.generate(asked) == [expected.of(request) for request in asked]
        counted = pair.stats.new()
        assert counted["steps_without_sharing"] == {}
        assert counted["batch_changes"]["join"] > len(asked)  # retracted requests join again
        assert counted["kv_tokens_planned"] < 0.6 * counted["kv_tokens_query_centric"]
