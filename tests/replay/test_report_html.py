"""The HTML report of a replay, without a browser: structure, escaping, odd results."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest
import replay_results

from sglang_pat.replay.charts import MAX_POINTS, time_charts, total_charts
from sglang_pat.replay.report_html import render, write_report
from sglang_pat.replay.report_text import verdict
from sglang_pat.replay.result import Result

VOID = {"meta", "link", "img", "br", "hr", "input"}
NASTY = "</script><script>window.injected = 1</script><img src=x onerror='window.injected=1'>&amp;"


class Page(HTMLParser):
    """A page taken apart. Fails at a tag that is not closed, or closed without being open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self._open[-1:] != ["style"]:
            self.text += data

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]

    def figures(self) -> dict[str, go.Figure]:
        """By id. Plotly refuses properties that it does not know."""
        data = [attrs for tag, attrs in self.tags if tag == "script" and "type" in attrs]
        return {
            str(attrs["id"]): go.Figure(json.loads(content))
            for attrs, content in zip(data, self.scripts, strict=False)
        }


def _odd_results() -> dict[str, Result]:
    interrupted = replay_results.result(steps=30)
    interrupted["meta"]["interrupted"] = True
    no_sharing = replay_results.result(steps=20)
    assert no_sharing["forest"] is not None
    for node in no_sharing["forest"]["nodes"]:
        node["parent"], node["holders"] = -1, 1
    one_policy_short = replay_results.result(steps=20)
    del one_policy_short["steps"][7]["kv_tokens"]["policies"]["paper"]
    measured = replay_results.result(steps=20)
    measured["steps"][3]["gpu"] = {"pat": 0.12, "fa3": 0.31}
    measured["steps"][9]["gpu"] = {"pat": 0.13}
    unknown = replay_results.result(steps=20, policies=["somebody's"])
    return {
        "plain": replay_results.result(),
        "no steps": replay_results.result(steps=0),
        "one step": replay_results.result(steps=1),
        "one policy": replay_results.result(steps=40, policies=["per-node"]),
        "no policy": replay_results.result(steps=40, policies=[]),
        "unknown policy": unknown,
        "policy not in all steps": one_policy_short,
        "interrupted": interrupted,
        "no sharing": no_sharing,
        "kernel times": measured,
    }


@pytest.mark.parametrize("name", _odd_results())
def test_page_is_whole(name: str) -> None:
    page = Page(render(_odd_results()[name]))
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    referenced = page.attributes("aria-labelledby") + page.attributes("data-figure")
    assert set(referenced) <= set(ids)
    figures = page.figures()
    assert set(page.attributes("data-figure")) == set(figures)
    for figure in figures.values():
        assert figure.data
        assert all(len(trace.x) == len(trace.y) > 0 for trace in figure.data)
    charts = [attrs for _, attrs in page.tags if attrs.get("role") == "img"]
    assert all(attrs["aria-label"] for attrs in charts)


@pytest.mark.parametrize("name", ["plain", "no steps"])
def test_page_needs_no_network(name: str) -> None:
    page = Page(render(_odd_results()[name]))
    assert not page.attributes("src")
    assert not page.attributes("href")
    (policy,) = (
        attrs["content"]
        for _, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"https?:|\*", policy)
    style = re.search(r"<style>(.*?)</style>", render(replay_results.result()), re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_what_is_missing_is_said() -> None:
    odd = _odd_results()
    nothing = Page(render(odd["no steps"]))
    assert not nothing.figures()
    assert nothing.text.count("No decode step was replayed.") >= 4
    assert "No step's prefix forest was recorded." in nothing.text
    assert "The replay was interrupted" in Page(render(odd["interrupted"])).text
    assert "The replay was interrupted" not in Page(render(odd["plain"])).text
    assert "were replayed, but no packing policy" in Page(render(odd["no policy"])).text


def test_malformed_lines_are_shown() -> None:
    result = replay_results.result(steps=5)
    result["trace"] |= {"malformed": 3, "errors": ["t.jsonl:7: no input_length"]}
    text = Page(render(result)).text
    assert "3 malformed lines were skipped: t.jsonl:7: no input_length, ..." in text


def test_text_cannot_become_markup() -> None:
    result = replay_results.result(steps=20, policies=["memory", NASTY])
    result["trace"] |= {"name": NASTY, "malformed": 1, "errors": [NASTY]}
    result["config"][NASTY] = {NASTY: NASTY}
    result["steps"][4]["cause"] = NASTY
    result["totals"]["mutations"][NASTY] = 1
    plain = Page(render(replay_results.result(steps=20)))
    page = Page(render(result))
    assert [tag for tag, _ in page.tags if tag in ("script", "img")] == [
        tag for tag, _ in plain.tags if tag in ("script", "img")
    ]
    assert page.text.count(NASTY) >= 4
    # Plotly reads a subset of HTML in every text, so these are escaped in the figures themselves.
    reads = page.figures()["kv-reads-data"]
    assert {trace.name for trace in reads.data if "script" in str(trace.name)} == {
        NASTY.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;")
    }


def test_same_result_same_page() -> None:
    result = replay_results.result(steps=50)
    assert render(result) == render(json.loads(json.dumps(result)))


def test_long_trace_keeps_its_peak() -> None:
    result = replay_results.result(steps=20_000, policies=["memory"])
    steps = result["steps"]
    steps[12_345]["kv_tokens"]["policies"]["memory"] = 10**9
    steps[6_789]["kv_tokens"]["policies"]["memory"] = 1
    chart = time_charts(result)[0]
    (drawn,) = (trace for trace in chart.figure.data if trace.name == "memory")
    points = dict(zip(drawn.x, drawn.y, strict=True))
    assert chart.figure.layout.xaxis.title.text == "simulated time, minutes"
    minutes = [round(step["time"] / 60, 6) for step in steps]
    assert points[minutes[12_345]] == 10**9
    assert points[minutes[6_789]] == 1
    assert {minutes[0], minutes[-1]} <= points.keys()
    assert len(points) <= MAX_POINTS + 2
    assert any("of 1,500 intervals" in note for note in chart.notes)
    assert not time_charts(replay_results.result(steps=MAX_POINTS))[0].notes


@pytest.mark.parametrize(
    ("seconds", "title"),
    [(0.1, "seconds"), (2.0, "minutes"), (200.0, "hours")],
)
def test_time_is_in_the_unit_that_fits(seconds: float, title: str) -> None:
    result = replay_results.result(steps=100)
    for row in result["steps"]:
        row["time"] = row["step"] * seconds
    for chart in time_charts(result):
        titles = [axis.title.text for axis in chart.figure.select_xaxes()]
        assert f"simulated time, {title}" in titles


def test_a_server_that_was_mostly_idle_is_shown_by_steps() -> None:
    result = replay_results.result(steps=100)
    for row in result["steps"][50:]:
        row["time"] += 1e6
    figure = time_charts(result)[0].figure
    assert figure.layout.xaxis.title.text == "decode step"
    assert list(figure.data[0].x) == list(range(100))


def test_lines_that_nobody_could_tell_apart_are_one() -> None:
    result = replay_results.result(steps=50, policies=["paper", "memory", "per-node", "compute"])
    for row in result["steps"]:
        tokens = row["kv_tokens"]
        tokens["lower_bound"] = 100_000
        tokens["policies"] = {
            "paper": 100_400,  # within a percent of memory
            "memory": 100_000,
            "per-node": 100_000,
            "compute": 150_000,
        }
    reads, over = time_charts(result)[:2]
    assert [trace.name for trace in reads.figure.data] == [
        "memory, paper, per-node, lower bound",
        "query-centric",
        "compute",
    ]
    merged = reads.figure.data[0]
    assert set(merged.y) == {100_000}
    assert merged.zorder == 1
    # Over the bound, where the scale is another, 0.4% is to be seen.
    assert [trace.name for trace in over.figure.data] == ["memory, per-node", "paper", "compute"]


def test_the_page_opens_with_the_verdict() -> None:
    result = replay_results.result(steps=40)
    text = Page(render(result)).text
    assert verdict(result).sentence in text
    assert text.index(verdict(result).sentence) < text.index("KV read, by policy")
    assert "estimates for llama-3.1-8b on H100" in text


def test_cells_name_their_columns() -> None:
    """On a phone, where rows are blocks."""
    page = Page(render(replay_results.result(steps=40)))
    labels = page.attributes("data-label")
    assert {"saving", "bytes", "partials", "packs", "tail"} <= set(labels)


def test_sampling_is_said() -> None:
    result = replay_results.result(steps=50)
    result["totals"]["steps"] = 5_000
    assert "50 of 5,000 decode steps were sampled." in Page(render(result)).text


def test_shares_of_plans_add_up() -> None:
    result = replay_results.result(steps=403)
    for row in result["steps"]:
        row["step"] *= 7  # sampled, so bars must reach to the next
    (chart,) = (chart for chart in time_charts(result) if chart.key == "plan-reuse")
    shares: dict[float, float] = {}
    counted = 0
    for trace in chart.figure.data:
        counted += sum(trace.customdata)
        for place, share in zip(trace.x, trace.y, strict=True):
            shares[place] = shares.get(place, 0) + share
    assert counted == 403
    first = chart.figure.data[0]
    ends = [x + width / 2 for x, width in zip(first.x, first.width, strict=True)]
    begins = [x - width / 2 for x, width in zip(first.x, first.width, strict=True)]
    assert ends[:-1] == pytest.approx(begins[1:])
    assert list(shares.values()) == pytest.approx([1] * len(shares))


def test_bars_of_bytes_end_at_the_totals() -> None:
    result = replay_results.result(steps=40)
    result["totals"]["bytes"]["query_centric"] = 3 * 10**15
    (chart,) = (chart for chart in total_charts(result) if chart.key == "bytes")
    assert chart.figure.layout.xaxis.title.text == "PB"
    sums: dict[str, float] = {}
    for trace in chart.figure.data:
        for name, value in zip(trace.y, trace.x, strict=True):
            sums[name] = sums.get(name, 0) + value
    assert sums == {
        name.replace("query_centric", "query-centric").replace("_", " "): pytest.approx(
            value / 1e15
        )
        for name, value in result["totals"]["bytes"].items()
    }


def test_written_to_a_file(tmp_path: Path) -> None:
    result = replay_results.result(steps=3)
    result["trace"]["name"] = "père.jsonl"
    write_report(result, tmp_path / "report.html")
    written = (tmp_path / "report.html").read_bytes().decode("utf-8")
    assert written == render(result)
    with pytest.raises(OSError, match="no such folder"):
        write_report(result, tmp_path / "no such folder" / "report.html")
