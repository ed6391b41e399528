"""The command `advise`: its output and its refusals."""

from __future__ import annotations

import csv
import html.parser
import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.generate import generate
from sglang_pat.workload.record import COLUMNS

TRACE = Path(__file__).parents[1] / "support" / "data" / "conversation.jsonl"


class Page(html.parser.HTMLParser):
    """Collects the texts and addresses of a page, and checks that all elements are closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(path.read_text())
        self.text = " ".join(self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def test_every_output_is_written(advise: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / f"result.{name}" for name in ("json", "csv", "html")}
    flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    words = ["--limit", 30, "--kv-tokens", 60_000, "--policies", "memory,paper"]
    told = advise("--trace", TRACE, *words, *flags)
    assert told.status == 0
    result = json.loads(files["json"].read_text())
    assert result["pat"]["requests"] == 30
    assert {"memory", "paper", "distinct", "query-centric"} == set(result["pat"]["kv_tokens"])
    assert sum(row["steps"] for row in result["steps"]) == result["pat"]["steps"]
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result["steps"])
    assert tuple(rows[0]) == COLUMNS
    page = Page(files["html"])
    assert not page.open
    assert page.addresses == []  # the page needs no network
    assert result["verdict"]["sentence"] in page.text
    assert page.count["polyline"] == 2
    assert page.count["rect"] > 3
    assert files["html"].stat().st_size < 1_000_000
    assert told.out.splitlines()[0] in result["verdict"]["sentence"]


def test_fp8_kv_halves_the_pool_and_the_steps_follow(advise: Any, tmp_path: Path) -> None:
    pools, gains = [], []
    for name in ("auto", "fp8_e4m3"):
        words = ("--generate", "few-shot", "--limit", 40, "--kv-cache-dtype", name)
        assert advise(*words, "--json", tmp_path / name).status == 0
        data = json.loads((tmp_path / name).read_text())
        pools.append(data["server"]["kv_tokens"])
        gains.append(data["default"]["tpot_ms"] / data["pat"]["tpot_ms"])
    assert pools[1] == pytest.approx(2 * pools[0], abs=2)
    assert gains[1] > gains[0]


def test_text_of_others_is_text_in_the_report(advise: Any, tmp_path: Path) -> None:
    nasty = tmp_path / "<img src=x onerror=alert(1)>.jsonl"
    nasty.write_bytes(TRACE.read_bytes())
    assert advise("--trace", nasty, "--limit", 5, "--html", tmp_path / "page").status == 0
    page = Page(tmp_path / "page")
    assert "img" not in page.count
    assert "onerror=alert(1)>.jsonl" in page.text


def test_the_forest_is_that_of_the_step_that_was_asked_for(advise: Any, tmp_path: Path) -> None:
    words = ["--generate", "few-shot", "--limit", 20, "--rate", "inf", "--json", tmp_path / "x"]
    assert advise(*words, "--forest-step", 7).status == 0
    forest = json.loads((tmp_path / "x").read_text())["forest"]
    assert (forest["step"], forest["batch"]) == (7, 20)
    nodes = forest["nodes"]
    assert nodes[0]["holders"] == 20
    assert sum(node["end"] - node["begin"] for node in nodes if node["holders"] == 1) > 0
    for node in nodes:
        assert node["parent"] == -1 or nodes[node["parent"]]["end"] == node["begin"]


def test_the_command_in_the_result_repeats_it(advise: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    given = ["--generate", "rl-rollout", "--limit", "20", "--seed", "9", "--page-size", "16"]
    assert advise(*given, "--json", first).status == 0
    words = shlex.split(json.loads(first.read_text())["meta"]["command"])
    assert words[:2] == ["sglang-pat", "advise"]
    assert advise(*words[2:], "--json", second).status == 0
    assert first.read_text() == second.read_text()


def test_the_command_is_quoted_for_a_shell(advise: Any, tmp_path: Path) -> None:
    mine, result = tmp_path / "my trace; rm -rf.jsonl", tmp_path / "result.json"
    mine.write_bytes(TRACE.read_bytes())
    given = ["--trace", mine, "--limit", 3, "--gpu", "h200", "--tp", 2]
    assert advise(*given, "--json", result).status == 0
    command = json.loads(result.read_text())["meta"]["command"]
    expected = ["sglang-pat", "advise", *map(str, given)]
    expected[expected.index("h200")] = "H200"
    assert sorted(shlex.split(command)) == sorted(expected)


WRONG: tuple[tuple[tuple[object, ...], str], ...] = (
    (("--generate", "chatter"), "workload 'chatter'; allowed: conversation"),
    (("--trace", TRACE, "--seed", "0"), "--seed 0 has no effect on"),
    (("--trace", TRACE, "--save", "copy.jsonl"), "--save copy.jsonl has no effect on"),
    (("--generate", "toolagent", "--strict"), "--strict True has no effect on toolagent"),
    (("--generate", "toolagent", "--format", "x"), "--format x has no effect on toolagent"),
    (("--trace", TRACE, "--policies", "memory,greedy"), "--policies 'greedy'; allowed: memory"),
    (("--trace", TRACE, "--policies", "paper,paper"), "each is named once"),
    (("--trace", TRACE, "--model", "gpt-9"), "model 'gpt-9'; allowed: llama-3.1-8b"),
    (("--trace", TRACE, "--tp", "5"), "--tp 5: 32 query heads; allowed: a divisor of 32"),
    (("--trace", TRACE, "--tp", "4", "--dp-size", "3"), "--dp-size 3; allowed: a divisor of --tp"),
    (("--trace", TRACE, "--gpu", "l4", "--model", "llama-3.1-70b"), "raise --tp"),
    (("--trace", "missing.jsonl"), "missing.jsonl: there is no such file"),
    (("--trace", TRACE, "--kv-tokens", "10", "--page-size", "16"), "two pages of 16 are needed"),
    (("--trace", TRACE, "--kv-tokens", "100"), "no request of the trace fits into a KV pool of"),
    (("--trace", TRACE, "--format", "csv"), "format 'csv'; allowed: auto, mooncake"),
    (("--trace", TRACE, "--limit", "2", "--forest-step", "9999999"), "has steps 0 to "),
    (("--generate", "toolagent", "--json", "x", "--csv", "./x"), "are the same file"),
    (("--trace", TRACE, "--page-size", "16", "--chunked-prefill-size", "8"), "8; a page is 16"),
    # The parser refuses these, and names the option.
    (("--trace", TRACE, "--rate", "nan"), "--rate: 'nan'; allowed: a number from 0.001 to 1,000,0"),
    (("--trace", TRACE, "--schedule-policy", "sjf"), "--schedule-policy: invalid choice: 'sjf'"),
    (("--trace", TRACE, "--json", "no/folder/x"), "does not exist"),
    (("--trace", TRACE, "--generate", "toolagent"), "not allowed with argument --trace"),
)


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_cannot_be_done_is_said_in_a_line(
    words: tuple[object, ...],
    message: str,
    advise: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    advise(*words).check_refusal(message)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named_with_its_extra(
    advise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    error = "sglang-pat advise: error: it needs jinja2: pip install '.[replay]' in a clone\n"
    advise("--trace", TRACE, "--html", "x").check_refusal(error)


def test_the_trace_survives_its_own_name_as_output(advise: Any, tmp_path: Path) -> None:
    mine = tmp_path / "trace.jsonl"
    mine.write_bytes(TRACE.read_bytes())
    (tmp_path / "link").symlink_to(mine)
    for option in ("--json", "--csv", "--html"):
        for name in ("trace.jsonl", "link"):
            told = advise("--trace", mine, option, tmp_path / name)
            told.check_refusal("would overwrite the input")
    assert mine.read_bytes() == TRACE.read_bytes()
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert advise("--trace", mine, "--model", tmp_path, "--json", config).status == 2
    assert config.read_text() == "{}"


def test_one_output_that_fails_does_not_cost_the_others(advise: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / f"result.{name}" for name in ("csv", "html")}
    flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    told = advise("--trace", TRACE, "--limit", 5, "--json", "/dev/full", *flags)
    assert told.status == 2
    assert "--json /dev/full: No space left on device" in told.err
    assert all(path.stat().st_size for path in files.values())


def test_malformed_lines_are_counted_and_shown(advise: Any, tmp_path: Path) -> None:
    mine = tmp_path / "trace.jsonl"
    mine.write_text(TRACE.read_text() + '{"hash_ids": 1}\n')
    told = advise("--trace", mine)
    assert told.status == 0
    assert told.out.startswith("Not replayed: 1 malformed lines (trace.jsonl:")


def test_long_work_tells_its_progress(advise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_pat.cli.advise._QUIET_SECONDS", 0)
    monkeypatch.setattr("sglang_pat.cli.advise._EVERY_SECONDS", 0)
    told = advise("--generate", "toolagent", "--limit", 40).err.splitlines()
    for stage in ("reading", "serving with default", "serving with pat"):
        found = [line for line in told if line.startswith(f"{stage}: ")]
        assert len(found) > 5
        assert found[-1].endswith(" of 40 requests")
    monkeypatch.undo()
    assert advise("--generate", "toolagent", "--limit", 2).err == ""


def test_requests_that_do_not_fit_leave_no_verdict(advise: Any, tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for long, status in ((4, 0), (6, 2)):
        rows = [f"{i},{5000 if i < long else 50},9\n" for i in range(10)]
        (tmp_path / "trace").write_text(header + "".join(rows))
        told = advise("--trace", tmp_path / "trace", "--context-length", 4096)
        if status:
            told.check_refusal("6 of 10 requests are longer than the context of 4,096")
        else:
            assert told.out.startswith("Not replayed: 4 requests longer than the context.\n")


def test_a_large_trace_takes_seconds(advise: Any, tmp_path: Path) -> None:
    """12,031 requests of 12,000 tokens must stay under 15 s on an idle machine."""
    lines = (
        json.dumps(
            {
                "timestamp": 300 * i,
                "input_length": 10_240,
                "output_length": 300,
                "hash_ids": [hash((i % 7, i // (50 * (20 - d)), d)) >> 2 for d in range(20)],
            }
        )
        for i in range(2000)
    )
    mine = tmp_path / "trace.jsonl"
    mine.write_text("\n".join(lines))
    begun = time.process_time()
    assert advise("--trace", mine).status == 0
    assert time.process_time() - begun < 10


def test_saved_trace_replays_as_the_generated_one(advise: Any, tmp_path: Path) -> None:
    saved, first, second = (tmp_path / name for name in ("trace.jsonl", "1.json", "2.json"))
    asked = ["--generate", "multi-chain", "--limit", "12", "--seed", "5"]
    assert advise(*asked, "--save", saved, "--json", first).status == 0
    requests = list(open_trace(saved, strict=True).stream)
    assert requests == list(generate("multi-chain", requests=12, seed=5).stream)
    assert advise("--trace", saved, "--json", second).status == 0
    found = [json.loads(path.read_text()) for path in (first, second)]
    for name in ("default", "pat", "steps", "forest"):
        assert found[0][name] == found[1][name]


def test_failed_requests_of_a_trace_are_in_the_result(advise: Any, tmp_path: Path) -> None:
    rows = ["Timestamp,Model,Request tokens,Response tokens", "1,m,50,9", "2,m,60,0"]
    trace, result = tmp_path / "trace.csv", tmp_path / "result.json"
    trace.write_text("\n".join(rows) + "\n")
    assert advise("--trace", trace, "--json", result).status == 0
    found = json.loads(result.read_text())
    assert (found["pat"]["requests"], found["trace"]["left_out"], found["trace"]["malformed"]) == (
        (1, {"requests that failed": 1}, 0)
    )
