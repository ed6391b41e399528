"""The hierarchical cache: KV that left the device comes back from the host or from files.

A restored node has new slots and may have been split, so pat must read paths again.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fakes.driver import HICACHE_ARGUMENTS, go_without_driver
from sglang_engines import Expected, Request, Workload, flush, generate, running_pat_engine, tokens

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def answer(engine: Any, asked: list[Request], expected: Expected) -> Counter[str]:
    """Compare the answers. Returns how many prompt tokens each cache tier had."""
    answers = generate(engine, asked)
    assert tokens(answers) == [expected.of(request) for request in asked]
    tiers: Counter[str] = Counter()
    for each in answers:
        details = each["meta_info"].get("cached_tokens_details") or {}
        tiers.update({name: count for name, count in details.items() if isinstance(count, int)})
    return tiers


def test_write_through_and_files(
    tiny_model: Path,
    workload: Workload,
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    # SGLang compiles its hash function there. An engine that is killed meanwhile leaves a lock, for
    # which 0.5.17 would wait for ever.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    go_without_driver(tmp_path, monkeypatch)
    arguments = HICACHE_ARGUMENTS | {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "enable_cache_report": True,
        "page_size": 16,
        "max_total_tokens": 1024,  # too small for the whole workload
        "max_running_requests": 8,
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 16}),
    }
    with running_pat_engine(tiny_model, tmp_path, **arguments) as (engine, stats):
        answer(engine, workload.three_levels, expected)
        stats.new()
        from_host = 0
        for others in (workload.no_sharing, workload.long_prompts, workload.crowd):
            answer(engine, others, expected)  # evicts `three_levels` from the device
            from_host += answer(engine, workload.three_levels, expected)["host"]
        assert from_host > 0
        counted = stats.new()
        assert counted["tree_events"]["evict"] > 0
        assert counted["steps_without_sharing"] == {}
        assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]
        flush(engine)  # empties the device and the host, but not the files
        stats.new()
        assert answer(engine, workload.three_levels, expected)["storage"] > 0
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]
