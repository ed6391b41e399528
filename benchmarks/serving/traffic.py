"""Requests at rising rates through SGLang's own client, `python -m sglang.bench_serving`.

Its generated-shared-prefix dataset: groups of requests with a system prompt in common. The client
is a process of its own, and gets its own home folder, because it keeps the prompts that it has made
there, under a name that does not say of which vocabulary.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

from serving.cases import Traffic
from sglang_pat.bench.http_server import as_flags
from sglang_pat.bench.server import Server
from sglang_pat.sglang.cpu import STUB_DIR, cuda_driver_is_present

CLIENT_SECONDS = 300
METRICS = (
    "duration",
    "completed",
    "concurrency",
    "request_throughput",
    "input_throughput",
    "output_throughput",
    *(
        f"{of}_{what}_ms"
        for what in ("ttft", "tpot", "itl", "e2e_latency")
        for of in ("mean", "median", "p99")
    ),
)


def measure(server: Server, traffic: Traffic, rate: float, model: Path) -> dict[str, Any]:
    """What the client reports about `traffic` at `rate`. model: folder with the tokenizer.

    RuntimeError with what the client printed if it fails, or if not every request was answered.
    """
    per_group = traffic.per_group(rate)
    # The client could warm up and flush itself, but does not wait for the server to become idle.
    warm_up = {"temperature": 0, "max_new_tokens": 4}
    server.generate([[token] * traffic.question for token in range(1, 33)], warm_up)
    server.flush()
    output = model / "client.jsonl"
    output.unlink(missing_ok=True)
    arguments = {
        "backend": "sglang",
        "base_url": server.url,
        "model": model,
        "tokenizer": model,
        "dataset_name": "generated-shared-prefix",
        "gsp_num_groups": traffic.groups,
        "gsp_prompts_per_group": per_group,
        "gsp_system_prompt_len": traffic.system_prompt,
        "gsp_question_len": traffic.question,
        "gsp_output_len": traffic.answer,
        "request_rate": rate,
        "seed": 1,
        "warmup_requests": 0,
        "disable_tqdm": True,
        "output_file": output,
    }
    # Another home must not hide what is installed in the old one.
    environment = {
        **os.environ,
        "HOME": str(model),
        "PYTHONUSERBASE": site.getuserbase(),
        "HF_HUB_OFFLINE": "1",
    }
    if not cuda_driver_is_present():
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(STUB_DIR), os.environ.get("PYTHONPATH")))
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sglang.bench_serving", *as_flags(arguments)],
            env=environment,
            timeout=CLIENT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"sglang.bench_serving at {rate:g} req/s: {error}") from error
    if done.returncode or not output.exists():
        raise RuntimeError(
            f"sglang.bench_serving failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    reported = json.loads(output.read_text().splitlines()[-1])
    requests = traffic.groups * per_group
    if reported["completed"] != requests:
        raise RuntimeError(
            f"{reported['completed']} of {requests} requests answered:\n{done.stdout}"
        )
    return {"requests": requests, **{name: reported[name] for name in METRICS}}
