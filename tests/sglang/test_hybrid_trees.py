"""Paths in SGLang's prefix caches of hybrid models.

Window slots and states come and go beside the full slots, and pat reads the full slots.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang_hybrids import CHUNK, HYBRID_KINDS, WINDOW, WINDOW_KINDS, HybridCache
from sglang_trees import place

from sglang_pat._scheduler import PrefixForest
from sglang_pat.sglang.step.debug_checks import StepChecker
from sglang_pat.sglang.tree.radix_paths import PathReader, path_reader

PROMPT = [*range(100, 140)]


class Serving:
    """A cache, and the paths and checks of a backend that decodes its requests."""

    def __init__(self, kind: str, **sizes: int) -> None:
        self.cache = HybridCache(kind, **sizes)
        source: PathReader | None = path_reader(self.cache.cache)
        assert source is not None
        self.source = source
        self.forest = PrefixForest()
        self.checker = StepChecker()
        self._reqs: list[Any] = []
        self.max_shared = 0

    def step(self) -> None:
        """Take the forest to the running requests, and check it.

        It must agree with the tree, the rows, and the contents of the slots.
        """
        reqs = list(self.cache.running)
        self.forest.update(self._reqs, reqs, set(), self.source.read)
        self._reqs = reqs
        if not reqs:
            return
        table = self.cache.rows.req_to_token
        rows = torch.tensor([place(req).req_pool_idx for req in reqs])
        self.checker.check(self.source, reqs, self.forest, table, rows, plan_is_new=True)
        for req in reqs:
            tokens = (*req.origin_input_ids, *req.output_ids)
            for position, slot in enumerate(self.cache.slots_of(req).tolist()):
                assert self.cache.content[slot] == tokens[: position + 1], (req.rid, position)
        for one, other in pairwise(sorted(self.forest.paths())):
            common = set(one) & set(other)
            self.max_shared = max([self.max_shared, *(end for *_, end in common)])

    def lengths(self) -> list[int]:
        return [path[-1][2] if path else 0 for path in self.forest.paths()]


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_requests_share_their_prompt(kind: str) -> None:
    serving = Serving(kind)
    for own in (1, 2):
        serving.cache.admit([*PROMPT, own, own, own, own])
    serving.step()
    if serving.cache.at_chunks:  # what is behind the last state is not in the tree
        assert serving.lengths() == [2 * CHUNK, 2 * CHUNK]
        assert serving.max_shared == 2 * CHUNK
        return
    # A newcomer may end where its window begins to differ: there the tree keeps a window for the
    # next one. What is behind that is the newcomer's own.
    assert serving.lengths() in ([44, 44], [44, 40])
    assert serving.max_shared == 40


@pytest.mark.parametrize("kind", WINDOW_KINDS)
def test_requests_share_what_is_behind_the_window_of_both(kind: str) -> None:
    # Windows move on, and give up the window slots of the prompt: the full ones stay.
    serving = Serving(kind)
    one, other = (serving.cache.admit([*PROMPT, own]) for own in (1, 2))
    free = serving.cache.num_free
    for token in range(2 * WINDOW):
        for req in (one, other):
            serving.cache.decode(req, token)
    used = free - serving.cache.num_free
    serving.cache.evict(window=1000)
    swa = ComponentType.SWA
    assert serving.cache.cache.tree_core.component_evictable_size(swa) == 0
    serving.step()
    assert serving.max_shared == 40
    assert free - serving.cache.num_free == used, "no full slot was freed"


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_what_a_request_lies_on_is_not_evicted(kind: str) -> None:
    serving = Serving(kind)
    req = serving.cache.admit(PROMPT)
    finished = serving.cache.admit([*PROMPT[:20], 1, 2, 3, 4])
    serving.cache.finish(finished)
    serving.cache.evict(full=1000, window=1000, states=1000)
    for token in range(2 * WINDOW):
        serving.cache.decode(req, token)
    serving.cache.evict(full=1000, window=1000, states=1000)
    serving.step()
    assert serving.lengths() == [2 * CHUNK if serving.cache.at_chunks else 40]
    assert serving.cache.cache.tree_core.full_evictable_size() == 0


@pytest.mark.parametrize("kind", WINDOW_KINDS)
def test_a_window_that_is_computed_anew_leaves_the_full_slots_of_others(kind: str) -> None:
    # The tree has lost the window slots of a prompt on which a request lies. Another request
    # computes the prompt again, and gives its window slots to the nodes. SGLang replaces the full
    # slots of such nodes too, but not of those that are locked.
    serving = Serving(kind)
    one = serving.cache.admit(PROMPT)
    for token in range(2 * WINDOW):
        serving.cache.decode(one, token)
    serving.cache.evict(window=1000)
    serving.step()
    before = serving.cache.slots_of(one).tolist()
    serving.cache.admit([*PROMPT, 1, 2, 3, 4])
    serving.step()
    assert serving.cache.slots_of(one).tolist() == before
    assert serving.max_shared == 40


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_everything_at_random(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    serving = Serving(kind, num_tokens=400)
    cache = serving.cache
    prompts = [PROMPT[:16], PROMPT[:24], PROMPT[:33], PROMPT, [7] * 20]
    done: list[list[int]] = []
    for _ in range(150):
        action = rng.random()
        if action < 0.2 and len(cache.running) < 5:
            begin = rng.choice([*prompts, *done[-3:]])
            tokens = [*begin, *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))][:60]
            cache.make_room(64)
            cache.admit(tokens)
        elif action < 0.28 and cache.running:
            req = rng.choice(cache.running)
            done.append([*req.origin_input_ids, *req.output_ids])
            cache.finish(req)
        elif action < 0.36:
            cache.evict(**{rng.choice(["full", "window", "states"]): rng.randrange(1, 60)})
        else:
            cache.make_room(24)
            for req in cache.running:
                if cache.length(req) < 80:
                    cache.decode(req, rng.randrange(3))
        serving.step()
    assert serving.max_shared > 0
    assert len(done) > 3


def test_a_component_that_we_do_not_know_has_no_source() -> None:
    cache = HybridCache(HYBRID_KINDS[0]).cache
    assert path_reader(cache) is not None
    full = cache.components[ComponentType.FULL]

    class Heir(type(full)):  # type: ignore[misc]
        """May hold other slots."""

    full.__class__ = Heir
    assert path_reader(cache) is None


def test_a_tree_with_unknown_components_has_no_source() -> None:
    cache = HybridCache(HYBRID_KINDS[0]).cache
    other = type("Other", (), {"name": "C128"})()
    cache.components = cache.components | {other: object()}
    assert path_reader(cache) is None
