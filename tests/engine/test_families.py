"""A small model of every architecture family answers as with SGLang's default backend."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sglang
from fakes.driver import HICACHE_ARGUMENTS
from family_engines import NUM_TOKENS, PREFIX, FamilyEngines, Run, twice
from model_families import FAMILIES, Family

from check.cpu_ranks import environment_of_ranks
from sglang_pat.sglang.cpu import cuda_driver_is_present

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("families")]

on_a_cpu = pytest.mark.skipif(
    cuda_driver_is_present(), reason="runs only where there is no CUDA driver"
)
# The smallest gap between two tokens must exceed this: float32 sums differ by about 1e-6.
CLEAR_CUT = 5e-5


def cases(table: dict[str, Any], *each_change: str) -> list[Any]:
    """Return the cases of a table as pytest parameters. Those not in `each_change` are nightly."""
    return [
        pytest.param(
            *(values if isinstance(values, tuple) else (values,)),
            id=name,
            marks=[] if name in each_change else [pytest.mark.nightly],
        )
        for name, values in table.items()
    ]


EACH_CHANGE = [name for name, family in FAMILIES.items() if not family.nightly]


def skip_if_refused(family: Family) -> None:
    reason = family.refused.get(sglang.__version__)
    if reason is not None:
        pytest.skip(f"SGLang {sglang.__version__} on a CPU: {reason}")


@pytest.mark.parametrize("family", cases(FAMILIES, *EACH_CHANGE))
def test_tokens_and_routes(engines: FamilyEngines, family: Family) -> None:
    skip_if_refused(family)
    expected = engines.alone(family)
    assert_telling(expected)
    assert expected.routes is None
    found = engines.run(family, "pat")
    assert found.tokens == expected.tokens
    assert_routes(found, family)
    assert ("with attention sinks" in found.log) == family.pat_has_sinks
    if family.pat:
        assert_shared(found, family)
    # Every step decodes each layer exactly once. The number of steps depends on when the prompts
    # arrive.
    for run in (expected, found) if found.calls else ():
        (steps,) = {*run.calls.values()}
        assert steps >= 2 * (NUM_TOKENS - 1)
    assert {layer for _, layer in found.calls} == {layer for _, layer in expected.calls}


CHAINS = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
BRANCHES = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
}
TREES = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 6,
    "speculative_ngram_max_bfs_breadth": 3,
}


def drafts_with(options: dict[str, Any], small: Family, folder: Path) -> dict[str, Any]:
    """Return the options; a draft model, if they need one, is the served model itself."""
    algorithm = options.get("speculative_algorithm")
    if algorithm == "NGRAM" and sglang.__version__ == "0.5.17":
        pytest.skip("SGLang 0.5.17 cannot compile its n-gram corpus here")
    if algorithm != "STANDALONE":
        return options
    return options | {"speculative_draft_model_path": str(small.write(folder / "draft"))}


def run_with_drafts(
    engines: FamilyEngines, small: Family, speculation: dict[str, Any]
) -> tuple[Run, Run, Run]:
    """Compare answers without drafts, with drafts, and with drafts on pat; return the runs."""
    alone = engines.alone(small)
    expected = engines.run(small, None, **speculation)
    found = engines.run(small, "pat", **speculation)
    assert found.tokens == expected.tokens == alone.tokens
    assert found.verify_steps == expected.verify_steps
    return alone, expected, found


SPECULATION = {
    "chains": ("llama", CHAINS),
    "branches": ("llama", BRANCHES),
    # SGLang's own defaults for a Llama.
    "branches of a Llama": (
        "llama",
        BRANCHES
        | {
            "speculative_num_steps": 5,
            "speculative_eagle_topk": 4,
            "speculative_num_draft_tokens": 8,
        },
    ),
    "branches, pages": ("llama", BRANCHES | {"page_size": 4}),
    "branches, pages of 16": ("llama", BRANCHES | {"page_size": 16}),
    "trees": ("llama", TREES),
    "pages": ("llama", CHAINS | {"page_size": 4}),
    "branches, latent": ("deepseek-v2", BRANCHES),
    "latent attention": ("deepseek-v2", CHAINS | {"page_size": 16}),
}


@pytest.mark.parametrize(("family", "speculation"), cases(SPECULATION, "chains", "branches"))
def test_speculation(
    engines: FamilyEngines, tmp_path: Path, family: str, speculation: dict[str, Any]
) -> None:
    """Answers are those without drafts; pat accepts as many drafts as the default backend."""
    small = FAMILIES[family]
    has_trees = speculation.get("speculative_eagle_topk", 1) > 1
    if has_trees and "page_size" in speculation and sglang.__version__ == "0.5.17":
        pytest.skip("SGLang 0.5.17 allows trees over pages by the name of the backend")
    speculation = drafts_with(speculation, small, tmp_path)
    alone, expected, found = run_with_drafts(engines, small, speculation)
    assert_telling(alone)
    # Some drafts are accepted, not all.
    assert NUM_TOKENS / 4 < sum(found.verify_steps) / len(found.verify_steps) < NUM_TOKENS - 1
    assert_routes(found, small)
    assert_drafts(found, expected, speculation)
    assert found.stats["steps_without_sharing"] == {}
    assert found.stats["plans_reused"] > found.stats["plans_built"]
    assert found.stats["kv_tokens_planned"] < 0.4 * found.stats["kv_tokens_query_centric"]
    verified = found.stats["verify"]
    assert {*found.calls.values()} == {verified["steps"]}
    tokens = speculation["speculative_num_draft_tokens"]
    # The first prompt is sent twice. A round may start before the host knows which requests ended.
    rows = tokens * (sum(found.verify_steps) + found.first_verify_steps)
    assert rows <= verified["rows"] <= rows + tokens * (len(found.tokens) + 1)


@on_a_cpu
def test_tokens_that_are_padded_for_the_ranks(engines: FamilyEngines, tmp_path: Path) -> None:
    """MLP synchronisation pads the tokens of a verify step; pat ignores the padding.

    Each rank runs the MLPs of an equal part of a step's tokens, so an odd number is padded.
    Requests have three tokens to verify each, and run alone or together.
    """
    small = FAMILIES["llama"]
    padded = drafts_of_a_head(small, tmp_path / "draft") | {
        "speculative_num_steps": 2,
        "speculative_num_draft_tokens": 3,
        "tp_size": 2,
        "moe_dense_tp_size": 1,
    }
    ranks = environment_of_ranks(tp_size=2)
    expected = engines.run(small, None, ranks=ranks, **padded)
    found = engines.run(small, "pat", ranks=ranks, **padded)
    assert found.tokens == expected.tokens
    assert found.verify_steps == expected.verify_steps
    assert_telling(found)
    assert_routes(found, small)
    assert found.stats["steps_without_sharing"] == {}
    assert found.first_verify_steps > 0  # one request: three rows, padded to four


@on_a_cpu
@pytest.mark.nightly
@pytest.mark.parametrize("drafter", ["the same model", "a head"])
def test_chains_on_two_ranks(engines: FamilyEngines, tmp_path: Path, drafter: str) -> None:
    """Both ranks plan every verify step alike, and accept as many drafts as the default backend."""
    small = FAMILIES["llama"]
    drafts = (
        drafts_of_a_head(small, tmp_path / "draft") if drafter == "a head"
        else drafts_with(CHAINS, small, tmp_path)
    )  # fmt: skip
    ranks = environment_of_ranks(tp_size=2)
    expected = engines.run(small, None, ranks=ranks, tp_size=2, **drafts)
    found = engines.run(small, "pat", ranks=ranks, tp_size=2, **drafts)
    assert_telling(found)
    assert found.tokens == expected.tokens
    assert found.verify_steps == expected.verify_steps
    assert_routes(found, small)
    assert found.stats["steps_without_sharing"] == {}
    planned = found.stats["plans_built"] + found.stats["plans_reused"]
    assert found.stats["ranks_alike"]["steps"] >= planned > 0
    assert found.stats["verify"]["steps"] > 0


OWN_REQUESTS = {"dp_size": 2, "enable_dp_attention": True}
ON_TWO_RANKS = {
    "common batch": ("qwen3", {}),
    "own requests": ("qwen3", OWN_REQUESTS),
    "windows, common batch": ("mellum", {}),
    "windows, own requests": ("mellum", OWN_REQUESTS),
    "latent, common batch": ("deepseek-v2", {}),
    "latent, common batch, pages": ("deepseek-v2", {"page_size": 64}),
    "latent, own requests": ("deepseek-v2", OWN_REQUESTS),
    "latent, own requests, pages": ("deepseek-v2", OWN_REQUESTS | {"page_size": 64}),
}


@on_a_cpu
@pytest.mark.parametrize(("name", "layout"), cases(ON_TWO_RANKS))
def test_two_ranks(engines: FamilyEngines, name: str, layout: dict[str, Any]) -> None:
    """Each rank has half of the query heads, or all heads and its own requests, if any.

    A rank without requests decodes padding, which pat's statistics do not count.
    """
    small = FAMILIES[name]
    layout = layout | {"ranks": environment_of_ranks(tp_size=2), "tp_size": 2}
    expected = engines.run(small, None, **layout)
    found = engines.run(small, "pat", **layout)
    assert_telling(found)
    assert found.tokens == expected.tokens
    assert (found.layers_of("pat"), found.layers_of("default")) == (small.pat, ())
    assert found.stats["steps_without_sharing"] == {}
    assert found.stats["kv_tokens_planned"] < found.stats["kv_tokens_query_centric"]
    compared = found.stats["ranks_alike"].get("steps", 0)
    planned = found.stats["plans_built"] + found.stats["plans_reused"]
    assert compared == 0 if "dp_size" in layout else compared >= planned > 0


def drafts_of_a_head(family: Family, folder: Path, algorithm: str = "EAGLE") -> dict[str, Any]:
    """Return options with an untrained head for a Llama, which is written to `folder`."""
    draft = family.write(folder)
    config = json.loads((draft / "config.json").read_text())
    config |= {"architectures": [f"LlamaForCausalLM{algorithm.title()}"], "num_hidden_layers": 1}
    read = {"eagle_aux_hidden_state_layer_ids": [0, 1]}  # the output of these layers, by EAGLE3
    config |= {"draft_vocab_size": None, "eagle_config": read}
    (draft / "config.json").write_text(json.dumps(config))
    return CHAINS | {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}


@pytest.mark.parametrize("algorithm", cases({each: each for each in ("EAGLE", "EAGLE3")}, "EAGLE3"))
def test_a_head_that_drafts(engines: FamilyEngines, tmp_path: Path, algorithm: str) -> None:
    """Hardly any token that an untrained head drafts is accepted."""
    small = FAMILIES["llama"]
    drafts = drafts_of_a_head(small, tmp_path / "draft", algorithm)
    _, _, found = run_with_drafts(engines, small, drafts)
    assert_routes(found, small)
    assert found.routes is not None
    assert found.routes["draft_model"]["pat_layers"] == 1
    assert found.routes["draft_extend"]["pat_layers"] == 1
    assert found.draft_calls == {("pat", 0): 3 * found.stats["verify"]["steps"]}
    assert found.stats["draft"]["plans_reused"] > found.stats["draft"]["plans_built"]


@pytest.mark.nightly
@pytest.mark.skipif(
    sglang.__version__ == "0.5.17", reason="the plan stream of SGLang 0.5.17 waits for nothing"
)
def test_steps_that_are_prepared_on_a_stream_of_their_own(
    engines: FamilyEngines, tmp_path: Path
) -> None:
    """Test which steps are prepared. Only a GPU shows the order of streams."""
    small = FAMILIES["llama"]
    drafts = drafts_with(CHAINS, small, tmp_path) | {
        "environment": {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}
    }
    _, _, found = run_with_drafts(engines, small, drafts)
    assert_routes(found, small)
    assert found.stats["steps_without_sharing"] == {}
    assert found.stats["draft_extend"] == found.stats["verify"]


def test_a_number_of_drafts_that_adapts(engines: FamilyEngines, tmp_path: Path) -> None:
    """SGLang changes the number of drafts, even to 0, and with it the backends."""
    small = FAMILIES["llama"]
    config = tmp_path / "adaptive.json"
    numbers = {"1": [3], "3": [1], "5": [0], "7": [2]}
    config.write_text(json.dumps({of: {"candidate_steps": each} for of, each in numbers.items()}))
    adaptive = drafts_of_a_head(small, tmp_path / "draft") | {
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(config),
    }
    stopped = answers_that_stop(engines.alone(small))
    stops = {"stop_tokens": [answer[-1] for answer in stopped]}
    expected = engines.run(small, None, **stops, **adaptive)
    found = engines.run(small, "pat", **stops, **adaptive)
    assert found.tokens == expected.tokens == stopped
    assert found.verify_steps == expected.verify_steps
    assert_routes(found, small)
    for run in (expected, found):
        assert {*re.findall(r"steps \d+ -> (\d+)", run.log)} >= {"0", "1", "2", "3"}
    assert found.stats["steps_without_sharing"] == {}
    assert {*found.calls.values()} == {found.stats["verify"]["steps"]}
    assert found.calls.keys() == {("pat", layer) for layer in range(4)}
    steps = sum(found.stats[each]["steps"] for each in ("draft", "draft_extend"))
    assert found.draft_calls == {("pat", 0): steps}


BLOCKS = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 5}


def drafts_of_blocks(family: Family, folder: Path, **config: Any) -> dict[str, Any]:
    """Return options with a block drafter of two layers, which is written to `folder`."""
    draft = family.write(folder)
    path = draft / "config.json"
    small = json.loads(path.read_text())
    small |= {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": BLOCKS["speculative_num_draft_tokens"],
        "num_target_layers": 4,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 511},
    }
    path.write_text(json.dumps(small | config))
    return BLOCKS | {"speculative_draft_model_path": str(draft)}


# Changes of the draft model's config, server options, and the draft layers that pat decodes.
OF_BLOCKS = {
    "whole blocks": ({}, {}, (0, 1)),
    "causal": ({"is_causal": True}, {}, (0, 1)),
    # A layer with a window falls back.
    "window, pages": (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32},
        {"page_size": 4},
        (0,),
    ),
    "no overlap": ({}, {"disable_overlap_schedule": True}, (0, 1)),
    "a table of its own": ({}, {"speculative_draft_window_size": 64}, ()),
}


@pytest.mark.parametrize(
    ("config", "options", "layers"), cases(OF_BLOCKS, "whole blocks", "a table of its own")
)
def test_blocks_of_drafts(
    engines: FamilyEngines,
    tmp_path: Path,
    config: dict[str, Any],
    options: dict[str, Any],
    layers: tuple[int, ...],
) -> None:
    """A draft model drafts a whole block at once; pat decodes its first `layers` layers."""
    small = FAMILIES["llama"]
    alone = engines.alone(small)
    drafts = drafts_of_blocks(small, tmp_path / "draft", **config) | options
    expected = engines.run(small, None, answers=alone.tokens, **drafts)
    found = engines.run(small, "pat", answers=alone.tokens, **drafts)
    assert found.tokens == expected.tokens == alone.tokens
    assert found.verify_steps == expected.verify_steps
    # Some drafts are accepted, not all.
    assert NUM_TOKENS / 4 < sum(found.verify_steps) / len(found.verify_steps) < NUM_TOKENS - 1
    assert_routes(found, small)
    assert found.routes is not None
    assert found.routes["draft_model"]["pat_layers"] == len(layers)
    assert found.stats["steps_without_sharing"] == {}
    assert found.stats["kv_tokens_planned"] < 0.4 * found.stats["kv_tokens_query_centric"]
    verified = found.stats["verify"]
    assert {*found.calls.values()} == {verified["steps"]}
    who = {layer: "pat" if layer in layers else "default" for layer in (0, 1)}
    steps = dict.fromkeys(((who[layer], layer) for layer in (0, 1)), verified["steps"])
    assert found.draft_calls == steps
    if layers:
        drafted = found.stats["draft"]
        assert {name: drafted[name] for name in ("steps", "rows")} == verified
        assert drafted["plans_reused"] > drafted["plans_built"]


@pytest.mark.nightly
def test_a_draft_model_of_several_layers(engines: FamilyEngines, tmp_path: Path) -> None:
    """Each draft layer drafts one token from the verified ones, with its own KV pool."""
    small = FAMILIES["llama"]
    drafts = drafts_of_a_head(small, tmp_path / "draft") | {"enable_multi_layer_eagle": True}
    _, _, found = run_with_drafts(engines, small, drafts)
    assert_routes(found, small)
    assert found.routes is not None
    assert found.routes["draft_extend"]["pat_layers"] == 1
    assert found.stats["steps_without_sharing"] == {}
    verified = found.stats["verify"]
    assert {*found.calls.values()} == {verified["steps"]}
    assert found.draft_calls == {("pat", 0): 3 * verified["steps"]}
    assert found.stats["draft_extend"] == {name: 3 * n for name, n in verified.items()}


@pytest.mark.nightly
def test_a_draft_model_of_one_step(engines: FamilyEngines, tmp_path: Path) -> None:
    """The draft-extend step produces the only draft."""
    small = FAMILIES["llama"]
    drafts = drafts_with(IN_GRAPHS["one step"], small, tmp_path)
    _, _, found = run_with_drafts(engines, small, drafts)
    verified = found.stats["verify"]
    assert found.stats["draft_extend"] == verified
    assert found.draft_calls == dict.fromkeys(found.calls, verified["steps"])


@pytest.mark.nightly
@pytest.mark.parametrize("options", [CHAINS, BRANCHES], ids=["chains", "branches"])
def test_requests_that_are_aborted_under_speculation(
    engines: FamilyEngines, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Requests are aborted mid-answer, while others with the same prompts go on."""
    small = FAMILIES["llama"]
    drafts = drafts_with(options, small, tmp_path)
    alone = engines.alone(small)
    found = engines.run(small, "pat", aborts=True, **drafts)
    assert found.tokens == alone.tokens
    assert found.aborted >= len(alone.tokens) // 2
    assert found.stats["steps_without_sharing"] == {}


@pytest.mark.nightly
def test_trees_over_windows_in_one_pool_with_graphs_and_retractions(
    engines: FamilyEngines, tmp_path: Path
) -> None:
    """Requests are retracted between rounds, and other requests' drafts get their slots.

    The answers are compared with speculation on the default backend: SGLang measures a window from
    a draft's index in its tree, so answers longer than the window differ from those without drafts.
    """
    family = FAMILIES["gemma-3"]
    options = drafts_with(TREES, family, tmp_path) | {
        "disable_hybrid_swa_memory": True,
        "max_total_tokens": 190,
        "schedule_conservativeness": 0.05,
        "disable_overlap_schedule": True,
    }
    expected = engines.run(family, None, has_graphs=True, **options)
    found = engines.run(family, "pat", has_graphs=True, **options)
    assert min(found.retractions, expected.retractions) > 0
    assert found.tokens == expected.tokens
    assert found.verify_steps == expected.verify_steps


@pytest.mark.nightly
@pytest.mark.parametrize("options", [CHAINS, BRANCHES], ids=["chains", "branches"])
def test_requests_that_stop_and_that_are_retracted_under_speculation(
    engines: FamilyEngines, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Requests stop in the middle of a chain, or are retracted; others get their rows."""
    small = FAMILIES["llama"]
    drafts = drafts_with(options, small, tmp_path)
    alone = engines.alone(small)
    stopped = answers_that_stop(alone)
    stop_tokens = [answer[-1] for answer in stopped]
    found = engines.run(small, "pat", stop_tokens=stop_tokens, max_running_requests=3, **drafts)
    assert found.tokens == stopped
    assert found.stats["steps_without_sharing"] == {}
    assert found.stats["batch_changes"]["leave"] >= len(stopped)
    # With overlap scheduling SGLang reserves more slots a round, and admits fewer requests.
    few = {
        "max_total_tokens": 420,
        "schedule_conservativeness": 0.05,
        "disable_overlap_schedule": True,
    }
    found = engines.run(small, "pat", **few, **drafts)
    assert found.tokens == alone.tokens
    assert found.retractions > 0


SESSIONS = {
    "branches, streaming": (BRANCHES, "streaming"),
    "branches, session": (BRANCHES, "session"),
    "chains, session": (CHAINS, "session"),
    "chains, streaming": (CHAINS, "streaming"),
    "pages, streaming": (CHAINS | {"page_size": 16}, "streaming"),
    "trees, session": (TREES, "session"),
    "trees, streaming": (TREES, "streaming"),
}


@pytest.mark.parametrize(("options", "kind"), cases(SESSIONS, "branches, streaming"))
def test_sessions_under_speculation(
    engines: FamilyEngines, tmp_path: Path, options: dict[str, Any], kind: str
) -> None:
    """A turn ends in the middle of its drafts, and the next one goes on from there."""
    small = FAMILIES["llama"]
    drafts = drafts_with(options, small, tmp_path) | {
        "conversations": kind,
        "enable_streaming_session": True,
        "max_running_requests": 16,  # a streaming session keeps its row between turns
    }
    alone = engines.run(small, None, conversations="whole")
    assert alone.smallest_gap > CLEAR_CUT
    expected = engines.run(small, None, **drafts)
    found = engines.run(small, "pat", **drafts)
    assert found.tokens == expected.tokens == alone.tokens
    assert_shared_drafts(found, expected, options)


FROM_HOST = {
    "branches": BRANCHES,
    "chains": CHAINS,
    "pages": CHAINS | {"page_size": 16},
    "trees": TREES,
    "no drafts": {"hicache_write_policy": "write_back"},
}


@on_a_cpu
@pytest.mark.parametrize("options", cases(FROM_HOST, "branches"))
def test_kv_that_comes_back_from_the_host_under_speculation(
    engines: FamilyEngines, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The draft model's comes back, too: as many drafts are right as before."""
    small = FAMILIES["llama"]
    drafts = HICACHE_ARGUMENTS | {
        "evictions": True,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "hicache_write_policy": "write_through",
        "enable_cache_report": True,
        "max_total_tokens": 900,  # too small for all requests
    }
    drafts |= drafts_with(options, small, tmp_path)
    alone = engines.alone(small)
    expected = engines.run(small, None, **drafts)
    found = engines.run(small, "pat", **drafts)
    assert found.tokens == expected.tokens == [2 * answer for answer in alone.tokens]
    assert min(found.from_host, expected.from_host) > PREFIX
    assert found.stats["tree_events"]["evict"] > 0
    assert_shared_drafts(found, expected, options)


# Families whose prefix caches also hold window slots, recurrent states, or both.
HYBRIDS = ("gpt-oss", "gemma-3", "llama-4", "qwen3.5", "nemotron-h", "falcon-h1")


@pytest.mark.parametrize("name", cases({name: name for name in HYBRIDS}, "gpt-oss"))
def test_prefixes_that_are_evicted_from_a_hybrid_cache(engines: FamilyEngines, name: str) -> None:
    """SGLang evicts windows and states by other rules than the full slots that pat reads."""
    family = FAMILIES[name]
    skip_if_refused(family)
    small = {"evictions": True, "max_total_tokens": 700}
    expected = engines.run(family, None, **small)
    found = engines.run(family, "pat", **small)
    assert found.tokens == expected.tokens
    assert found.smallest_gap > CLEAR_CUT
    assert_routes(found, family)
    assert found.stats["tree_events"]["evict"] > 0
    assert found.stats["steps_without_sharing"] == {}


IN_GRAPHS = {
    "branches": BRANCHES,
    "decode": {},
    "chains": CHAINS,
    "trees": TREES,
    "pages": CHAINS | {"page_size": 4, "disable_overlap_schedule": True},
    "no overlap": BRANCHES | {"disable_overlap_schedule": True},
    "one step": CHAINS | {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2},
}


@pytest.mark.parametrize("options", cases(IN_GRAPHS, "branches"))
def test_a_step_in_a_graph_has_a_plan_that_serves_it(
    engines: FamilyEngines, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Verify steps run with and without graphs while requests join, stop and repeat."""
    small = FAMILIES["llama"]
    options = drafts_with(options, small, tmp_path)
    stopped = answers_that_stop(engines.alone(small))
    options = options | {
        "has_graphs": True,
        "stop_tokens": twice([answer[-1] for answer in stopped]),
        "max_running_requests": 5,
    }
    expected = engines.run(small, None, **options)
    found = engines.run(small, "pat", **options)
    assert found.tokens == expected.tokens == twice(stopped)
    assert found.verify_steps == expected.verify_steps  # as many drafts are accepted
    reasons = found.stats["steps_planned"]
    assert reasons.keys() >= {"eager", "requests"}
    assert sum(reasons.values()) < {*found.calls.values()}.pop()  # the other steps reuse a plan
    assert found.stats["steps_without_sharing"] == {}


def answers_that_stop(run: Run) -> list[list[int]]:
    """Return beginnings of the answers, each with a last token that occurs only there."""
    ends = [
        next(i for i in range(4 + index, NUM_TOKENS) if answer[i] not in answer[:i])
        for index, answer in enumerate(run.tokens)
    ]
    return [answer[: end + 1] for answer, end in zip(run.tokens, ends, strict=True)]


def assert_telling(run: Run) -> None:
    """Assert that the answers depend on attention."""
    assert run.smallest_gap > CLEAR_CUT
    assert {len(answer) for answer in run.tokens} == {NUM_TOKENS}
    assert min(len(set(answer)) for answer in run.tokens) >= NUM_TOKENS // 4
    # All answers differ, although the prompts have most tokens in common.
    assert len({tuple(answer) for answer in run.tokens}) == len(run.tokens)


def assert_drafts(found: Run, expected: Run, speculation: dict[str, Any]) -> None:
    """Assert the routes and the number of decoded layers of the draft model."""
    if speculation["speculative_algorithm"] == "NGRAM":
        assert "draft" not in found.stats
        return
    assert found.routes is not None
    routes = dict(found.routes)
    assert routes.pop("draft_model") == routes.pop("draft_extend") == routes
    steps = speculation["speculative_num_steps"] - 1
    layers = {layer for _, layer in found.calls}
    verified, drafted = found.stats["verify"], found.stats["draft"]
    # One more call a round: the draft-extend step.
    assert found.draft_calls == dict.fromkeys(found.calls, (steps + 1) * verified["steps"])
    assert found.stats["draft_extend"] == verified
    assert found.draft_calls.keys() == found.calls.keys()
    assert expected.draft_calls.keys() == {("default", layer) for layer in layers}
    assert drafted["steps"] == steps * verified["steps"]
    rows = verified["rows"] // speculation["speculative_num_draft_tokens"]
    assert drafted["rows"] == steps * rows * speculation["speculative_eagle_topk"]
    assert drafted["plans_built"] + drafted["plans_reused"] == verified["steps"]
    assert drafted["plans_reused"] > drafted["plans_built"]
    tokens = found.stats["draft_kv_tokens"]
    assert tokens["lower_bound"] <= tokens["planned"] < 0.5 * tokens["query_centric"]


def assert_shared_drafts(found: Run, expected: Run, options: dict[str, Any]) -> None:
    """Assert that pat accepts as many drafts as the default backend, and shares reads."""
    if options.get("speculative_algorithm") == "NGRAM":
        # The drafts come from other requests' answers, so they depend on timing.
        total = sum(expected.verify_steps)
        assert sum(found.verify_steps) == pytest.approx(total, rel=0.02)
    else:
        assert found.verify_steps == expected.verify_steps
    assert_routes(found, FAMILIES["llama"])
    assert found.stats["steps_without_sharing"] == {}
    assert found.stats["kv_tokens_planned"] < 0.6 * found.stats["kv_tokens_query_centric"]


def assert_routes(run: Run, family: Family) -> None:
    """Assert how often each layer was decoded, and the routes in SGLang's server info."""
    delegated = sorted(layer for layers in family.default.values() for layer in layers)
    assert run.layers_of("pat") == family.pat
    assert run.layers_of("default") == tuple(delegated)
    assert run.routes is not None
    assert {name: each for name, each in run.routes.items() if not name.startswith("draft_")} == {
        "default_backend": "torch_native" if run.calls else "Mamba2AttnBackend",
        "pat_layers": len(family.pat),
        "default_layers": {reason: len(layers) for reason, layers in family.default.items()},
        "batch_invariant": False,
    }


def assert_shared(run: Run, family: Family) -> None:
    """Assert that each step reads the common prefix once.

    With one KV head twice is allowed: the planner cuts tiles so that all workers are busy, and both
    parts may read the prefix if that costs less than partials.
    """
    assert run.stats["steps_without_sharing"] == {}
    planned, alone = run.stats["kv_tokens_planned"], run.stats["kv_tokens_query_centric"]
    steps = NUM_TOKENS - 1
    reads = 2 if family.config.get("num_key_value_heads") == 1 else 1
    assert alone - planned >= 0.9 * (8 - reads) * PREFIX * steps


# A plain model, models with several kinds of layers and pools, and latent attention.
OVER_FP8 = ("llama", "gpt-oss", "qwen3-next", "deepseek-v2")


@pytest.mark.parametrize("name", cases({name: name for name in OVER_FP8}, "llama"))
def test_tokens_over_an_fp8_pool(engines: FamilyEngines, name: str) -> None:
    family = FAMILIES[name]
    skip_if_refused(family)
    options = {"kv_cache_dtype": "fp8_e4m3"}
    expected = engines.run(family, None, **options)
    assert_telling(expected)
    found = engines.run(family, "pat", **options)
    assert found.tokens == expected.tokens
    assert_routes(found, family)
    assert_shared(found, family)
    assert "float8_e4m3fn" in found.log
