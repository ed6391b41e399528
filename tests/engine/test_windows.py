"""Layers with sliding windows on pat: answers as with SGLang's default backend.

Prompts share 100 tokens and end in 5 to 26 of their own, and answers have 24. So each window of 64
tokens begins in what all share. At first enough of it is shared that plans share it too; at the end
less than another class of rows would cost.
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

# A pool of which others take the slots between two turns. Windows give up theirs in every step.
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
    """Check that plans of windows have shared KV: else their rows would not have been cut."""
    windows = found.stats["windows"]
    assert windows["kv_tokens_read"] < windows["kv_tokens_query_centric"]


@pytest.mark.parametrize("name", ["gemma-2", "gemma-3"])
def test_windows_in_one_pool_with_graphs(engines: FamilyEngines, name: str) -> None:
    """A plan serves several steps, in which windows move on."""
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
    """The first chunk of 128 tokens holds all that requests share; answers end in the second."""
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
    """Their slots are others than the rows', and are given up while the request runs."""
    family = family_of(name)
    expected = engines.run(family, None, **EVICTIONS)
    found = engines.run(family, "pat", has_graphs=has_graphs, **EVICTIONS)
    assert found.tokens == (twice(expected.tokens) if has_graphs else expected.tokens)
    if has_graphs:  # the second time, prompts find their prefix in the cache
        share_something(found)
    assert found.layers_of("pat") == family.pat
    assert found.layers_of("default") == ()


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("name", ["gemma-3", "mellum"])
def test_windows_in_which_chains_are_verified(
    engines: FamilyEngines, tmp_path: Path, name: str, has_graphs: bool
) -> None:
    """Each draft token has a window of its own. Those of the draft model stay with SGLang."""
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
