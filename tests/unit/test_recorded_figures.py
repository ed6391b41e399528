"""Figures of the documentation come from the recorded runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import recorded_figures
from recorded_figures import BLOCKS, PAGES, RESULTS, ROOT, filled
from recorded_numbers import shown_numbers


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_the_recorded_figures(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text == filled(text), f"run: {recorded_figures.COMMAND}"


def test_every_block_is_shown_and_no_marker_is_broken() -> None:
    text = "".join((ROOT / name).read_text() for name in PAGES)
    begun = re.findall(r"<!-- recorded: ([a-z-]+) -->", text)
    assert set(begun) == set(BLOCKS)
    assert begun == re.findall(r"<!-- end of ([a-z-]+) -->", text)


# Pages of evidence, limits and constants name the source of each number themselves.
EVIDENCE = re.compile(r"docs/(results|check|advise|design/.*)\.md")
_NUMBER = r"\b\d[\d,]*(?:\.\d+)?"
_UNIT = r"x\b|%| (?:us|ms|s|seconds|minutes|TB/s)\b| (?:tokens|requests) (?:a|per) s"
_TIMES = r"(?:\b\d+\.\d+ times|(?:\b\d+|two|three|four|five|ten) times as|twice as)\b"
MEASURED = re.compile(rf"{_NUMBER}(?:{_UNIT})|{_TIMES}")
# Numbers that nobody measured, or that a page of evidence explains: limits, examples, constants.
EXPLAINED = {
    "README.md": ["47%"],  # of an example
    "docs/bench.md": ["10%", "10%"],  # limits
    "docs/configuration.md": ["0.1 s"],
    "docs/guide.md": ["53%"],  # of an example
    "docs/operate/index.md": ["3%", "15 minutes"],  # limits
    "docs/operate/rollout.md": ["5 minutes", "30 minutes", "3%"],  # limits
    "docs/recipes/fp8.md": ["twice as"],  # bytes
    "docs/when-it-does-not-pay.md": ["1%"],  # noise
}


def measured_by_hand(page: str) -> list[str]:
    """Return gains and times in prose that no generated block and no comment traces to a record."""
    traced = shown_numbers(page)
    blocks = r"<!-- (?:recorded|generated): ([a-z-]+) -->.*?<!-- end(?: of|:) \1 -->"
    for pattern in (blocks, r"<!--.*?-->", r"^ *```.*?^ *```", r"`[^`\n]*`"):
        page = re.sub(pattern, "", page, flags=re.DOTALL | re.MULTILINE)
    found = [match[0] for match in MEASURED.finditer(page)]
    return [number for number in found if re.split("x$| ", number)[0] not in traced]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("It takes 3 ms, or 1.5x, or\n1.25 times as long.", ["3 ms", "1.5x", "1.25 times"]),
        ("1,200.5 us (12%), 2 times as fast", ["1,200.5 us", "12%", "2 times as"]),
        ("three times as fast, three times", ["three times as"]),
        ("9 s for 1,000 requests per second", ["9 s", "1,000 requests per s"]),
        ("<!-- recorded: a -->\n3 ms\n<!-- end of a -->\n4 us", ["4 us"]),
        ("3 ms, 4 ms, 5x\n<!-- recorded in a.json:\n3 = b\n5 = c\n-->", ["4 ms"]),
        ("```\n3 ms\n```\n`4 us` 5 tokens, 0.5.17, 10.x, 64 times", []),
    ],
)
def test_a_number_that_was_typed_is_found(page: str, expected: list[str]) -> None:
    assert measured_by_hand(page) == expected


def test_users_read_recorded_numbers_only() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = [str(page.relative_to(ROOT)) for page in pages]
    typed = {
        name: found
        for name in names
        if not EVIDENCE.fullmatch(name) and (found := measured_by_hand((ROOT / name).read_text()))
    }
    assert typed == EXPLAINED, f"put others between markers of {recorded_figures.__name__}.py"


def test_other_results_give_other_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in which pat takes twice the time changes every figure of kernels."""
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    result: dict[str, Any] = json.loads((RESULTS / "kernels.json").read_text())
    for case in result["cases"]:
        case["us"]["pat"] *= 2
    (tmp_path / "kernels.json").write_text(json.dumps(result))
    names = [name for name in BLOCKS if name.startswith(("kernel-s", "kernel-l", "gains-by"))]
    before = {name: BLOCKS[name]() for name in names}
    monkeypatch.setattr(recorded_figures, "RESULTS", tmp_path)
    after = {name: BLOCKS[name]() for name in names}
    assert [name for name in names if before[name] == after[name]] == ["kernel-source"]
    cases = recorded_figures.kernel_cases()
    slower = sum(recorded_figures.gain(case) < 0.995 for case in cases)
    told = " ".join(after["kernel-losses"].split())
    assert f"in {slower} of the {len(cases)} cases" in told
    monkeypatch.setattr("sys.argv", ["recorded_figures.py", "--check"])
    assert recorded_figures.main() == 1
    assert "kernels/README.md" in capsys.readouterr().err


def test_figures_follow_runs_that_are_recorded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers over fp8 latent KV, and several ranks."""
    monkeypatch.setattr(recorded_figures, "RESULTS", tmp_path)
    assert BLOCKS["latent-one-byte-servers"]() == "No server of such a model was timed."
    meta = {"gpu": "NVIDIA H100", "commit": "abc", "versions": {"sglang": "0.5.17"}}
    ratio = {"median": 2.5, "low": 2.4, "high": 2.6}
    case = {
        "model": "glm-4.7-flash",
        "case": "shared",
        "tpot_ms": {"pat": 2.0, "default": 5.0},
        "default_over_pat": ratio,
    }
    pools = {"96000": {"layer_us": 50.0, "step_ms": 0.5}}
    served = {
        "meta": meta,
        "models": {"glm-4.7-flash": {"full_attention_layers": 10}},
        "cases": [case],
        "conversion": {"glm-4.7-flash": {"layers": 10, "by_tokens_of_the_pool": pools}},
    }
    for name in ("mla-fp8-serving.json", "ranks-serving.json"):
        (tmp_path / name).write_text(json.dumps(served))
    told = " ".join(BLOCKS["latent-one-byte-servers"]().split())
    assert "2.00 | 5.00 | 2.50 (2.40 to 2.60)" in told
    assert "10 of 47 layers: 0.5 ms with a pool of 96,000 tokens." in told
    plans = {"steps_alike": 90, "apart_us": {"p50": 9.4, "p90": 20.1}}
    drafted = {"pat": {"off": 0.02}, "fa3": {"off": 0.03}}
    ranks = {"meta": meta, "ranks": 4, "chains": {"drafted": drafted, "plans": plans}}
    (tmp_path / "ranks.json").write_text(json.dumps(ranks | {"tp": {"failed": True}}))
    told = BLOCKS["several-ranks"]()
    assert "| chains of drafts, `--tp-size 4` | 4 x H100 | 0.020 | 0.030 | 90 | 9 / 20 |" in told
    assert "ranks-serving.json" in told


def test_no_file_of_results_names_a_folder_of_its_machine() -> None:
    for path in RESULTS.parent.rglob("*.json"):
        command = str(json.loads(path.read_text())["meta"].get("command", ""))
        assert not re.search(r"(^| )/", command), f"{path}: {command}"
