"""SGLang's own test of deterministic inference, on a server in batch-invariant mode.

On a CPU only pat's part is batch-invariant: SGLang refuses `--enable-deterministic-inference`
there, and its matrix products depend on the batch. The modes compare texts, which the tiny model
has no ties in. Mode `radix_cache` compares two prefills, and `p_vs_d` decode with prefill.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from sglang.test import test_deterministic as sglang_test
from sglang_engines import LAUNCH_SERVER, Stats, running_server

from sglang_pat.cli.demo.tiny_model import NUM_SPECIAL_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TRIALS = 6


def _tokens(text: str) -> list[int]:
    """In place of a tokenizer, which the tiny model does not have."""
    return [NUM_SPECIAL_TOKENS + byte for byte in text.encode()]


def _post(url: str, json: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """requests.post, with tokens for texts."""
    json = dict(json or {})
    if "text" in json:
        json["input_ids"] = [_tokens(each) for each in json.pop("text")]
    response = requests.post(url, json=json, **{"timeout": 300} | kwargs)
    response.raise_for_status()
    if not url.endswith("/generate"):
        return response
    answers = [each | {"text": str(each["output_ids"])} for each in response.json()]
    return SimpleNamespace(status_code=200, json=lambda: answers)


def test_sglangs_own_test_passes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_BATCH_INVARIANT", "1")
    monkeypatch.setenv("SGLANG_PAT_DEBUG", "1")
    monkeypatch.setenv("SGLANG_PAT_STATS_FILE", str(tmp_path / "stats.json"))
    monkeypatch.setattr(sglang_test, "requests", SimpleNamespace(post=_post))
    stats = Stats(tmp_path / "stats.json")
    arguments = {"attention_backend": "pat", "log_level": "info"}
    with running_server(LAUNCH_SERVER, tiny_model, tmp_path / "log", **arguments) as server:
        host, port = server.url.removeprefix("http://").split(":")
        options = {"host": host, "port": int(port), "n_trials": TRIALS, "max_new_tokens": 24}
        for mode, expected in (("single", [1]), ("prefix", [1, 1, 1, 1])):
            args = sglang_test.BenchArgs(test_mode=mode, n_start=4, **options)
            assert sglang_test.test_deterministic(args) == expected, mode
        info = requests.get(f"{server.url}/get_server_info", timeout=30).json()
        assert info["pat"]["batch_invariant"] is True
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]
