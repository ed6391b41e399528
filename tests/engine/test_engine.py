"""SGLang's real engine on the CPU: every token equals that of SGLang's own backend.

Decoding is greedy and in float32, so one run of SGLang's backend gives the answers for all
configurations. All engines run under SGLANG_PAT_DEBUG=1, which checks each step's plan against the
radix tree.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sglang.srt.managers.io_struct import (
    CloseSessionReqInput,
    ConfigureLoggingReq,
    ContinueGenerationReqInput,
    GenerateReqInput,
    OpenSessionReqInput,
    PauseGenerationReqInput,
)
from sglang_engines import (
    HAS_BEAMS,
    Expected,
    Request,
    Stats,
    Workload,
    beams,
    flush,
    generate,
    load_weights,
    run,
    running_pat_engine,
    start,
    tokens,
)

from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.trace import token_ids

pytestmark = pytest.mark.engine

MAX_RUNNING = 8
MANY_ADMITTED = {"schedule_conservativeness": 0.05}  # SGLang assumes short answers


@pytest.fixture(scope="class")
def engine_and_stats(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Stats]]:
    """The engine with the arguments that the test class names, and its statistics."""
    folder = tmp_path_factory.mktemp("stats")
    with running_pat_engine(tiny_model, folder, **request.cls.ARGUMENTS) as running:
        yield running


@pytest.fixture
def engine(engine_and_stats: tuple[Any, Stats]) -> Any:
    return engine_and_stats[0]


@pytest.fixture
def stats(engine_and_stats: tuple[Any, Stats]) -> Stats:
    return engine_and_stats[1]


def assert_same(answers: list[dict[str, Any]], asked: list[Request], expected: Expected) -> None:
    assert tokens(answers) == [expected.of(request) for request in asked]


class _Everywhere:
    """Tests that must pass in every configuration."""

    def test_three_levels_are_shared(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        stats.new()
        generate(engine, workload.three_levels)  # fills the tree
        stats.new()
        answers = generate(engine, workload.three_levels)
        assert_same(answers, workload.three_levels, expected)
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.55 * counted["kv_tokens_query_centric"]
        assert counted["kv_tokens_planned"] >= counted["kv_tokens_lower_bound"]
        assert counted["plans_reused"] > counted["plans_built"] > 0
        assert counted["steps_without_sharing"] == {}

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
        # All requests are prefilled in full, and share only from their second step on.
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
        # SGLang notices a stop token one step late: it gives the row of the stopped request to the
        # next request while the step in flight still contains the row.
        stopping = [stopping_early(request, expected) for request in workload.crowd]
        answers = generate(engine, stopping)
        for request, answer in zip(stopping, answers, strict=True):
            whole = expected.of(Request(request.prompt, request.num_tokens))
            assert answer["output_ids"] == whole[: whole.index(request.stop) + 1]
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"

    def test_flush_between_waves(self, engine: Any, workload: Workload, expected: Expected) -> None:
        for _ in range(2):
            flush(engine)
            # Both waves have the same request ids, so that only the tree tells them apart.
            names = [f"wave-{i}" for i in range(len(workload.two_roots))]
            answers = generate(engine, workload.two_roots, rid=names)
            assert_same(answers, workload.two_roots, expected)
            other = generate(engine, workload.no_sharing, rid=names[: len(workload.no_sharing)])
            assert_same(other, workload.no_sharing, expected)


class _Features:
    """Tests of request options, and of events that can happen to requests."""

    def test_a_storm_of_aborts(self, engine: Any, workload: Workload, expected: Expected) -> None:
        chooser = random.Random(8)
        asked = workload.long_answers + workload.crowd + workload.three_levels
        for _ in range(2):
            chooser.shuffle(asked)
            after = [chooser.randrange(1, 9) for _ in asked[: len(asked) // 2]]
            received = run(engine, answers_with_aborts(engine, asked, after))
            left = len(after)
            assert received[left:] == [expected.of(request) for request in asked[left:]]
            assert_begun(received, asked[:left], after, expected)
            # A short answer may be complete before the abort arrives.
            cut = [
                len(some) < request.num_tokens
                for some, request in zip(received, asked[:left], strict=False)
            ]
            assert sum(cut) > left / 2

    def test_several_answers_to_one_prompt(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        flush(engine)
        stats.new()
        asked = [replace(request, num_answers=3) for request in workload.two_roots]
        answers = generate(engine, asked)
        assert tokens(answers) == [
            expected.of(request) for request in workload.two_roots for _ in range(3)
        ]
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]

    @pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
    def test_keys_keep_prompts_apart(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats, field: str
    ) -> None:
        if not hasattr(GenerateReqInput, field):
            pytest.skip(f"this SGLang has no {field}")

        async def answers_with(keys: list[str]) -> list[dict[str, Any]]:
            body = GenerateReqInput(
                input_ids=[request.prompt for request in asked],
                sampling_params=[request.sampling_params for request in asked],
                **{field: keys},
            )
            answers: list[dict[str, Any]] = await anext(
                engine.tokenizer_manager.generate_request(body)
            )
            return answers

        flush(engine)
        asked = workload.identical
        for keys, is_shared in ((["a", "b", "c", "d"], False), (["a", "a", "b", "b"], True)):
            for _ in range(2):  # fills the tree, then finds everything there
                stats.new()
                assert_same(run(engine, answers_with(keys)), asked, expected)
            counted = stats.new()
            planned, alone = counted["kv_tokens_planned"], counted["kv_tokens_query_centric"]
            assert planned < 0.8 * alone if is_shared else planned == alone > 0

    def test_log_probabilities(self, engine: Any, workload: Workload, expected: Expected) -> None:
        answers = generate(engine, workload.three_levels, return_logprob=True, top_logprobs_num=2)
        assert_same(answers, workload.three_levels, expected)
        for request, answer in zip(workload.three_levels, answers, strict=True):
            found = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
            assert found == pytest.approx(expected.logprobs_of(request), abs=1e-4)

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    def test_pause_in_mid_decode(
        self, engine: Any, workload: Workload, expected: Expected, mode: str
    ) -> None:
        asked = workload.long_answers[:4]
        received = [0] * len(asked)

        async def read(i: int) -> dict[str, Any]:
            answer: dict[str, Any] = {}
            async for answer in await start(engine, asked[i]):
                received[i] = len(answer["output_ids"])
            return answer

        async def pause() -> tuple[list[int], list[int]]:
            """Return how many tokens had arrived at the beginning and at the end of the pause."""
            while min(received) < 10:
                await asyncio.sleep(0.005)
            manager = engine.tokenizer_manager
            await manager.pause_generation(PauseGenerationReqInput(mode=mode))
            await asyncio.sleep(0.3)  # until the step in flight has ended
            before = list(received)
            await asyncio.sleep(0.3)
            after = list(received)
            await manager.continue_generation(ContinueGenerationReqInput())
            return before, after

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(pause(), *map(read, range(len(asked))))

        (before, after), *answers = run(engine, all_of_them())
        assert before == after
        assert max(after) < asked[0].num_tokens
        assert_same(answers, asked, expected)
        retracted = [answer["meta_info"]["num_retractions"] for answer in answers]
        if mode == "retract":
            assert min(retracted) > 0

    @pytest.mark.nightly
    def test_everything_at_once(self, engine: Any, workload: Workload, expected: Expected) -> None:
        """Continuations, early stops, parallel samples, aborts and a pause happen at once.

        Continuations split nodes of the tree. The pause retracts all running requests.
        """
        chooser = random.Random(5)
        manager = engine.tokenizer_manager

        async def ask(index: int) -> None:
            await asyncio.sleep(5 * chooser.random())
            request = chooser.choice(workload.all())
            answer = expected.of(request)
            said = chooser.choice([0, chooser.randrange(len(answer) - 1)])
            rest = answer[said : said + chooser.randint(1, len(answer) - said)]
            asked = Request(request.prompt + answer[:said], len(rest))
            if index % 4 == 0:
                rid = f"storm-{index:03}"  # fixed width: SGLang aborts by prefix of the id
                is_aborted = False
                async for each in await start(engine, asked, rid=rid):
                    received = each["output_ids"]
                    # SGLang sends one more token for an aborted request that it prefills again.
                    assert is_aborted or received == rest[: len(received)]
                    is_aborted = 2 * len(received) >= len(rest)
                    if is_aborted:
                        manager.abort_request(rid=rid)
                return
            if index % 4 == 1:
                asked = replace(asked, num_answers=3)
            elif index % 4 == 2:
                asked = replace(asked, stop=chooser.choice(rest))
                rest = rest[: rest.index(asked.stop) + 1]
            answers = await engine.async_generate(
                input_ids=[asked.prompt], sampling_params=[asked.sampling_params]
            )
            assert tokens(answers) == [rest] * asked.num_answers

        async def disturb() -> None:
            for mode in chooser.choices(["retract", "in_place"], k=10):
                await asyncio.sleep(chooser.random())
                await manager.pause_generation(PauseGenerationReqInput(mode=mode))
                if mode == "retract":
                    await manager.flush_cache()
                await manager.continue_generation(ContinueGenerationReqInput())

        async def all_of_them() -> None:
            await asyncio.gather(disturb(), *map(ask, range(160)))

        run(engine, all_of_them())


class _Sessions:
    """Tests of sessions, in which a turn's prompt and answer begin the prompt of the next turn."""

    def talk(
        self, engine: Any, workload: Workload, expected: Expected, *, streaming: bool
    ) -> list[dict[str, Any]]:
        """Run and compare all conversations at once, beside requests without a session."""
        manager = engine.tokenizer_manager

        async def lead(turns: list[Request]) -> list[dict[str, Any]]:
            opened = OpenSessionReqInput(capacity_of_str_len=10_000, streaming=streaming)
            session = await manager.open_session(opened, None)
            answers: list[dict[str, Any]] = []
            rid = None
            for turn in turns:
                answer = await engine.async_generate(
                    input_ids=turn.prompt,
                    sampling_params=turn.sampling_params,
                    session_params={"id": session} | ({} if streaming else {"rid": rid}),
                )
                answers.append(answer)
                rid = answer["meta_info"]["id"]
            await manager.close_session(CloseSessionReqInput(session_id=session), None)
            return answers

        async def all_of_them() -> list[Any]:
            beside = answers_together(engine, workload.long_answers)
            return await asyncio.gather(beside, *map(lead, workload.conversations))

        others, *conversations = run(engine, all_of_them())
        assert_same(others, workload.long_answers, expected)
        for turns, answers in zip(workload.conversations, conversations, strict=True):
            assert_same(answers, expected.in_conversation(turns), expected)
        return [*others, *(answer for answers in conversations for answer in answers)]

    def test_sessions(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        stats.new()
        self.talk(engine, workload, expected, streaming=False)
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.9 * counted["kv_tokens_query_centric"]


class _SmallPool:
    """Tests with more running requests than the pool can hold to their ends."""

    def test_retraction(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        stats.new()
        answers = generate(engine, workload.long_answers)
        assert_same(answers, workload.long_answers, expected)
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        assert stats.new()["tree_events"]["evict"] > 0


class TestPageSize1(_Everywhere, _Features, _Sessions):
    """SGLang's defaults."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "page_size": 1,
        "max_total_tokens": 16384,
        "max_running_requests": MAX_RUNNING,
    }

    def test_other_weights(
        self,
        engine: Any,
        workload: Workload,
        expected: Expected,
        expected_of_other_model: Expected,
        tiny_model: Path,
        other_model: Path,
    ) -> None:
        asked = workload.three_levels
        load_weights(engine, other_model)
        try:
            for _ in range(2):
                assert_same(generate(engine, asked), asked, expected_of_other_model)
        finally:
            load_weights(engine, tiny_model)
        assert_same(generate(engine, asked), asked, expected)

    def test_beams_share_their_prompt(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        if not HAS_BEAMS:
            pytest.skip("this SGLang has no beam search")
        # The request runs alone, and the tree holds nothing of its prompt.
        flush(engine)
        stats.new()
        assert beams(generate(engine, [workload.beams])) == expected.beams
        counted = stats.new()
        assert counted["steps_without_sharing"] == {}
        assert counted["kv_tokens_planned"] < 0.45 * counted["kv_tokens_query_centric"]
        assert counted["plans_reused"] > counted["plans_built"] > 0
        # The search runs beside requests with the same system prompt, and with rows to spare: if
        # rows are scarce, SGLang may admit a search without enough rows for its beams, and its own
        # assertion ends the engine.
        others = workload.long_answers[:3]
        assert workload.beams.beam_width is not None
        assert workload.beams.beam_width + len(others) < MAX_RUNNING
        searched, *answers = run(engine, answers_together(engine, [workload.beams, *others]))
        assert_same(answers, others, expected)
        assert beams([searched]) == expected.beams
        counted = stats.new()
        assert counted["steps_without_sharing"] == {}
        assert counted["kv_tokens_planned"] < 0.6 * counted["kv_tokens_query_centric"]

    def test_dumps_of_requests_are_read_back_as_traces(
        self, engine: Any, workload: Workload, tmp_path: Path
    ) -> None:
        """SGLang dumps finished requests, and those running at a crash."""
        folders = tmp_path / "dumps", tmp_path / "crash"
        asked, manager = workload.no_sharing, engine.tokenizer_manager
        manager.configure_logging(
            ConfigureLoggingReq(
                dump_requests_folder=str(folders[0]),
                dump_requests_threshold=len(asked),
                crash_dump_folder=str(folders[1]),
            )
        )
        answers = generate(engine, asked)
        manager.dump_requests_before_crash("host")
        # A thread that the engine's event loop starts writes the second dump.
        deadline = time.monotonic() + 60
        while not list(folders[0].glob("*.pkl")) and time.monotonic() < deadline:
            run(engine, asyncio.sleep(0.2))
        expected = [
            (request.prompt, len(output))
            for request, output in zip(asked, tokens(answers), strict=True)
        ]
        for folder in folders:
            trace = open_trace(folder, strict=True)
            assert trace.format == "sglang-dump"
            found = [(token_ids(r.prompt).tolist(), r.output_length) for r in trace.stream]
            assert sorted(found) == sorted(expected)


class TestPageSize16InASmallPool(_Everywhere, _SmallPool):
    """Pages, a pool too small for the admitted requests, and chunks beside decoding rows."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "page_size": 16,
        "max_total_tokens": 768,
        "max_running_requests": MAX_RUNNING,
        "chunked_prefill_size": 64,
        "enable_mixed_chunk": True,
        **MANY_ADMITTED,
    }

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
        assert finished[-1] is decoding  # so all chunks ran while it was decoding


@pytest.mark.nightly
class TestPageSize64(_Everywhere, _Features, _Sessions):
    """Large pages, and another order of prefills and evictions."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "page_size": 64,
        "max_total_tokens": 1024,
        "max_running_requests": MAX_RUNNING,
        "schedule_policy": "dfs-weight",
        "radix_eviction_policy": "lfu",
    }

    def test_eviction(
        self, engine: Any, workload: Workload, expected: Expected, stats: Stats
    ) -> None:
        stats.new()
        for asked in (workload.crowd, workload.long_prompts, workload.no_sharing, workload.crowd):
            assert_same(generate(engine, asked), asked, expected)
        assert stats.new()["tree_events"]["evict"] > 0


@pytest.mark.nightly
class TestStreamingSessionsAndPrioritiesInASmallPool(_Everywhere, _Features, _Sessions, _SmallPool):
    """Streaming sessions pass their rows to the next turn; urgent requests preempt others."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "page_size": 1,
        "max_total_tokens": 900,
        "max_running_requests": MAX_RUNNING,
        "enable_streaming_session": True,
        "enable_priority_scheduling": True,
        "schedule_policy": "fcfs",
        "default_priority_value": 0,
        "priority_scheduling_preemption_threshold": 5,
        **MANY_ADMITTED,
    }

    def test_streaming_sessions_with_retraction(
        self, engine: Any, workload: Workload, expected: Expected
    ) -> None:
        flush(engine)
        answers = self.talk(engine, workload, expected, streaming=True)
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0

    def test_urgent_requests_push_others_out(
        self, engine: Any, workload: Workload, expected: Expected
    ) -> None:
        flush(engine)
        waiting = [*workload.long_answers, *workload.crowd[:2]]
        assert len(waiting) == MAX_RUNNING
        urgent = workload.three_levels[:4]
        begun: list[None] = []

        async def read(request: Request) -> dict[str, Any]:
            answer: dict[str, Any] = {}
            async for answer in await start(engine, request, priority=0):
                if len(answer["output_ids"]) == 3:
                    begun.append(None)
            return answer

        async def push() -> list[dict[str, Any]]:
            while len(begun) < MAX_RUNNING - 2:
                await asyncio.sleep(0.005)
            return await asyncio.gather(
                *(
                    engine.async_generate(
                        input_ids=each.prompt, sampling_params=each.sampling_params, priority=100
                    )
                    for each in urgent
                )
            )

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(push(), *map(read, waiting))

        answers_to_urgent, *answers = run(engine, all_of_them())
        assert_same(answers_to_urgent, urgent, expected)
        assert_same(answers, waiting, expected)
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.nightly
class TestInGraphs(_Everywhere, _Features, _SmallPool):
    """CUDA graphs of several sizes, in which steps reuse a plan (`fakes.cuda_graphs`)."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "has_graphs": True,
        "page_size": 4,
        "max_total_tokens": 900,
        "max_running_requests": MAX_RUNNING,
        "chunked_prefill_size": 64,
        "enable_mixed_chunk": True,
        **MANY_ADMITTED,
    }


def test_pat_for_decode_only_and_no_radix_cache(
    tiny_model: Path, tmp_path: Path, workload: Workload, expected: Expected
) -> None:
    arguments = {
        "decode_attention_backend": "pat",
        "disable_radix_cache": True,
        "max_total_tokens": 8192,
        "max_running_requests": MAX_RUNNING,
    }
    with running_pat_engine(tiny_model, tmp_path, backend=None, **arguments) as (engine, stats):
        for asked in (workload.three_levels, workload.two_roots):
            assert_same(generate(engine, asked), asked, expected)
        counted = stats.new()
    ((reason, steps),) = counted["steps_without_sharing"].items()
    assert reason.startswith("no shared paths are known to ")
    assert steps == counted["plans_built"] + counted["plans_reused"] > 0
    assert counted["kv_tokens_planned"] == counted["kv_tokens_query_centric"]


async def answers_together(engine: Any, asked: list[Request]) -> list[dict[str, Any]]:
    """Send each request by a call of its own, all at once; return the answers."""
    return await asyncio.gather(
        *(
            engine.async_generate(input_ids=each.prompt, sampling_params=each.sampling_params)
            for each in asked
        )
    )


async def answers_with_aborts(
    engine: Any, asked: list[Request], after: list[int]
) -> list[list[int]]:
    """Return the tokens of all requests; abort the first requests `after` so many tokens."""

    async def read(i: int) -> list[int]:
        received: list[int] = []
        rid = uuid.uuid4().hex
        is_aborted = False
        async for answer in await start(engine, asked[i], rid=rid):
            received = answer["output_ids"]
            if i < len(after) and len(received) >= after[i] and not is_aborted:
                engine.tokenizer_manager.abort_request(rid=rid)
                is_aborted = True
        return received

    return await asyncio.gather(*map(read, range(len(asked))))


def assert_begun(
    received: list[list[int]], aborted: list[Request], after: list[int], expected: Expected
) -> None:
    """Assert that each aborted request received the beginning of its answer."""
    for request, some, least in zip(aborted, received, after, strict=False):
        assert least <= len(some)
        assert some == expected.of(request)[: len(some)]


def stopping_early(request: Request, expected: Expected) -> Request:
    """Return the request with a stop token that first occurs in the middle of its answer."""
    answer = expected.of(request)
    position = next(i for i in range(3, len(answer)) if answer[i] not in answer[:i])
    return Request(request.prompt, request.num_tokens, stop=answer[position])
