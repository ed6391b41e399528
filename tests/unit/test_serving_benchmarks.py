"""The parts of the serving benchmark that need no server: cases, latencies, results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_planning  # noqa: E402
import plot_serving  # noqa: E402
from serving import latency, traffic  # noqa: E402
from serving.cases import cases_of, floor_ms, traffic_of  # noqa: E402
from serving.models import MODELS, write_tokenizer  # noqa: E402
from serving.results import Results, identical  # noqa: E402

from sglang_pat.bench.cases import Case  # noqa: E402
from sglang_pat.bench.http_server import as_flags, running_process  # noqa: E402

LLAMA = MODELS["llama-3-8b"]
META = {"commit": "c", "gpu": "g", "torch": "t", "cuda": "u", "versions": {}}


# --- what is served ---


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (Case(128, 8192, 256, 128), 7.5),
        (Case(64, 2048, 128, 128), 6.0),
        (Case(128, 0, 1024, 128), 11.4),
    ],
)
def test_the_floor_is_weights_and_kv_once(case: Case, floor: float) -> None:
    assert floor_ms(case, LLAMA) == pytest.approx(floor, abs=0.05)


def test_the_weights_of_an_8b_model_are_16_gb() -> None:
    for name in ("llama-3-8b", "qwen3-8b"):
        assert MODELS[name].weight_bytes == pytest.approx(16.2e9, rel=0.02)


def test_prompts_share_the_prefix_of_their_group_and_nothing_else() -> None:
    prompts = Case(6, 40, 5, 8, groups=3).prompts(1000)
    assert [len(prompt) for prompt in prompts] == [45] * 6
    assert prompts[0][:40] == prompts[1][:40] != prompts[2][:40] == prompts[3][:40]
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 6
    assert prompts == Case(6, 40, 5, 8, groups=3).prompts(1000)


def test_the_batches_fit_the_server_and_divide_into_groups() -> None:
    for model in MODELS.values():
        for case in cases_of(model):
            assert case.batch <= 256
            assert case.batch % case.groups == 0
            length = case.prefix + case.private + case.generated
            assert length <= model.arguments.get("context_length", 8192)


def test_each_group_has_a_request_at_every_rate() -> None:
    asked = traffic_of(LLAMA)
    assert asked.per_group(0.01) == 1
    assert asked.groups * asked.per_group(32.0) == 640


def test_the_tokenizer_keeps_lengths(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, 500, end=2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokens = [7, 499, 0, 7, 300]
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(f"{text}\n\n{text}") == tokens + tokens
    assert len(tokenizer.get_vocab()) == 500


def test_switches_that_are_off_are_left_out() -> None:
    given = {"model_path": "m", "tp_size": 2, "disable_cuda_graph": True, "sleep_on_idle": False}
    assert as_flags({"bs": [1, 8]}) == ["--bs", "1", "8"]
    assert as_flags(given) == ["--model-path", "m", "--tp-size", "2", "--disable-cuda-graph"]


def test_a_server_has_the_variables_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the shell has for them; and all others of the shell."""
    monkeypatch.setenv("GIVEN", "by the shell")
    monkeypatch.setenv("ALONE", "by the shell")
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import os; print(os.environ['GIVEN'], os.environ['ALONE'])"]
    environment = {"GIVEN": "by the benchmark"}
    with running_process(command, {}, log, start_seconds=None, environment=environment) as server:
        assert server.process.wait() == 0
    assert log.read_text() == "by the benchmark by the shell\n"


# --- latencies and counters ---


def test_tokens_that_arrive_together_share_the_gap() -> None:
    gaps = latency.gaps_between([(1.0, 1), (1.5, 2), (1.6, 2), (2.5, 4)])
    assert gaps == pytest.approx([0.5, 0.45, 0.45])


def test_a_summary_has_mean_and_percentiles() -> None:
    summary = latency.summary(float(value) for value in range(101))
    assert summary == {"mean": 50.0, "p50": 50.0, "p99": 99.0}


def test_counters_are_subtracted_however_deep() -> None:
    before = {"plans": 3, "causes": {"first": 1}}
    after = {"plans": 10, "causes": {"first": 1, "growth": 4}, "p99": 1.5}
    assert latency.difference(after, before) == {
        "plans": 7,
        "causes": {"first": 0, "growth": 4},
        "p99": 1.5,
    }


def test_planning_times_are_those_between_two_readings() -> None:
    before = {"planning_ns": {"changed": {"1000": 5}, "cold": {"9000": 1}}}
    after = {"planning_ns": {"changed": {"1000": 14, "2000": 1, "500": 0}, "cold": {"9000": 7}}}
    assert bench_planning._times(after, before, "changed") == {
        "steps": 10,
        "p50_us": 1.0,
        "p90_us": 1.0,
        "p99_us": 2.0,
        "histogram_ns": {1000: 9, 2000: 1},
    }


class FakeServer:
    """Takes 100 ms for a batch and 10 ms for each of its tokens; counts two plans a token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.plans = 0
        self.asked: list[Any] = []
        monkeypatch.setattr(latency.time, "perf_counter", lambda: self.now)

    def flush(self) -> None:
        self.asked.clear()

    def stats(self) -> dict[str, Any]:
        tokens = 100 * self.plans
        return {
            "plans_built": self.plans,
            "kv_tokens_query_centric": tokens,
            "kv_tokens_planned": tokens // 4,
        }

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append((len(prompts), sampling))
        self.now += 0.1 + 0.01 * sampling["max_new_tokens"]
        self.plans += 2 * sampling["max_new_tokens"]
        return [{"output_ids": [len(prompt)]} for prompt in prompts]

    def stream(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> Any:
        self.asked.append((len(prompts), sampling))
        self.now += 0.1
        self.plans += 2 * sampling[0]["max_new_tokens"]
        for token in range(1, sampling[0]["max_new_tokens"] + 1):
            self.now += 0.01
            for index, each in enumerate(sampling):
                if token % each["stream_interval"] in (0, 1):
                    counts = {"completion_tokens": token}
                    yield {"index": index, "meta_info": counts, "output_ids": [token]}


def test_what_is_timed_is_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    server, case = FakeServer(monkeypatch), Case(24, 30, 5, 64, groups=2)
    result = latency.measure(server, case, 1000)  # type: ignore[arg-type]
    assert result["tpot_ms"] == pytest.approx(10.0)
    assert result["tpot_quartiles_ms"] == pytest.approx([10.0, 10.0])
    assert result["ttft_ms"]["p99"] == pytest.approx(110.0)
    assert result["itl_ms"] == pytest.approx({"mean": 10.0, "p50": 10.0, "p99": 10.0})
    assert len(result["answers"]) == 24
    assert result["stats"]["plans_built"] == latency.REPEATS * 2 * 64
    assert result["stats"]["kv_read_ratio"] == 0.25
    assert server.asked[0][0] == 2  # the two prefixes alone, before anything else
    _, streamed = server.asked[-1]
    assert sum(each["stream_interval"] == 1 for each in streamed) == latency.OBSERVERS


# --- results ---


def measured(tpot: float, answers: list[str]) -> dict[str, Any]:
    spread = {"mean": tpot, "p50": tpot, "p99": tpot}
    return {"tpot_ms": tpot, "ttft_ms": spread, "itl_ms": spread, "answers": answers}


def test_results_are_continued_by_the_next_command(tmp_path: Path) -> None:
    file, case = tmp_path / "serving.json", cases_of(LLAMA)[0]
    first = Results(file, META)
    first.add_case(LLAMA, case, "pat", measured(10.0, ["a", "b"]))
    second = Results(file, META)
    second.add_case(LLAMA, case, "fa3", measured(30.0, ["a", "x"]))
    second.add_case(LLAMA, case, "fa3", measured(29.0, ["a", "x"]))
    for tpot in (9.0, 8.0):
        second.add_serving(LLAMA.name, "pat", 4.0, {"median_tpot_ms": tpot, "p99_tpot_ms": tpot})
    data = json.loads(file.read_text())
    (entry,) = data["cases"]
    assert entry["tpot_ms"] == {"pat": 10.0, "fa3": 29.0}
    assert entry["answers_identical"] == {"pat": 0.5}
    assert entry["floor_ms"] == floor_ms(case, LLAMA)
    assert [each["median_tpot_ms"] for each in data["serving"]] == [8.0]

    plot_serving.draw(data, tmp_path / "serving.png")
    assert (tmp_path / "serving.png").stat().st_size > 10_000


def test_results_of_another_commit_are_not_continued(tmp_path: Path) -> None:
    file = tmp_path / "serving.json"
    Results(file, META).add_run({"backend": "pat"})
    with pytest.raises(ValueError, match="commit 'c', this is 'd'"):
        Results(file, META | {"commit": "d"})


def test_a_failed_backend_is_written_down_and_not_blamed_on_the_next_command(
    tmp_path: Path,
) -> None:
    file = tmp_path / "serving.json"
    results = Results(file, META)
    results.add_run({"backend": "pat", "error": "no answer"})
    assert [run["backend"] for run in results.failures] == ["pat"]
    assert Results(file, META).failures == []
    assert json.loads(file.read_text())["runs"][0]["error"] == "no answer"


def test_answers_are_compared_with_sglangs_own() -> None:
    answers = {"pat": ["a", "b"], "pat-replan": ["a", "b"], "fa3": ["a", "b"], "triton": ["a", "c"]}
    assert identical(answers) == {"pat": 1.0, "pat-replan": 1.0, "triton": 0.5}
    assert identical({"pat": ["a"]}) == {}


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_serving.draw({"meta": META, "cases": [], "serving": []}, tmp_path / "x.png")


def test_what_the_client_reports_is_asked_for_once() -> None:
    assert len(set(traffic.METRICS)) == len(traffic.METRICS)
    assert {"median_tpot_ms", "p99_itl_ms", "mean_ttft_ms"} <= set(traffic.METRICS)
