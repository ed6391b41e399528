"""pat decodes layers with sliding windows, with the answers of SGLang's default backend.

Prompts share 100 tokens and end in 5 to 26 tokens of their own; answers have 24. So each window of
64 tokens begins in the shared part. At first the windows overlap there enough for plans to share
the reads; at the end sharing would cost more than it saves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang
from family_engines import FamilyEngines, Run, twice
from model_families import FAMILIES, Family

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("families")]

# A pool whose slots other requests take between two turns. Window slots are freed in every step.
EVICTIONS: dict[str, Any] = {
    "evictions": True,
    "max_total_tokens": 1000,
    "environment": {"SGLANG_SWA_EVICTION_INTERVAL": "1"},
}


def family_of(name: str) -> Family:
    family = FAMILIES[name]
    if sglang.__version__ in family.refused:
        pytest.skip(family.refused[sglang.__version__])
    return replace(family, config=family.config | {"sliding_window": 64})


def share_something(found: Run) -> None:
    """Assert that plans of windows shared KV."""
    windows = found.stats["windows"]
    assert windows["kv_tokens_read"] < windows["kv_tokens_query_centric"]


@pytest.mark.parametrize("name", ["gemma-2", "gemma-3"])
def test_windows_in_one_pool_with_graphs(engines: FamilyEngines, name: str) -> None:
    """Several steps reuse one plan while their windows move on."""
    family = family_of(name)
    found = engines.run(family, "pat", has_graphs=True)
    assert found.tokens == twice(engines.run(family, None).tokens)
    assert found.layers_of("pat") == family.pat
    assert found.layers_of("default") == ()
    assert found.stats["plans_reused"] > found.stats["plans_built"]
    windows = found.stats["windows"]
    assert windows["plans_reused"] > windows["plans_built"] > 0
    assert windows["kv_tokens_query_centric"] < found.stats["kv_tokens_query_centric"]
    share_something(found)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_chunks_that_requests_leave(engines: FamilyEngines, has_graphs: bool) -> None:
    """All shared tokens are in the first chunk of 128 tokens; answers end in the second chunk."""
    family = FAMILIES["llama-4"]
    family = replace(family, config=family.config | {"attention_chunk_size": 128})
    expected = engines.run(family, None).tokens
    found = engines.run(family, "pat", has_graphs=has_graphs)
    assert found.tokens == (twice(expected) if has_graphs else expected)
    assert found.layers_of("pat") == family.pat
    assert found.layers_of("default") == ()
    share_something(found)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("name", ["gpt-oss", "mellum"])
def test_windows_in_a_pool_of_their_own(
    engines: FamilyEngines, name: str, has_graphs: bool
) -> None:
    """Window layers have slots of their own, which SGLang frees while the request runs."""
    family = family_of(name)
    expected = engines.run(family, None, **EVICTIONS)
    found = engines.run(family, "pat", has_graphs=has_graphs, **EVICTIONS)
    assert found.tokens == (twice(expected.tokens) if has_graphs else expected.tokens)
    if has_graphs:  # the second time, the cache has the prompts' prefix
        share_something(found)
    assert found.layers_of("pat") == family.pat
    assert found.layers_of("default") == ()


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("name", ["gemma-3", "mellum"])
def test_windows_in_which_chains_are_verified(
    engines: FamilyEngines, tmp_path: Path, name: str, has_graphs: bool
) -> None:
    """Each draft token has its own window. Window layers of the draft model fall back."""
    family = family_of(name)
    drafts = {
        "speculative_algorithm": "STANDALONE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "speculative_draft_model_path": str(family.write(tmp_path / "draft")),
    }
    expected = engines.run(family, None, has_graphs=has_graphs, **drafts)
    found = engines.run(family, "pat", has_graphs=has_graphs, **drafts)
    assert found.tokens == expected.tokens
    share_something(found)
    if not has_graphs:  # free slots are not overwritten
        assert found.verify_steps == expected.verify_steps
    assert found.layers_of("pat") == family.pat
    assert found.layers_of("default") == ()
    full, windows = {("pat", 1), ("pat", 3)}, {("default", 0), ("default", 2)}
    assert found.draft_calls.keys() == full | windows
