"""The hierarchical cache: KV that left the device comes back from the host or from files.

A node that comes back has other slots, and may be split on the way: paths are read anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_engines import (
    Expected,
    Request,
    Stats,
    Workload,
    flush,
    generate,
    running_pat_engine,
    tokens,
)
from sglang_without_driver import HICACHE_ARGUMENTS, go_without_driver

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

POOL_TOKENS = 1024  # too small for the whole workload


@pytest.fixture(params=["write_through", "write_back"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine_and_stats(
    policy: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Stats]]:
    go_without_driver(tmp_path, monkeypatch)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    arguments = HICACHE_ARGUMENTS | {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "hicache_write_policy": policy,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 16}),
        "enable_cache_report": True,
        "page_size": 16,
        "max_total_tokens": POOL_TOKENS,
        "max_running_requests": 8,
    }
    with running_pat_engine(tiny_model, tmp_path, **arguments) as running:
        yield running


def found(answers: list[dict[str, Any]]) -> Counter[str]:
    """How many tokens of the prompts were found in each tier."""
    tiers: Counter[str] = Counter()
    for answer in answers:
        details = answer["meta_info"].get("cached_tokens_details") or {}
        tiers.update({name: count for name, count in details.items() if isinstance(count, int)})
    return tiers


def test_what_was_evicted_comes_back(
    engine_and_stats: tuple[Any, Stats], workload: Workload, expected: Expected
) -> None:
    engine, stats = engine_and_stats

    def answer(asked: list[Request]) -> Counter[str]:
        answers = generate(engine, asked)
        assert tokens(answers) == [expected.of(request) for request in asked]
        return found(answers)

    asked = workload.three_levels
    answer(asked)
    stats.new()
    from_host = 0
    for others in (workload.no_sharing, workload.long_prompts, workload.crowd):
        answer(others)  # drives the three levels out of the device
        from_host += answer(asked)["host"]
    assert from_host > 0
    counted = stats.new()
    assert counted["tree_events"]["evict"] > 0
    assert counted["private_steps"] == {}
    assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]

    answer(workload.long_answers)  # outgrow the pool together, and are retracted
    flush(engine)  # empties the device and the host, but not the files
    stats.new()
    assert answer(asked)["storage"] > 0
    counted = stats.new()
    assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]
