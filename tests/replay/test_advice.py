"""The advice: its times against recorded servers, its tree, what it says, what it needs not.

The recorded runs are of one H100 (`benchmarks/results/h100`). No estimate may be off by 10%.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_pat.cli.main import main
from sglang_pat.model_layers import decoder_config
from sglang_pat.replay import advice
from sglang_pat.replay.advice import DEFAULT, PAT, AdvisedRequest, ServerEstimate, estimate
from sglang_pat.replay.step_time import StepTime
from sglang_pat.workload.models import GPUS, read_config
from sglang_pat.workload.trace import TokenPrompt, TraceRequest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/h100"
TRACE = ROOT / "tests/support/data/conversation.jsonl"
BACKENDS = ((PAT, "pat"), (DEFAULT, "fa3"))
SERVERS = [json.loads((RESULTS / name).read_text())
           for name in ("serving.json", "sglang-0.5.23/serving.json")]  # fmt: skip
CASES = [(server["models"][case["model"]], case) for server in SERVERS for case in server["cases"]]
# Those of a load that comes and goes: SGLang's own client, eight system prompts.
TRAFFIC = [run for run in SERVERS[0]["serving"] if run["backend"] in ("pat", "fa3")]
POOL = 400_000


def batch_of(case: dict[str, Any]) -> list[AdvisedRequest]:
    """The requests of a recorded batch, all at once."""
    requests = []
    for index in range(case["batch"]):
        group = index * case["groups"] // case["batch"]
        blocks = ((-1 - group, case["prefix"]), (index, case["private"]))
        kept = tuple(block for block in blocks if block[1])
        length = case["prefix"] + case["private"]
        requests.append(AdvisedRequest(0.0, kept, length, case["generated"]))
    return requests


def traffic_of(run: dict[str, Any], seed: int) -> list[AdvisedRequest]:
    random = np.random.default_rng(seed)
    count = run["requests"]
    arrivals = np.cumsum(random.exponential(1, count))
    arrivals *= count / run["request_rate"] / arrivals[-1]
    groups = random.permutation(np.arange(count) % 8)
    return [
        AdvisedRequest(float(arrival), ((-1 - int(group), 4096), (index, 128)), 4224, 256)
        for index, (arrival, group) in enumerate(zip(arrivals, groups, strict=True))
    ]


# --- against recorded runs ---


@pytest.mark.parametrize(("config", "case"), CASES)
def test_recorded_batches_are_estimated_within_ten_percent(
    config: dict[str, Any], case: dict[str, Any]
) -> None:
    step_time = StepTime.of(config, GPUS["H100"])
    for backend, name in BACKENDS:
        found = estimate(batch_of(case), step_time, backend, pool=4 * POOL)
        assert found.step_ms == pytest.approx(case["tpot_ms"][name], rel=0.10), name


@pytest.mark.parametrize("run", TRAFFIC, ids=lambda run: f"{run['backend']}-{run['request_rate']}")
def test_recorded_traffic_is_estimated_within_ten_percent(run: dict[str, Any]) -> None:
    step_time = StepTime.of(SERVERS[0]["models"][run["model"]], GPUS["H100"])
    backend = PAT if run["backend"] == "pat" else DEFAULT
    found = [estimate(traffic_of(run, seed), step_time, backend, pool=POOL) for seed in range(3)]
    tpot = np.mean([server.tpot_ms for server in found])
    assert tpot == pytest.approx(run["mean_tpot_ms"], rel=0.10)


# `requests x (shared tokens) + private ones`, the shared ones once or in groups.
QUESTION = re.compile(r"(\d+) x (?:\((?:(\d+) x )?([\d,]+) shared\) \+ )?([\d,]+)")


def present_cases() -> list[tuple[str, dict[str, Any], dict[str, float]]]:
    """Batches that servers of the whole model have served with later kernels, and their times."""
    found = []
    for case in json.loads((RESULTS / "bench.json").read_text())["cases"]:
        batch = dict(case, batch=case["requests"], groups=1, generated=case["tokens"])
        times = {name: case["tpot_ms"][name]["median"] for name in case["tpot_ms"]}
        found.append((case["name"], batch, {"pat": times["pat"], "fa3": times["default"]}))
    for case in json.loads((RESULTS / "serving-gates-whole.json").read_text())["cases"]:
        asked = QUESTION.fullmatch(case["question"])
        if asked is not None:  # not requests of many lengths
            numbers = [int((text or "0").replace(",", "")) for text in asked.groups()]
            count, groups, prefix, private = numbers
            batch = {"batch": count, "groups": max(groups, 1), "prefix": prefix}
            batch |= {"private": private, "generated": case["tokens"]}
            found.append((case["question"], batch, case["tpot_ms"]))
    return found


def test_batches_with_later_kernels_are_estimated_within_ten_percent() -> None:
    step_time = StepTime.of(SERVERS[0]["models"]["llama-3-8b"], GPUS["H100"])
    cases = present_cases()
    assert len(cases) == 12
    for title, batch, times in cases:
        for backend, name in BACKENDS:
            found = estimate(batch_of(batch), step_time, backend, pool=4 * POOL)
            assert found.step_ms == pytest.approx(times[name], rel=0.10), (title, name)


# --- the simulated server ---


def llama(gpu: str = "H100", tp: int = 1, **changes: Any) -> StepTime:
    _, config = read_config("llama-3.1-8b")
    return StepTime.of({**config, **changes}, GPUS[gpu], tp)


def test_common_is_counted_exactly() -> None:
    # 4 requests: 1,000 tokens in common, 200 each of their own, answers of 2 tokens.
    requests = [AdvisedRequest(0.0, ((-1, 1000), (i, 200)), 1200, 3) for i in range(4)]
    found = estimate(requests, llama(), PAT, pool=POOL)
    # In the two steps each request attends to 1,201 and 1,202 tokens.
    assert found.common == pytest.approx(1 - (1000 + 4 * 201.5) / (4 * 1201.5))
    assert (found.requests, found.steps, found.batch) == (4, 2, 4)


def test_prefixes_that_fit_into_no_batch_together_share_nothing() -> None:
    requests = [AdvisedRequest(float(i), ((-1, 1000),), 1000, 2) for i in range(4)]
    found = estimate(requests, llama(), DEFAULT, pool=POOL)
    assert found.common == 0
    assert not found.overloaded


def test_tokens_are_shared_by_blocks() -> None:
    tokens = np.arange(100, dtype=np.int64)
    one, other = (
        AdvisedRequest.of(TraceRequest(0.0, TokenPrompt(each), 4))
        for each in (tokens, np.concatenate((tokens[:80], tokens[:20])))
    )
    common = [a for a, b in zip(one.blocks, other.blocks, strict=True) if a == b]
    assert sum(length for _, length in common) == 64
    assert (one.prompt_length, other.prompt_length) == (100, 100)


def test_a_pool_that_is_short_admits_fewer_and_evicts() -> None:
    requests = [AdvisedRequest(0.0, ((i % 7, 500), (100 + i, 50)), 550, 20) for i in range(50)]
    small = estimate(requests, llama(), DEFAULT, pool=1800)
    large = estimate(requests, llama(), DEFAULT, pool=POOL)
    assert small.requests == large.requests == 50
    assert small.batch < 5 < large.batch
    assert small.overloaded


def test_blocks_that_were_used_longest_ago_are_evicted_first() -> None:
    tree = advice._Tree()
    prompts = [((i, 10), (100 + i, 5)) for i in range(3)]
    paths = [tree.join(prompt) for prompt in prompts]
    assert (tree.held, tree.tokens) == (45, 45)
    for path in paths[:2]:
        tree.leave(path)
    tree.shrink(40)  # the deeper block of the first
    assert [tree.missing(prompt) for prompt in prompts] == [(5, 15), (0, 15), (0, 0)]
    tree.shrink(0)  # all but what a running request holds
    assert (tree.held, tree.tokens) == (15, 15)
    assert tree.missing(prompts[1]) == (15, 15)


def test_a_request_longer_than_the_pool_is_refused() -> None:
    requests = [AdvisedRequest(0.0, ((i, length),), length, 5) for i, length in enumerate((90, 10))]
    found = estimate(requests, llama(), DEFAULT, pool=50)
    assert (found.requests, found.refused) == (1, 1)
    with pytest.raises(ValueError, match="no request of the trace fits into a KV pool of 5 tokens"):
        estimate(requests, llama(), DEFAULT, pool=5)


def test_windows_read_no_more_than_they_hold() -> None:
    window = {
        "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 31 + ["full_attention"],
    }
    requests = [AdvisedRequest(0.0, ((i, 8192),), 8192, 64) for i in range(16)]
    whole = estimate(requests, llama(), DEFAULT, pool=POOL)
    hybrid = estimate(requests, llama(**window), DEFAULT, pool=POOL)
    assert hybrid.attention < whole.attention / 2


def test_what_no_run_has_checked_is_said() -> None:
    assert advice.unchecked(llama()) == ()
    experts = {"num_experts": 8, "moe_intermediate_size": 512, "num_experts_per_tok": 2}
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    said = " ".join(advice.unchecked(llama("L4", 2, **experts, **fp8)))
    for words in ("L4 is scaled", "between 2 GPUs", "mixture of experts", "quantised"):
        assert words in said
    assert llama(**fp8).held_weight_bytes * 2 == llama().held_weight_bytes


@pytest.mark.parametrize(
    ("quantisation", "size"),
    [
        ({"quant_method": "fp8"}, 1),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 9 / 16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
            },
            1,
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values()))[:30] if isinstance(value, dict) else None,
)
def test_quantised_weights_have_their_size(quantisation: dict[str, Any], size: float) -> None:
    quantised = llama(quantization_config=quantisation)
    assert quantised.weight_bytes == size
    assert advice.unchecked(quantised) == ("no quantised model was recorded",)


def test_a_multimodal_model_is_quantised_as_a_whole() -> None:
    fp8 = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    _, inner = read_config("llama-3-8b")
    config = decoder_config({"text_config": inner, "quantization_config": fp8})
    step_time = StepTime.of(config, GPUS["H100"])
    assert (step_time.weight_bytes, step_time.kv_bytes) == (1, 1)


def test_an_unknown_quantisation_is_said() -> None:
    said = advice.unchecked(llama(quantization_config={"quant_method": "tomorrow"}))
    assert "weights of tomorrow are counted as 2 bytes each" in said


def test_a_mixture_of_experts_reads_what_its_batch_touches() -> None:
    experts = {"num_experts": 128, "moe_intermediate_size": 512, "num_experts_per_tok": 8}
    mixture = llama(**experts)
    assert mixture.without_attention(1) < mixture.without_attention(16) / 1.5
    assert mixture.without_attention(200) < 1.5 * mixture.without_attention(100)


# --- the command ---


def test_the_command_on_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "advice.json"
    words = ["advise", "--model", "llama-3.1-8b", "--trace", str(TRACE), "--json", str(file)]
    assert main(words) == 0
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert "32 of 32 layers accelerated" in out
    assert "within 10%, as for the recorded runs of an H100" in out
    assert out.strip().endswith(found["verdict"])
    assert found["verdict"].count(". ") == 0
    assert found["default"]["requests"] > 0
    assert found["saved"] == round(1 - found["pat"]["tpot_ms"] / found["default"]["tpot_ms"], 2)


def test_the_command_says_what_pays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "--model", "qwen3-8b", "--limit", "200", "--generate"]
    assert main([*words, "few-shot", "--rate", "40"]) == 0
    assert "pat pays for this traffic: a token would take about" in capsys.readouterr().out
    assert main([*words, "no-sharing"]) == 0
    out = capsys.readouterr().out
    assert "pat does not pay for this traffic: 0% of the KV" in out


def test_a_model_without_accelerated_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, config = read_config("llama-3.1-8b")
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    )
    words = ["advise", "--model", str(tmp_path), "--trace", str(TRACE), "--limit", "50"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "0 of 32 layers accelerated" in out
    assert "pat does not pay: it accelerates no layer of" in out


def test_starcoder_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "gpt_bigcode",
        "multi_query": True,
        "n_embd": 6144,
        "n_head": 48,
        "n_inner": 24576,
        "n_layer": 40,
        "n_positions": 8192,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = StepTime.of(read_config(tmp_path)[1], GPUS["H100"]).weights
    assert weights.dense == pytest.approx(15.5e9, rel=0.01)  # as published
    words = ["advise", "--model", str(tmp_path), "--trace", str(TRACE), "--limit", "50"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "0 of 40 layers accelerated" in out
    assert "query heads per KV head 48: SGLang's default backend" in out


def test_sglang_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['sglang'] = None\n"
        "from sglang_pat.cli.main import main\n"
        "sys.exit(main(['advise', '--model', 'qwen3-8b', '--generate', 'toolagent', "
        "'--limit', '20']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "TPOT" in result.stdout


def test_a_large_trace_takes_seconds() -> None:
    random = np.random.default_rng(0)
    arrivals = np.cumsum(random.exponential(0.3, 3000))
    requests = [
        AdvisedRequest(
            float(arrival),
            tuple((int(random.integers(0, 4 + 50 * depth)), 512) for depth in range(20)),
            20 * 512,
            300,
        )
        for arrival in arrivals
    ]
    begun = time.perf_counter()
    found = estimate(requests, llama(), PAT, pool=POOL)
    assert isinstance(found, ServerEstimate)
    # 12,000 requests twice must stay under two minutes on a slower machine.
    assert time.perf_counter() - begun < 12
