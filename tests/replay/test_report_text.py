"""What a replay prints and writes besides the page: tables, CSV, the comparison of two results."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path

import pytest
import replay_results
from rich.console import Console

from sglang_pat.replay.charts import extremes
from sglang_pat.replay.compare import compared, differences, print_comparison, read_result
from sglang_pat.replay.report_text import (
    capacity_rows,
    headline,
    key_numbers,
    policy_rows,
    print_result,
    verdict,
)
from sglang_pat.replay.result import Result, flatten, write_csv

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu"


def _console() -> tuple[Console, StringIO]:
    written = StringIO()
    return Console(file=written, width=160), written


def _printed(result: Result) -> str:
    console, written = _console()
    print_result(result, console)
    return written.getvalue()


# --- tables ---


def test_policies_are_measured_against_both_ends() -> None:
    result = replay_results.result(steps=10, policies=["memory"])
    result["totals"]["kv_tokens"] = {
        "query_centric": 6_000_000,
        "lower_bound": 2_000_000,
        "policies": {"memory": 2_500_000},
    }
    result["totals"]["bytes"]["memory"] = 4_000
    result["totals"]["partial_bytes"]["memory"] = {"written": 400, "read": 600}
    first, memory, last = policy_rows(result)
    assert (first.name, first.over_bound, first.saving) == ("query-centric", "3.000x", "1.00x")
    assert (memory.kv_tokens, memory.over_bound, memory.saving) == ("2,500,000", "1.250x", "2.40x")
    assert (memory.total_bytes, memory.partials) == ("4.00 kB", "25.0%")
    assert (last.name, last.over_bound, last.saving) == ("lower bound", "1.000x", "3.00x")
    assert "2.40x fewer" in headline(result)
    assert "1.250x the lower bound" in headline(result)


@pytest.mark.parametrize(
    ("after", "kind", "words"),
    [
        (8.0, "pays", "pat pays for this traffic: a decode step would take about 20% less time"),
        (9.0, "pays", "about 10% less time (9.0 instead of 10.0 ms)"),
        (9.5, "pays-a-little", "pat pays a little for this traffic: a decode step would take"),
        (9.8, "does-not-pay", "pat does not pay for this traffic: a decode step would take"),
        (10.5, "does-not-pay", "about 5% more time (10.5 instead of 10.0 ms)"),
    ],
)
def test_the_verdict_follows_the_time_of_a_step(after: float, kind: str, words: str) -> None:
    result = replay_results.result(steps=10, policies=["memory"])
    totals = result["totals"]
    totals["step_ms"] = {"query_centric": 10.0, "memory": after, "lower_bound": 5.0}
    totals["bytes"] = {"query_centric": 10 * 7_000_000_000, "memory": 10 * 3_500_000_000}
    found = verdict(result)
    assert found.kind == kind
    assert words in found.sentence
    # 7 GB a step at 2.8 TB/s are 2.5 ms of 10.
    assert "moves 2.00x fewer bytes, and it is 25% of a step" in found.sentence
    assert found.sentence in " ".join(_printed(result).split())


def test_nothing_can_be_said_of_older_or_empty_results() -> None:
    empty = replay_results.result(steps=0)
    assert verdict(empty) == ("unknown", "No decode step was replayed.")
    older = replay_results.result(steps=10)
    del older["totals"]["step_ms"], older["totals"]["latency"]
    older["config"] = {"policies": ["memory"], "kv_tokens": 400_000}
    assert verdict(older).kind == "unknown"
    assert "fewer KV tokens than query-centric attention" in verdict(older).sentence
    assert "Latency" not in _printed(older)


def test_latency_is_printed_in_readable_units() -> None:
    printed = " ".join(_printed(replay_results.result(steps=10)).split())
    assert "waiting for admission │ 500.0 ms" in printed
    assert "from admission to the last token │ 6.0 s" in printed
    assert "median 4.0 s, 99th percentile 31.0 s" in printed


def test_query_centric_as_a_policy_has_one_row() -> None:
    rows = policy_rows(replay_results.result(steps=10, policies=["memory", "query-centric"]))
    assert [row.name for row in rows] == ["memory", "query-centric", "lower bound"]


def test_everything_counted_is_printed() -> None:
    result = replay_results.result(steps=40)
    printed = _printed(result)
    for number in (
        result["totals"]["kv_tokens"]["policies"]["memory"],
        result["totals"]["plans"]["reused"],
        result["totals"]["mutations"]["split"],
    ):
        assert f"{number:,}" in printed
    for name in ("memory", "paper", "compute", "per-node", "conversation_trace.jsonl", "173.5 us"):
        assert name in printed
    assert "3 of 40" in printed
    assert len(capacity_rows(result["capacity"])) == 11
    assert "31.5" in printed
    assert "WARNING" not in printed


def test_a_narrow_terminal_cuts_no_number() -> None:
    result = replay_results.result(steps=40)
    kv_tokens = result["totals"]["kv_tokens"]
    kv_tokens |= {"query_centric": 14_997_456_789, "lower_bound": 4_978_333_452}
    kv_tokens["policies"] = dict.fromkeys(kv_tokens["policies"], 5_077_484_812)
    result["totals"]["policies"]["per-node"] |= {"packs": 1_098_765, "work_items": 12_789_654}
    written = StringIO()
    print_result(result, Console(file=written, width=80))
    assert "…" not in written.getvalue()
    assert "14,997,456,789" in written.getvalue()


def test_nothing_replayed_is_no_error() -> None:
    result = replay_results.result(steps=0)
    assert "No decode step was replayed." in _printed(result)
    assert not key_numbers(result)


def test_doubtful_results_are_marked() -> None:
    result = replay_results.result(steps=5)
    result["meta"]["interrupted"] = True
    result["trace"] |= {"name": "[bold]x", "malformed": 1, "errors": ["x:2: no [length]"]}
    result["trace"]["estimated"] = 5
    result["totals"] |= {"refused": 8, "refused_by": {"context": 7, "pool": 1}, "truncated": 2}
    result["totals"]["latency"] |= {"overloaded": True}
    result["config"]["gpu"] |= {"memory_bytes": 24 * 10**9}
    printed = " ".join(_printed(result).split())
    assert printed.count("WARNING") == 8
    assert "[bold]x" in printed
    assert "1 malformed line was skipped: x:2: no [length]" in printed
    assert "7 requests were refused: longer than the model's context of 131,072 tokens" in printed
    assert "1 request was refused: longer than the KV pool of 400,000 tokens" in printed
    assert "2 answers were cut" in printed
    assert "The prompts of 5 requests are text" in printed
    assert "overloaded: a request waits 500.0 ms and is then served in 6.0 s" in printed
    assert "16.1 GB of weights and 52.4 GB of KV pool do not fit into the 24.0 GB" in printed


def test_capacity_of_a_short_trace_is_a_bound() -> None:
    study = replay_results.capacity()
    assert capacity_rows(study)[1].over_contiguous == "12.25x"
    study["full"] = False
    assert capacity_rows(study)[0].requests == "≥ 2.0"
    assert capacity_rows({}) == []


# --- CSV ---


def test_csv_holds_every_number_of_every_step(tmp_path: Path) -> None:
    steps = replay_results.result(steps=12)["steps"]
    steps[5]["gpu"] = {"pat": 0.25}
    del steps[6]["kv_tokens"]["policies"]["paper"]
    write_csv(steps, tmp_path / "steps.csv")
    with (tmp_path / "steps.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    for step, row in zip(steps, rows, strict=True):
        expected = {name: str(value) for name, value in flatten(step)}
        assert {name: value for name, value in row.items() if value} == expected
    assert rows[6]["kv_tokens.policies.paper"] == ""
    assert rows[5]["gpu.pat"] == "0.25"


def test_csv_without_steps_is_a_header(tmp_path: Path) -> None:
    write_csv([], tmp_path / "steps.csv")
    written = (tmp_path / "steps.csv").read_text()
    assert written == "step,time,batch,held_tokens,cause,planning_us\n"


# --- two results ---


def test_differences_are_named() -> None:
    left = replay_results.result(steps=10)
    right = replay_results.result(steps=10)
    right["meta"] |= {"seconds": 99.0, "steps_per_second": 1.0}
    assert not differences(left, right)
    right["config"]["max_batch"] = 256
    right["config"]["time"] = {**right["config"]["time"], "overhead": 1}
    right["meta"]["versions"]["sglang"] = "0.5.17"
    assert differences(left, right) == [
        ("config: max batch", 64, 256),
        ("config: time.overhead", None, 1),
        ("meta: versions.sglang", "0.5.23", "0.5.17"),
    ]


def test_ratios_are_right_over_left() -> None:
    left = replay_results.result(steps=10, policies=["memory", "paper"])
    right = replay_results.result(steps=10, policies=["memory", "per-node"])
    for result, tokens in ((left, 1_000), (right, 1_500)):
        result["totals"]["kv_tokens"]["policies"]["memory"] = tokens
        result["totals"]["kv_tokens"]["lower_bound"] = 500
    groups = {group.title: group.rows for group in compared(left, right)}
    rows = {row.name: row for row in groups["KV tokens"]}
    assert rows["memory"] == ("memory", "1,000", "1,500", "1.50x")
    assert rows["paper"].right == rows["paper"].ratio == "-"
    assert rows["per-node"].left == rows["per-node"].ratio == "-"
    bound = {row.name: row for row in groups["KV tokens, times the lower bound"]}
    assert bound["memory"] == ("memory", "2.000", "3.000", "1.50x")


def test_comparison_is_printed(tmp_path: Path) -> None:
    left, right = tmp_path / "a.json", tmp_path / "b.json"
    result = replay_results.result(steps=10)
    left.write_text(json.dumps(result))
    result["meta"]["interrupted"] = True
    result["config"]["max_batch"] = 8
    right.write_text(json.dumps(result))
    console, written = _console()
    print_comparison(left, right, console)
    assert "max batch" in written.getvalue()
    assert "The replay was interrupted" in written.getvalue()
    console, written = _console()
    print_comparison(left, left, console)
    assert "Trace, configuration and versions are equal." in written.getvalue()


@pytest.mark.parametrize("name", ["12", "14-conversation", "14-toolagent"])
def test_kept_results_can_be_compared(name: str, tmp_path: Path) -> None:
    kept = RESULTS / f"replay-pat-figure-{name}.json"
    console, written = _console()
    print_comparison(kept, kept, console)
    assert "1.00x" in written.getvalue()
    # One of an older version: no latency, and no partials of query-centric attention.
    older = read_result(kept)
    for key in ("latency", "step_ms", "refused_by", "truncated"):
        del older["totals"][key]
    del older["totals"]["partial_bytes"]["query_centric"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    console, written = _console()
    print_comparison(tmp_path / "older.json", kept, console)
    assert "Only one of the two charges query-centric attention" in written.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"meta": {}, "trace": {}}', "without capacity, config, forest, steps, totals"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"other.json.*{message}"):
        read_result(path)


# --- downsampling ---


def test_extremes_of_every_interval_are_kept() -> None:
    values = [float(abs(i % 100 - 50)) for i in range(10_000)]
    values[4_321], values[8_765] = 1e6, -1e6
    kept = extremes(values, 100)
    assert not isinstance(kept, slice)
    assert {0, 4_321, 8_765, 9_999} <= set(kept.tolist())
    assert (kept[1:] > kept[:-1]).all()
    assert len(kept) <= 102
    for begin in range(0, 10_000, 200):
        inside = [values[i] for i in kept if begin <= i < begin + 200]
        assert max(inside) == max(values[begin : begin + 200])
        assert min(inside) == min(values[begin : begin + 200])


def test_few_values_are_all_kept() -> None:
    assert extremes([1.0, 2.0, 3.0], 3) == slice(None)
    with pytest.raises(ValueError, match="max_points is 1"):
        extremes([1.0], 1)
