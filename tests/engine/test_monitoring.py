"""The dashboard and the alert rules in a real Prometheus that scrapes a running server.

The tests need the program `prometheus` (Debian's package) in PATH or in the folder that
PROMETHEUS_FOLDER names, and are skipped without it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from sglang_engines import LAUNCH_SERVER, Request, Server, Workload, running_server

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

FOLDER = Path(__file__).resolve().parents[2] / "docs/operate/monitoring"
LOAD_SECONDS = 40
# Values of Grafana's variables, for a minute of data with a scrape a second.
VARIABLES = {"$__rate_interval": "15s", "$__range": "60s", "$instance": ".*"}
# Metrics without samples on a server without drafts and windows whose steps all share.
WITHOUT_DATA = {
    "KV reads: saved, and common / saved in windows, {{instance}}",
    "Rounds of a draft model / reads of verify steps",
    "Rounds of a draft model / {{kind}}",
    "Steps that share nothing, by reason / {{reason}}",
    "Draft tokens of a verify step / {{instance}}",
}


def program() -> str:
    found = shutil.which("prometheus", path=os.environ.get("PROMETHEUS_FOLDER"))
    if found is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    return found


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str]:
    """Start a Prometheus that scrapes `server` and evaluates the rules; yield its address."""
    rules = (FOLDER / "pat-rules.yml").read_text()
    rules = rules.replace("[5m]", "[15s]").replace("interval: 30s", "interval: 1s")
    (folder / "rules.yml").write_text(rules)
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = ["rules.yml"]
    (scraped,) = config["scrape_configs"]
    scraped["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [
            program(),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={address}",
        ],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "prometheus.log").open("w"),
    )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """Return the instant vector of an expression. Raises for an invalid expression."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    answer = requests.get(f"{address}/api/v1/query", params={"query": expression}, timeout=30)
    body = answer.json()
    assert body["status"] == "success", f"{expression}: {body}"
    result: list[dict[str, Any]] = body["data"]["result"]
    return result


def stream(server: Server, request: Request) -> None:
    """Stream an answer: SGLang measures the time between tokens only of streamed answers."""
    body = {"input_ids": request.prompt, "sampling_params": request.sampling_params, "stream": True}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=120)
    answer.raise_for_status()
    assert answer.text.rstrip().endswith("[DONE]")


def test_every_panel_and_rule_has_data(
    tiny_model: Path, workload: Workload, tmp_path: Path
) -> None:
    arguments = {
        "attention_backend": "pat",
        "max_total_tokens": 8192,
        "max_running_requests": 8,
        "enable_metrics": True,
    }
    panels = json.loads((FOLDER / "pat-dashboard.json").read_text())["panels"]
    with (
        running_server(LAUNCH_SERVER, tiny_model, tmp_path / "log", **arguments) as server,
        prometheus(server, tmp_path) as address,
    ):
        deadline = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < deadline:
            with ThreadPoolExecutor(max_workers=8) as clients:
                prompts = workload.three_levels + workload.crowd
                list(clients.map(lambda request: stream(server, request), prompts))
        seen = {
            f"{panel['title']} / {target['legendFormat']}": query(address, target["expr"])
            for panel in panels
            for target in panel["targets"]
        }
        groups = requests.get(f"{address}/api/v1/rules", timeout=30).json()["data"]["groups"]
        saved = query(address, "instance:sglang_pat_kv_saved:ratio5m")
    values = {name: [float(each["value"][1]) for each in found] for name, found in seen.items()}
    if file := os.environ.get("MONITORING_RESULT"):
        Path(file).write_text(json.dumps(values, indent=1) + "\n")
    assert {name for name, found in values.items() if not found} == WITHOUT_DATA
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 11
    assert {rule["health"] for rule in rules} == {"ok"}
    assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]
    (ratio,) = (float(each["value"][1]) for each in saved)
    assert 0.2 < ratio < 1
    (reads,) = values["KV reads saved / saved"]
    assert 0.2 < reads < 1
