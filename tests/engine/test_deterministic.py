"""SGLang's own test of deterministic inference, on a server in batch-invariant mode.

On a CPU only pat's part is batch-invariant: SGLang refuses `--enable-deterministic-inference`
there, and its matrix products depend on the batch. The modes compare texts, which the tiny model
has no ties in. Mode `radix_cache` compares two prefills, and `p_vs_d` decode with prefill.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import requests
from sglang_deterministic import MODES, different_answers
from sglang_engines import LAUNCH_SERVER, Stats, running_server

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_sglangs_own_test_passes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_BATCH_INVARIANT", "1")
    monkeypatch.setenv("SGLANG_PAT_DEBUG", "1")
    monkeypatch.setenv("SGLANG_PAT_STATS_FILE", str(tmp_path / "stats.json"))
    stats = Stats(tmp_path / "stats.json")
    arguments = {"attention_backend": "pat", "log_level": "info"}
    with running_server(LAUNCH_SERVER, tiny_model, tmp_path / "log", **arguments) as server:
        for mode, prompts in MODES.items():
            found = different_answers(server.url, mode, trials=6, new_tokens=24, logprobs=False)
            assert found == [1] * prompts, mode
        info = requests.get(f"{server.url}/server_info", timeout=30).json()
        assert info["pat"]["batch_invariant"] is True
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]
