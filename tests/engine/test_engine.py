"""The whole way, in SGLang's real engine on the CPU: every token equals that of SGLang's own
backend.

Greedy decoding in float32, so one run of SGLang's backend gives the answers for all configurations.
All engines run under SGLANG_PAT_DEBUG=1, which checks each step's plan against the radix tree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sglang_engines import (
    Expected,
    Request,
    Stats,
    Workload,
    flush,
    generate,
    run,
    running_engine,
    start,
    tokens,
)

pytestmark = pytest.mark.engine

MAX_RUNNING = 8


@pytest.fixture(scope="class")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Stats:
    return Stats(tmp_path_factory.mktemp("stats") / "stats.json")


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest, tiny_model: Path, stats: Stats) -> Iterator[Any]:
    """The engine of a test class, with the arguments that the class names."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_PAT_DEBUG", "1")
        environment.setenv("SGLANG_PAT_STATS_FILE", str(stats.path))
        with running_engine(tiny_model, "pat", **request.cls.ARGUMENTS) as running:
            yield running


def assert_same(answers: list[dict[str, Any]], asked: list[Request], expected: Expected) -> None:
    assert tokens(answers) == [expected.of(request) for request in asked]


class _Everywhere:
    """What must hold in every configuration."""

    def test_three_levels_are_shared(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        stats.new()
        generate(engine, workload.three_levels)  # fills the tree
        stats.new()
        answers = generate(engine, workload.three_levels)
        assert_same(answers, workload.three_levels, expected)
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.5 * counted["kv_tokens_query_centric"]
        assert counted["kv_tokens_planned"] >= counted["kv_tokens_lower_bound"]
        assert counted["plans_reused"] > counted["plans_built"] > 0
        assert counted["private_steps"] == {}

    def test_two_roots(self, engine: Any, workload: Workload, expected: Expected) -> None:
        assert_same(generate(engine, workload.two_roots), workload.two_roots, expected)

    def test_nothing_shared(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        stats.new()
        assert_same(generate(engine, workload.no_sharing), workload.no_sharing, expected)
        counted = stats.new()
        assert counted["kv_tokens_planned"] == counted["kv_tokens_query_centric"] > 0

    def test_identical_prompts_together(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        # All are prefilled in full, and share only from their second step on.
        flush(engine)
        stats.new()
        assert_same(generate(engine, workload.identical), workload.identical, expected)
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.6 * counted["kv_tokens_query_centric"]

    def test_rows_are_taken_over(self, engine: Any, workload: Workload, expected: Expected) -> None:
        assert len(workload.crowd) > MAX_RUNNING
        assert_same(generate(engine, workload.crowd), workload.crowd, expected)

    def test_stop_tokens_while_others_arrive(
        self, engine: Any, workload: Workload, expected: Expected
    ) -> None:
        # SGLang notices a stop token one step late: the row of a request that has stopped is part
        # of the step in flight while it is given to the next request.
        stopping = [stopping_early(request, expected) for request in workload.crowd]
        answers = generate(engine, stopping)
        for request, answer in zip(stopping, answers, strict=True):
            whole = expected.of(Request(request.prompt, request.num_tokens))
            assert answer["output_ids"] == whole[: whole.index(request.stop) + 1]
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"

    def test_aborts_in_mid_decode(
        self, engine: Any, workload: Workload, expected: Expected
    ) -> None:
        aborted, staying = workload.long_answers[:2], workload.long_answers[2:5]

        async def read(request: Request, rid: str) -> list[int]:
            answer: dict[str, Any] = {"output_ids": []}
            received: list[int] = []
            async for answer in await start(engine, request, rid=rid):
                received = answer["output_ids"]
                if rid.startswith("aborted") and len(received) == 10:
                    engine.tokenizer_manager.abort_request(rid=rid)
            return received

        async def all_of_them() -> list[list[int]]:
            named = [(request, f"aborted-{i}") for i, request in enumerate(aborted)]
            named += [(request, f"staying-{i}") for i, request in enumerate(staying)]
            return await asyncio.gather(*(read(*each) for each in named))

        received = run(engine, all_of_them())
        assert received[2:] == [expected.of(request) for request in staying]
        for request, some in zip(aborted, received, strict=False):
            assert 10 <= len(some) < request.num_tokens
            assert some == expected.of(request)[: len(some)]

    def test_flush_between_waves(self, engine: Any, workload: Workload, expected: Expected) -> None:
        for _ in range(2):
            flush(engine)
            # The same names, so that only the tree tells the waves apart.
            names = [f"wave-{i}" for i in range(len(workload.two_roots))]
            answers = generate(engine, workload.two_roots, rid=names)
            assert_same(answers, workload.two_roots, expected)
            other = generate(engine, workload.no_sharing, rid=names[: len(workload.no_sharing)])
            assert_same(other, workload.no_sharing, expected)


class TestPageSize1(_Everywhere):
    """As SGLang starts by default."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "page_size": 1,
        "max_total_tokens": 16384,
        "max_running_requests": MAX_RUNNING,
    }


class TestPageSize16InASmallPool(_Everywhere):
    """Pages, a pool too small for what is admitted, and prompts in chunks beside decoding rows."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "page_size": 16,
        "max_total_tokens": 768,
        "max_running_requests": MAX_RUNNING,
        "chunked_prefill_size": 64,
        "enable_mixed_chunk": True,
        # Admit as if answers were short.
        "schedule_conservativeness": 0.05,
    }

    def test_retraction(self, engine: Any, workload: Workload, expected: Expected) -> None:
        answers = generate(engine, workload.long_answers)
        assert_same(answers, workload.long_answers, expected)
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0

    def test_long_prompts_in_chunks_beside_decoding_rows(
        self, engine: Any, workload: Workload, expected: Expected
    ) -> None:
        flush(engine)

        decoding, arriving = workload.long_answers[0], workload.long_prompts
        finished: list[Request] = []

        async def answer(request: Request) -> list[int]:
            last: dict[str, Any] = await engine.async_generate(
                input_ids=request.prompt, sampling_params=request.sampling_params
            )
            finished.append(request)
            output: list[int] = last["output_ids"]
            return output

        async def all_of_them() -> list[list[int]]:
            received: list[int] = []
            tasks: list[asyncio.Task[list[int]]] = []
            async for grown in await start(engine, decoding):
                received = grown["output_ids"]
                if len(received) >= 10 and not tasks:
                    tasks = [asyncio.create_task(answer(request)) for request in arriving]
            finished.append(decoding)
            return [received, *await asyncio.gather(*tasks)]

        received = run(engine, all_of_them())
        assert received == [expected.of(request) for request in [decoding, *arriving]]
        assert finished[-1] is decoding  # so all chunks came while it was decoding


def stopping_early(request: Request, expected: Expected) -> Request:
    """The request with a stop token that ends it in mid-answer: the first that comes only then."""
    answer = expected.of(request)
    position = next(i for i in range(3, len(answer)) if answer[i] not in answer[:i])
    return Request(request.prompt, request.num_tokens, stop=answer[position])
