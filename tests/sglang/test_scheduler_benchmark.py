"""The planning benchmark's steps run in each of SGLang's prefix caches."""

from __future__ import annotations

import pytest
from sglang_trees import TREE_KINDS

from kernel.scheduler import Steps


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("cache", TREE_KINDS[:2])
def test_a_step_is_read_and_planned(cache: str, varied: bool) -> None:
    steps = Steps(cache, 32, varied=varied)
    everyone = steps.requests
    for requests in (everyone, everyone, everyone[1:], [*everyone[1:], steps.newcomers[0]]):
        read_us, plan_us = steps.run(requests)
        assert read_us > 0
        assert plan_us > 0
    stats = steps.attention.stats
    assert stats.plans_built >= 2
    assert stats.kv_tokens_planned < stats.kv_tokens_query_centric
