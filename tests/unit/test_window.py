"""WindowAttention equals `dense_attention` over the window, on random growing forests."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
import torch
from window_scenes import DIM, HEADS, KV_HEADS, Scene, prefix_scene

from sglang_pat.attention import PackAttention, plan_together
from sglang_pat.plan import BufferSizes, PlanOverflowError
from sglang_pat.stats import PlanStats
from sglang_pat.window import AHEAD, WindowAttention

OPTIONS: dict[str, Any] = {"dtype": torch.float32}


def check(scene: Scene, attention: WindowAttention, grown: int, window: int) -> None:
    q, count = scene.queries(), len(scene.lens)
    expected, _ = scene.dense(q[:count], grown, window)
    out = attention.run(q, *scene.caches)[:count]
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [1, 2, 32, 33, 128, 1000])
@pytest.mark.parametrize("seed", range(8))
def test_each_token_of_a_window_is_read_once(window: int, seed: int, chunked: bool) -> None:
    scene = Scene(seed, has_map=seed % 2 == 1, chunked=chunked)
    options: dict[str, Any] = {"window": window, "chunked": chunked, "slot_map": scene.map}
    attention = WindowAttention(HEADS, KV_HEADS, DIM, growth_tokens=20, **options, **OPTIONS)
    more: dict[str, Any] = ({"sinks": torch.randn(HEADS)}, {"logit_cap": 5.0}, {})[seed % 3]
    count = len(scene.lens)
    for grown in range(0, 90, 3):
        left, built = attention.steps_left(), attention.stats.plans_built
        batch, tensors = scene.step(grown)
        tensors["req_pool_indices"][count:] = len(scene.table)  # padding needs no row
        attention.plan(batch, **tensors)
        assert attention.stats.plans_built == built or left < 3
        slots = [Counter(row.tolist()) for row in attention.slots()[:count]]
        assert slots == scene.windows(grown, window)
        q = scene.queries()
        out, lse = attention.run(q, *scene.caches, return_lse=True, **more)
        expected_out, expected_lse = scene.dense(q[:count], grown, window, **more)
        torch.testing.assert_close(out[:count].double(), expected_out, atol=2e-5, rtol=0)
        torch.testing.assert_close(lse[:count].double(), expected_lse, atol=2e-5, rtol=0)
    assert attention.stats.plans_reused > 0 or (chunked and window < 3)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [32, 128])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_serves_as_many_steps_as_it_says(window: int, seed: int, chunked: bool) -> None:
    """The steps only rewrite the table, as in a captured graph, until the plan expires."""
    scene = Scene(seed, chunked=chunked)
    scene.table = scene.table[:, : int(scene.lens.max()) + 16]
    attention = WindowAttention(HEADS, KV_HEADS, DIM, window=window, chunked=chunked, **OPTIONS)
    batch, tensors = scene.step(0)
    attention.plan(batch, **tensors)
    count, steps = len(scene.lens), min(attention.steps_left(), 150)
    if chunked:
        left = int(min(-scene.lens % window))
        assert min(left, 32) <= steps <= left
    else:
        assert steps >= min(window // 8, 16)
    for grown in range(1, steps + (0 if chunked else AHEAD) + 1):
        tensors["seq_lens"].add_(1)
        attention.refill()
        assert [Counter(row.tolist()) for row in attention.slots()[:count]] == scene.windows(
            grown, window
        )
        if grown <= steps:
            continue
        attention._executor.reuse_plan(attention._step)
        if scene.lens.max() + grown <= scene.table.shape[1]:  # the device is ahead of the host
            check(scene, attention, grown, window)
            continue
        with pytest.raises(ValueError, match=r"at most \d+: request \d+ has \d+, and \d+ on the h"):
            attention.run(scene.queries(), *scene.caches)


def test_what_chunks_share_is_read_once() -> None:
    """Requests in the same chunk read the part of the prefix in this chunk once."""
    for prefix, own, shared in ((4096, 100, 4096), (8192, 100, 0), (10_000, 100, 1808)):
        scene = prefix_scene([own] * 32, prefix)
        attention = WindowAttention(16, 8, 64, window=8192, chunked=True, **OPTIONS)
        batch, tensors = scene.step(0)
        attention.plan(batch, **tensors)
        assert attention.step_tokens.query_centric == 32 * (shared + own)
        assert attention.step_tokens.planned == shared + 32 * own


def test_what_windows_share_is_read_once() -> None:
    """32 requests have a quarter of the window of their own, and share the rest."""
    scene = prefix_scene([256] * 32)
    attention = WindowAttention(16, 8, 64, window=1024, **OPTIONS)
    batch, tensors = scene.step(0)
    attention.plan(batch, **tensors)
    own, cut = 256, 64 + AHEAD
    assert attention.step_tokens.query_centric == 32 * 1024
    assert attention.step_tokens.planned == 1024 - own - cut + 32 * (own + cut)
    assert attention.steps_left() == 64


def test_outgrown_windows_keep_their_plan() -> None:
    scene = prefix_scene([1500, 2000, 5000])
    attention = WindowAttention(16, 8, 64, window=cast(int, np.int64(1024)), **OPTIONS)
    for grown in range(0, 300, 50):
        batch, tensors = scene.step(grown)
        attention.plan(batch, **tensors)
        assert attention.step_tokens.planned == 3 * 1024
    assert attention.stats.plans_built == 1
    assert attention.steps_left() == scene.table.shape[1] - int(scene.lens.max()) - 250


def test_tails_of_other_lengths_have_other_cuts() -> None:
    """Two classes of rows together read less than one cut after the longest tail."""
    scene = prefix_scene([10] * 16 + [900] * 16)
    attention = WindowAttention(16, 8, 64, window=1024, **OPTIONS)
    batch, tensors = scene.step(0)
    attention.plan(batch, **tensors)
    cut = 64 + AHEAD
    assert attention.step_tokens.planned == sum(
        1024 - own - cut + 16 * (own + cut) for own in (10, 900)
    )


def test_a_batch_within_its_windows_is_planned_as_ever() -> None:
    scene = Scene(3)
    windows = WindowAttention(HEADS, KV_HEADS, DIM, window=10_000, **OPTIONS)
    plain = PackAttention(HEADS, KV_HEADS, DIM, **OPTIONS)
    batch, tensors = scene.step(0)
    plan_together([windows, plain], batch, **tensors)
    assert windows.step_tokens == plain.step_tokens


@pytest.mark.parametrize("seed", range(4))
def test_a_step_is_checked_and_counted_once_for_plans_of_two_kinds(seed: int) -> None:
    scene = Scene(seed)
    windows = WindowAttention(HEADS, KV_HEADS, DIM, window=32, **OPTIONS)
    second, alone = (PackAttention(HEADS, KV_HEADS, DIM, growth_tokens=20, **OPTIONS) for _ in "ab")
    for grown in range(0, 90, 3):
        batch, tensors = scene.step(grown)
        _, plan = plan_together([windows, second], batch, **tensors)
        expected = alone.plan(batch, **tensors)
        assert plan.describe() == expected.describe()
        assert second.step_tokens == alone.step_tokens
        assert second.stats.causes == alone.stats.causes
        assert second.steps_left() == alone.steps_left()
        q = scene.queries()
        assert second.run(q, *scene.caches).equal(alone.run(q, *scene.caches))
    assert second.stats.plans_reused > second.stats.plans_built > 1
    assert windows.stats == PlanStats()


def test_slots_that_move_are_read_again_without_a_key() -> None:
    scene = prefix_scene([20, 30], prefix=100)
    attention = WindowAttention(HEADS, KV_HEADS, DIM, window=64, **OPTIONS)
    scene.caches = [torch.randn(scene.table.numel(), KV_HEADS, DIM) for _ in range(2)]
    for _ in range(2):
        batch, tensors = scene.step(0, key=None)
        attention.plan(batch, **tensors)
        check(scene, attention, 0, 64)
        scene.table[:, :100] = scene.table[:, :100].flip(1)
    assert attention.stats.plans_built == 1


def test_siblings_take_turns_and_read_their_rows_again() -> None:
    scenes = [prefix_scene([20, 30, 40], 100), prefix_scene([3, 60, 7], 80)]
    for scene in scenes:
        scene.caches = [torch.randn(scene.table.numel(), KV_HEADS, DIM) for _ in range(2)]
    first = WindowAttention(HEADS, KV_HEADS, DIM, window=64, max_requests=4, **OPTIONS)
    pairs = [*zip(scenes, [first, first.sharing_buffers()], strict=True)]
    for grown in range(5):
        for scene, attention in pairs:
            batch, tensors = scene.step(grown)
            attention.plan(batch, **tensors)
            if grown < 4:
                check(scene, attention, grown, 64)
    for _ in range(2):
        for scene, attention in pairs:
            check(scene, attention, 4, 64)


@pytest.mark.parametrize("integer", [int, np.int8])
def test_a_reservation_holds_what_classes_read_again(integer: Any) -> None:
    """Each class of rows reads the prefix; all classes together may exceed the pool."""
    rows, window = 64, 1024
    reserved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for_requests = BufferSizes.for_requests

        def note(rows: int, slots: int, *rest: Any, **options: Any) -> BufferSizes:
            reserved.append(slots)
            return for_requests(rows, slots, *rest, **options)

        patch.setattr(BufferSizes, "for_requests", note)
        attention = WindowAttention(
            16, 1, 64, window=window, max_requests=integer(rows), max_shared_slots=1, **OPTIONS
        )
    scene = prefix_scene([10] * rows, prefix=2000)
    batch, tensors = scene.step(0)
    attention.plan(batch, **tensors)
    needed = BufferSizes.needed_by(attention._scheduler).num_shared_slots
    in_pool = 2000 + 10 * rows
    assert 2 * in_pool < needed <= reserved[0] == rows * window


def test_bad_options_and_steps() -> None:
    for bad in (0, 2**20 + 1):
        with pytest.raises(ValueError, match=f"must be 1 to 1048576, because .* got {bad};"):
            WindowAttention(HEADS, KV_HEADS, DIM, window=bad, **OPTIONS)
    with pytest.raises(ValueError, match="batch_invariant must be False with a window"):
        WindowAttention(HEADS, KV_HEADS, DIM, window=8, batch_invariant=True, **OPTIONS)
    with pytest.raises(ValueError, match="max_requests must be at least 1, got -1"):
        WindowAttention(HEADS, KV_HEADS, DIM, window=8, max_requests=-1, **OPTIONS)
    scene = prefix_scene([1, 2], 20)
    attention = WindowAttention(HEADS, KV_HEADS, DIM, window=8, max_requests=1, **OPTIONS)
    batch, tensors = scene.step(0)
    with pytest.raises(ValueError, match="req_to_token's width 10, got 22"):
        attention.plan(batch, **tensors | {"req_to_token": scene.table[:, :10].contiguous()})
    with pytest.raises(TypeError, match="chunked must be True or False, got 'yes'"):
        WindowAttention(HEADS, KV_HEADS, DIM, window=4, chunked="yes", **OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ahead must be 0 with chunks, got 4"):
        WindowAttention(HEADS, KV_HEADS, DIM, window=8, chunked=True, ahead=4, **OPTIONS)
    with pytest.raises(ValueError, match="call plan"):
        attention.advance(tensors["seq_lens"], 1)
    assert attention.steps_left() == 0
    with pytest.raises(PlanOverflowError, match=r"2 cuts; reserved are .* 1 cuts"):
        attention.plan(batch, **tensors)
    slots = int(scene.table[0, 20])  # request 0 reads a slot that the map lacks
    mapped = OPTIONS | {"window": 8, "slot_map": torch.arange(slots)}
    with pytest.raises(ValueError, match=rf"hold slots of slot_map, 0 to {slots - 1}, got \d"):
        WindowAttention(HEADS, KV_HEADS, DIM, **mapped).plan(batch, **tensors)
    attention = WindowAttention(HEADS, KV_HEADS, DIM, window=64, max_requests=2, **OPTIONS)
    attention.plan(batch, **tensors)
    most = attention.steps_left() + AHEAD
    for more, message in ((-1, "0 has 20, and 21 on"), (most + 2, f"{most} .* got {most + 1};")):
        tensors["seq_lens"] += more
        attention.refill()
        with pytest.raises(ValueError, match=message):
            attention.run(scene.queries(), *scene.caches)
