"""Results of replays that never ran, for the tests of reports: any size, every number plausible."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sglang_pat.replay.options import ReplayOptions
from sglang_pat.replay.result import (
    Forest,
    ForestNode,
    KvTokenCounts,
    PolicyTotals,
    Result,
    StepRow,
)

POLICIES = {"memory": 1.04, "paper": 1.12, "compute": 1.31, "per-node": 1.0}
BYTES_PER_TOKEN = 131072  # Llama-3-8B
PARTIAL_SHARES = {"memory": 0.02, "paper": 0.03, "compute": 0.015, "per-node": 0.11}


def forest(batch: int = 64, seed: int = 0) -> Forest:
    """A system prompt of all, task prompts below it, a private tail for each request."""
    rng = random.Random(seed)
    nodes: list[ForestNode] = []

    def add(parent: int, begin: int, length: int, holders: int) -> int:
        nodes.append(
            {
                "id": len(nodes),
                "parent": parent,
                "begin": begin,
                "end": begin + length,
                "holders": holders,
            }
        )
        return len(nodes) - 1

    system = add(-1, 0, 1024, max(batch - 4, 1))
    waiting = max(batch - 4, 1)
    while waiting:
        holders = min(rng.choice([1, 2, 3, 8, 16]), waiting)
        waiting -= holders
        task = add(system, 1024, rng.randint(100, 2500), holders)
        end = nodes[task]["end"]
        if holders > 1:
            for _ in range(holders):
                add(task, end, rng.randint(20, 900), 1)
    for _ in range(batch - max(batch - 4, 1)):
        add(-1, 0, rng.randint(200, 3000), 1)
    return {"step": 17, "batch": batch, "nodes": nodes}


def result(
    steps: int = 400, policies: Sequence[str] = tuple(POLICIES), seed: int = 0, batch: int = 64
) -> Result:
    """A replay of `steps` decode steps, each of them sampled."""
    rng = random.Random(seed)
    rows = [_step(step, policies, rng, batch) for step in range(steps)]
    kv_tokens: KvTokenCounts = {
        "query_centric": sum(row["kv_tokens"]["query_centric"] for row in rows),
        "lower_bound": sum(row["kv_tokens"]["lower_bound"] for row in rows),
        "policies": {
            name: sum(row["kv_tokens"]["policies"][name] for row in rows) for name in policies
        },
    }
    causes = [row["cause"] for row in rows]
    built = {
        cause: causes.count(cause)
        for cause in ("first", "batch_changed", "tail_growth")
        if cause in causes
    }
    return {
        "meta": {
            "command": "sglang-pat replay conversation_trace.jsonl --max-batch 64",
            "versions": {"sglang-pat": "0.2.0", "sglang": "0.5.23"},
            "interrupted": False,
            "seconds": 1.5,
            "steps_per_second": steps / 1.5,
        },
        "trace": {
            "name": "conversation_trace.jsonl",
            "format": "mooncake",
            "requests": 4 * steps,
            "malformed": 0,
            "failed": 0,
            "errors": [],
            "input_tokens": 41_000 * steps,
            "output_tokens": 1_300 * steps,
        },
        "config": {
            "policies": list(policies),
            "max_batch": batch,
            "kv_tokens": 400_000,
            **_server(),
        },
        "totals": {
            "steps": steps,
            "requests": 4 * steps,
            "retracted": 0,
            "refused": 0,
            "prompt_tokens": 41_000 * steps,
            "decode_tokens": sum(row["batch"] for row in rows),
            "simulated_seconds": steps * 0.025,
            "batch_mean": sum(row["batch"] for row in rows) / steps if steps else 0.0,
            "prefix_hit_rate": 0.41 if steps else 0.0,
            "latency": {
                "queue_s": {"mean": 0.5, "p50": 0.25, "p99": 4.0},
                "ttft_s": {"mean": 0.75, "p50": 0.5, "p99": 4.25},
                "tpot_s": {"mean": 0.021, "p50": 0.02, "p99": 0.035},
                "service_s": {"mean": 6.0, "p50": 4.0, "p99": 31.0},
                "overloaded": False,
            },
            "step_ms": _step_ms(rows, policies) if steps else {},
            "kv_tokens": kv_tokens,
            "partial_bytes": {
                name: {
                    kind: sum(row["partial_bytes"][name][kind] for row in rows)
                    for kind in ("written", "read")
                }
                for name in ("query_centric", *policies)
            },
            "bytes": {
                name: sum(row["bytes"][name] for row in rows)
                for name in ("query_centric", "lower_bound", *policies)
            },
            "policies": {name: _policy(name, steps) for name in policies if steps},
            "comparisons": {
                name: {
                    "plans": steps,
                    "more": 3 * (name == "compute"),
                    "more_before_split": 0,
                    "worst_ratio": 1.004 if name == "compute" else 0.98,
                    "worst_ratio_before_split": 0.97,
                }
                for name in policies
                if name != "memory"
            },
            "mutations": {"insert": 5 * steps, "split": 2 * steps, "evict": steps},
            "plans": {"built": built, "reused": causes.count("reused")},
            "planning_us": {
                "p50": 41.0 if steps else 0.0,
                "p99": 173.5 if steps else 0.0,
                "reused_p50": 5.9 if steps else 0.0,
                "histogram": {"16": 40, "32": 90, "64": 31, "128": 4} if steps else {},
            },
        },
        "steps": rows,
        "capacity": capacity() if steps else {},
        "forest": forest(batch, seed) if steps else None,
    }


def _step(step: int, policies: Sequence[str], rng: random.Random, batch: int) -> StepRow:
    running = max(1, min(batch, step // 2 + rng.randint(-3, 3)))
    query_centric = running * rng.randint(3800, 4400)
    lower_bound = query_centric // 3 + rng.randint(0, 500)
    read = {name: int(lower_bound * POLICIES.get(name, 1.5)) for name in policies}
    partials = {
        name: int(read[name] * BYTES_PER_TOKEN * PARTIAL_SHARES.get(name, 0.05) / 2)
        for name in policies
    }
    partials["query_centric"] = int(query_centric * BYTES_PER_TOKEN * 0.003)
    causes = ["reused", "reused", "reused", "batch_changed", "tail_growth"]
    cause = rng.choice(causes) if step else "first"
    return {
        "step": step,
        "time": step * 0.025,
        "batch": running,
        "held_tokens": min(400_000, 900 * step + query_centric),
        "kv_tokens": {
            "query_centric": query_centric,
            "lower_bound": lower_bound,
            "policies": read,
        },
        "partial_bytes": {
            name: {"written": moved, "read": moved} for name, moved in partials.items()
        },
        "bytes": {
            "query_centric": query_centric * BYTES_PER_TOKEN + 2 * partials["query_centric"],
            "lower_bound": lower_bound * BYTES_PER_TOKEN,
            **{name: read[name] * BYTES_PER_TOKEN + 2 * partials[name] for name in policies},
        },
        "packs": dict.fromkeys(policies, running + 12),
        "cause": cause,
        "planning_us": 6.0 if cause == "reused" else 41.0,
    }


def _server() -> dict[str, object]:
    """Llama 3.1 8B on an H100, as `ReplayOptions.as_dict()` has it."""
    options = ReplayOptions().as_dict()
    return {name: options[name] for name in ("model", "gpu", "tp", "time")}


def _step_ms(rows: Sequence[StepRow], policies: Sequence[str]) -> dict[str, float]:
    names = ("query_centric", "lower_bound", *policies)
    return {
        name: 7.7 + sum(row["bytes"][name] for row in rows) / len(rows) / 2.8e9 for name in names
    }


def _policy(name: str, steps: int) -> PolicyTotals:
    return {
        "packs": 40 * steps,
        "work_items": 130 * steps,
        "split_pieces": 90 * steps,
        "partials": 210 * steps,
        "rows_per_pack": {"1": 20 * steps, "4": 9 * steps, "16": 6 * steps, "128": 5 * steps},
        "tiles": {"16": 30 * steps, "64": 8 * steps, "128": (2 + len(name)) * steps},
        "balance": {"tail_mean": 1.04, "tail_max": 1.31},
    }


def capacity() -> dict[str, object]:
    """A study of a 40 GiB pool: contiguous, paged and shared."""

    def use(
        scheme: str, page_size: int | None, requests: float, wasted: float
    ) -> dict[str, object]:
        reserved = 40 << 30
        return {
            "scheme": scheme,
            "page_size": page_size,
            "requests": requests,
            "fewest": int(requests * 0.8),
            "most": int(requests * 1.3),
            "reserved_bytes": reserved,
            "wasted_bytes": int(reserved * wasted),
            "free_bytes": 1 << 20,
            "shared_bytes": 6 << 30 if scheme == "shared" else 0,
        }

    sizes = (1, 16, 64, 256, 512)
    return {
        "model": "llama-3-8b",
        "pool_bytes": 40 << 30,
        "bytes_per_token": BYTES_PER_TOKEN,
        "max_length": 126_000,
        "fills": 12,
        "full": True,
        "refused": 2,
        "uses": [
            use("contiguous", None, 2.0, 0.9),
            *(use("paged", size, 24.5 - size / 256, size / 20_000) for size in sizes),
            *(use("shared", size, 31.5 - size / 128, size / 18_000) for size in sizes),
        ],
    }
