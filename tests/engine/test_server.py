"""A server as users start it, over HTTP. `test_guide` starts one by `sglang.launch_server`."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from sglang_engines import (
    LAUNCH_SERVER,
    SGLANG_SERVE,
    TINY,
    Expected,
    Request,
    Server,
    Stats,
    Workload,
    running_server,
)

pytestmark = pytest.mark.engine

WAIT_SECONDS = 60
ENDLESS = 1500  # tokens; SGLang aborts the request of a client that has left long before
DECODE_LOG_INTERVAL = 10
ARGUMENTS = {
    "attention_backend": "pat",
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "enable_metrics": True,
}


def assert_answers_concurrent_clients(
    server: Server, workload: Workload, expected: Expected
) -> None:
    asked = workload.three_levels + workload.crowd + workload.two_roots
    with ThreadPoolExecutor(max_workers=12) as clients:
        answers = list(clients.map(server.generate, asked))
    assert answers == [expected.of(request) for request in asked]


def assert_survives_clients_that_leave(
    server: Server, workload: Workload, expected: Expected, stats: Stats
) -> None:
    """Half of the clients close the connection mid-answer; the others get their whole answers."""
    leaving, staying = workload.long_answers * 3, workload.crowd + workload.two_roots
    endless = {"max_new_tokens": ENDLESS, "ignore_eos": True}

    def leave(request: Request) -> bytes:
        body = {"input_ids": request.prompt, "sampling_params": endless, "stream": True}
        url = f"{server.url}/generate"
        with requests.post(url, json=body, stream=True, timeout=120) as response:
            response.raise_for_status()
            chunk: bytes = next(response.iter_content(chunk_size=None))
            return chunk

    with ThreadPoolExecutor(max_workers=24) as clients:
        begun = [clients.submit(leave, request) for request in leaving]
        answers = list(clients.map(server.generate, staying))
        assert all(each.result().startswith(b"data: ") for each in begun)
    assert answers == [expected.of(request) for request in staying]
    flushed = requests.post(f"{server.url}/flush_cache?timeout=30", timeout=WAIT_SECONDS)
    flushed.raise_for_status()  # SGLang refuses while requests run
    counted = stats.new()
    assert counted["plans_built"] + counted["plans_reused"] < ENDLESS  # so no leaver's is whole


def assert_metrics_are_published(server: Server, counted: dict[str, Any]) -> None:
    """Assert that SGLang's /metrics has pat's metrics with its labels, up to the last step."""
    expected = {
        "sglang:pat_plans_built_total": counted["plans_built"],
        "sglang:pat_plans_reused_total": counted["plans_reused"],
        "sglang:pat_kv_tokens_query_centric_total": counted["kv_tokens_query_centric"],
        "sglang:pat_kv_tokens_read_total": counted["kv_tokens_planned"],
        "sglang:pat_kv_tokens_lower_bound_total": counted["kv_tokens_lower_bound"],
        "sglang:pat_plan_seconds_count": counted["plans_built"] + counted["plans_reused"],
    }

    def by(label: str, metric: str) -> dict[str, float]:
        found = (each for each in samples if each.name == f"sglang:pat_{metric}_total")
        return {each.labels[label]: each.value for each in found}

    def are_tree_events_there() -> bool:  # at least: the tree also changes after the last step
        events = by("kind", "tree_events")
        return all(events.get(kind, 0) >= count for kind, count in counted["tree_events"].items())

    deadline = time.monotonic() + WAIT_SECONDS
    samples = server.metrics()
    found: dict[str, float] = {}
    while not (found == expected and are_tree_events_there()) and time.monotonic() < deadline:
        time.sleep(0.2)
        samples = server.metrics()
        found = {
            name: sum(each.value for each in samples if each.name == name) for name in expected
        }
    assert found == expected
    assert are_tree_events_there()
    (running,) = (each for each in samples if each.name == "sglang:num_running_reqs")
    (reused,) = (each for each in samples if each.name == "sglang:pat_plans_reused_total")
    assert reused.labels == running.labels

    assert by("cause", "plans_built") == counted["causes"]
    changes = by("kind", "batch_changes")
    assert changes == {kind: count for kind, count in counted["batch_changes"].items() if count}
    assert changes["join"] >= changes["leave"] > 0
    events = by("kind", "tree_events")
    assert min(events[kind] for kind in ("insert", "checkpoint", "lock", "unlock")) > 0
    (ratio,) = (each.value for each in samples if each.name == "sglang:pat_kv_read_ratio")
    assert 0 < ratio <= 1 or math.isnan(ratio)  # it becomes NaN a second after the last step


def assert_routes_are_published(server: Server) -> None:
    """Assert that SGLang's metrics and server info say that pat decodes all layers."""
    routes = [each for each in server.metrics() if each.name == "sglang:pat_layers"]
    assert [(each.labels["route"], each.labels["reason"]) for each in routes] == [("pat", "")]
    assert [each.value for each in routes] == [TINY.num_layers]
    info = server.info()
    assert info["attention_backend"] == "torch_native"  # prefill
    assert info["decode_attention_backend"] == "pat"
    assert info["pat"] == {
        "default_backend": "torch_native",
        "pat_layers": TINY.num_layers,
        "default_layers": {},
        "batch_invariant": False,
    }


def assert_steps_are_logged(log: str) -> None:
    lines = [line for line in log.splitlines() if "Pat decode, #plan: " in line]
    assert lines
    for line in lines:
        planned = re.search(r"#plan: (\d+), #reuse: (\d+), .* kv read ratio: [01]\.\d\d, ", line)
        assert planned is not None
        assert int(planned[1]) + int(planned[2]) == DECODE_LOG_INTERVAL


def test_sglang_serve_answers_and_ends_on_sigterm(
    tiny_model: Path,
    workload: Workload,
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats_file = tmp_path / "stats.json"
    monkeypatch.setenv("SGLANG_PAT_DEBUG", "1")
    monkeypatch.setenv("SGLANG_PAT_STATS_FILE", str(stats_file))
    arguments = ARGUMENTS | {"decode_log_interval": DECODE_LOG_INTERVAL, "log_level": "info"}
    with running_server(SGLANG_SERVE, tiny_model, tmp_path / "log", **arguments) as server:
        assert_answers_concurrent_clients(server, workload, expected)
        stats = Stats(stats_file, server.info)
        assert_survives_clients_that_leave(server, workload, expected, stats)
        counted = json.loads(stats_file.read_text())
        assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]
        assert counted["steps_without_sharing"] == {}
        assert_metrics_are_published(server, counted)
        assert_routes_are_published(server)
        assert_steps_are_logged(server.log.read_text())

        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + WAIT_SECONDS
        while server.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.processes() == [], f"still running after SIGTERM:\n{server.tail()}"
        assert "Traceback" not in server.log.read_text()
        assert json.loads(stats_file.read_text())["plans_built"] > 0  # a complete file


@pytest.mark.nightly
def test_a_server_that_falls_back_whole_says_so_on_its_page(
    workload: Workload, tmp_path: Path
) -> None:
    """The server has one metric of pat, which the alert PatFallsBack reads."""
    model = replace(TINY, head_dim=32)
    folder = model.write(tmp_path / "model")
    with running_server(LAUNCH_SERVER, folder, tmp_path / "log", **ARGUMENTS) as server:
        server.generate(workload.three_levels[0])
        found = [each for each in server.metrics() if each.name.startswith("sglang:pat_")]
    (layers,) = found
    assert (layers.name, layers.value) == ("sglang:pat_layers", model.num_layers)
    assert layers.labels["route"] == "default"
    assert layers.labels["reason"] == "head_dim 32"
