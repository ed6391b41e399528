"""The verdict: its text, and the numbers that decide it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.generate import WORKLOADS, generate
from sglang_pat.workload.models import GPUS, read_config
from sglang_pat.workload.run import DEFAULT, PAT, Setup, answer, distinct_tokens, serve
from sglang_pat.workload.server import Rules
from sglang_pat.workload.trace import Segment, TokenPrompt, TraceRequest, token_ids
from sglang_pat.workload.verdict import DOES_NOT_PAY, MAY_PAY, PAYS, verdict

TRACE = Path(__file__).parents[1] / "support" / "data" / "conversation.jsonl"
SMALL = ("--kv-tokens", "60000", "--max-running-requests", "64")


def setup(pool: int = 400_000, **rules: Any) -> Setup:
    _, config = read_config("llama-3.1-8b")
    return Setup(StepTime.of_model(config, GPUS["H100"]), pool, Rules(**rules))


@pytest.fixture
def answered(advise: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*words: object) -> dict[str, Any]:
        assert advise(*words, "--json", tmp_path / "found.json").status == 0
        found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
        return found

    return run


@pytest.mark.parametrize("name", [*WORKLOADS, "the trace"])
def test_every_workload_has_an_answer(name: str, answered: Any) -> None:
    source = ["--trace", TRACE] if name == "the trace" else ["--generate", name]
    found = answered(*source, "--limit", "60", *SMALL)["verdict"]
    assert set(found) >= {"tpot_ms", "requests_per_second", "error", "says"}
    for quantity in ("tpot_ms", "requests_per_second"):
        assert set(found[quantity]) == {"default", "pat"}
        assert min(found[quantity].values()) > 0
        assert 0 < found["error"][quantity] < 1


def test_the_verdict_comes_first_and_is_short(advise: Any) -> None:
    words = ["--limit", "300", "--generate"]
    status, out, _ = advise(*words, "few-shot")
    assert status == 0
    assert out.startswith("pat pays: ")
    assert len(out.splitlines()) <= 15
    assert advise(*words, "no-sharing").out.startswith("pat does not pay: ")
    assert "ms of a decode step" in advise(*words, "few-shot", "--verbose").out


@pytest.mark.parametrize(
    ("tpot", "rate", "says"),
    [
        ((10, 8.8), (4, 4), PAYS),
        ((10, 9.1), (4, 4), MAY_PAY),  # below the error of 10%
        ((10, 10), (4, 4.7), PAYS),
        ((10, 10), (4, 4.5), MAY_PAY),  # below the error of 15%
        ((10, 8), (4, 3.9), MAY_PAY),  # a loss in the other metric
        ((10, 9.96), (4, 4.01), DOES_NOT_PAY),  # shown as 0%
        ((10, 11), (4, 4), DOES_NOT_PAY),
    ],
)
def test_pays_needs_a_gain_above_the_error_and_no_loss(
    tpot: tuple[float, float], rate: tuple[float, float], says: str
) -> None:
    found = answer(list(generate("few-shot", requests=8).stream), setup())
    found.default.tpot_ms, found.pat.tpot_ms = tpot
    found = replace(found, most={DEFAULT: rate[0], PAT: rate[1]})
    said = verdict(found, "model", "trace")
    assert said.says == says
    assert said.sentence.startswith(f"pat {says}: ")


def test_answers_of_one_token_are_not_decoded(advise: Any, tmp_path: Path) -> None:
    files = ("--csv", tmp_path / "a", "--html", tmp_path / "b", "--json", tmp_path / "c")
    told = advise("--generate", "few-shot", "--limit", "9", "--max-new-tokens", "1", *files)
    assert told.status == 0
    out = " ".join(told.out.split())
    assert out.startswith("pat does not pay: no answer has a second token, so nothing is decoded. ")
    assert "Why: prefill takes 100% of the time; 32 of 32 layers accelerated." in out


def test_redundant_reads_are_counted_exactly() -> None:
    """4 requests have 1,000 common and 200 private tokens each, and answers of 3 tokens."""
    requests = [TraceRequest(0.0, (Segment(-1, 1000), Segment(i, 200)), 3) for i in range(4)]
    found = serve(requests, setup(), PAT)
    # In the two steps each request attends to 1,201 and 1,202 tokens.
    assert found.repeats == pytest.approx(1 - (1000 + 4 * 201.5) / (4 * 1201.5))
    assert (found.requests, found.steps, found.batch) == (4, 2, 4)
    assert found.kv_tokens["query-centric"] == 4 * 2 * 1201.5
    assert found.kv_tokens["distinct"] == 2 * (1000 + 4 * 201.5)


def test_a_server_that_is_never_starved_gives_its_most() -> None:
    requests = list(generate("conversation", requests=120).stream)
    many = [each._replace(arrival=each.arrival / 1000) for each in requests]
    found = answer(many, setup(max_running_requests=4))
    assert found.pat.starved < 0.02
    assert found.pat.overloaded
    assert found.most[PAT] == found.pat.requests_per_second
    few = answer(requests, setup())
    assert not few.pat.overloaded
    assert few.most[PAT] > 1.2 * few.pat.requests_per_second


def test_the_rate_of_the_trace_is_the_users(answered: Any) -> None:
    words = ["--generate", "conversation", "--limit", "100", "--rate"]
    slow, fast, most = (answered(*words, rate) for rate in ("2", "200", "inf"))
    assert slow["pat"]["tpot_ms"] < fast["pat"]["tpot_ms"]
    assert slow["pat"]["seconds"] == pytest.approx(50, rel=0.1)
    assert "2 a second" in slow["verdict"]["basis"]
    assert "all at once" in most["verdict"]["basis"]
    rates = [each["verdict"]["requests_per_second"]["pat"] for each in (slow, fast, most)]
    assert rates == pytest.approx([rates[0]] * 3, rel=0.02)


def test_groups_have_requests_of_their_own(answered: Any) -> None:
    """Each group of two GPUs attends for 30 requests, and for all heads on two GPUs."""
    words = ["--generate", "few-shot", "--limit", "60", "--rate", "inf", "--tp", "4", *SMALL]
    whole, found = (answered(*words, "--dp-size", size) for size in (1, 2))
    assert (whole["dp"], whole["pat"]["requests"]) == (1, 60)
    assert (found["dp"], found["pat"]["requests"]) == (2, 30)
    assert found["server"]["max_running_requests"] == 32
    rate = found["verdict"]["requests_per_second"]["pat"]
    assert rate == pytest.approx(60 / found["pat"]["seconds"], abs=1e-3)
    assert "on 4 x H100 in 2 groups" in found["verdict"]["basis"]


def test_dfs_weight_is_named_where_it_helps() -> None:
    """32 prefixes come in turn, but the pool holds only a few: FCFS recomputes them repeatedly."""
    requests = [
        TraceRequest(0.0, (Segment(i % 32, 6000), Segment(1000 + i, 200)), 50) for i in range(256)
    ]
    found = answer(requests, setup(60_000))
    assert found.distinct_tokens == 32 * 6000 + 256 * 200
    assert found.pat.new_tokens > 1.5 * found.distinct_tokens
    assert found.by_weight is not None
    assert found.by_weight[1] > 1.5 * found.by_weight[0]
    assert answer(requests, setup(60_000, schedule_policy="dfs-weight")).by_weight is None
    assert answer(requests, setup(2_000_000)).by_weight is None


def test_distinct_tokens_are_those_of_a_tree() -> None:
    prompts = [(Segment(1, 64), Segment(i % 2, 32)) for i in range(5)]
    assert distinct_tokens(prompts) == 128
    assert distinct_tokens(TokenPrompt(token_ids(prompt)) for prompt in prompts) == 128


def test_a_model_without_accelerated_layers(tmp_path: Path, advise: Any) -> None:
    _, config = read_config("llama-3.1-8b")
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}
    sparse = {**config, **latent, "architectures": ["DeepseekV32ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    status, out, _ = advise("--model", tmp_path, "--trace", TRACE, "--limit", "50")
    assert status == 0
    assert out.startswith("pat does not pay: it accelerates no layer of ")
    assert "0 of 32 layers accelerated" in out.replace("\n    ", " ")


def test_a_model_of_windows_and_experts_is_taken(tmp_path: Path, answered: Any) -> None:
    """gpt-oss: every second layer has a window."""
    kinds = ["sliding_attention", "full_attention"] * 18
    config = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088,
        "sliding_window": 128, "layer_types": kinds, "num_local_experts": 128,
        "num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answered("--model", tmp_path, "--generate", "few-shot", "--limit", "60")
    assert "36 of 36 layers accelerated" in found["verdict"]["why"]
    assert found["verdict"]["error"]["tpot_ms"] == 0.25
    assert "mixtures of experts" in found["verdict"]["basis"]
