"""The calls of SGLang's CUDA graph runner to the backend in plain decode steps, made by `scene`."""

from __future__ import annotations

from typing import Any

import inspect_backend as inside
import pytest
import torch
from fakes.backends import dense_rows
from scene import GRAPH, WIDTH, Scene
from sglang_trees import TREE_KINDS

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


@pytest.fixture(params=TREE_KINDS)
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param, drafts=0, is_checked=False)


def is_planned(scene: Scene, length: int, graph: int = GRAPH) -> bool:
    """Replay a step of requests of this length; return whether it was planned."""
    before = scene.served.num_repeated
    scene.served.step([length] * 2, graph)
    return scene.served.num_repeated == before


def test_the_fill_value_is_a_length_that_can_be_planned(scene: Scene) -> None:
    assert scene.served.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_capture_plans_rows_without_requests(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sglang_pat")
    inside.log_every(scene.served.backend, 1)
    for graph in (GRAPH, 2, 1):  # from large to small
        view = scene.served.capture(graph)
        scene.served.backend.on_after_cuda_graph_warmup()
        q, out = scene.served.attend(view)
        exact = dense_rows(q, scene.target.token_to_kv_pool, 0, [torch.tensor([0])] * graph)
        torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=2e-6)
    assert "Pat decode" not in caplog.text  # no decode steps


@pytest.mark.parametrize("late", [{}, {"seq_lens_cpu": None}], ids=["", "not on the host"])
def test_steps_of_requests_that_nobody_knows(scene: Scene, late: dict[str, Any]) -> None:
    scene.scheduled.reqs = []
    for _ in range(2):  # a planned step, then a reuse
        view = scene.served.step([3, 2], GRAPH, **late)
        scene.served.assert_exact(view, [3, 2])
        scene.served.assert_padding_is_zero(view, 2)
    assert inside.microbatch(scene.served.backend).captured.main.stats.plans_reused == 1


@pytest.mark.parametrize("more_rows", range(1, 8))
@pytest.mark.parametrize("is_captured", [False, True])
def test_requests_share_beside_any_padding(scene: Scene, is_captured: bool, more_rows: int) -> None:
    """The padding rows come from a graph or from MLP synchronisation."""
    scene.served.reserve(10)
    for lens in ([32, 32], [33, 33]):
        if is_captured:
            view = scene.served.step(lens, 2 + more_rows)
        else:
            view = scene.served.padded(lens, more_rows)
            scene.served.prepare(view)
        scene.served.assert_exact(view, lens)
        scene.served.assert_padding_is_zero(view, 2)


def test_graphs_of_all_sizes_and_eager_steps_take_turns(scene: Scene) -> None:
    for length, graph in ((22, 2), (23, 4), (24, 0), (25, 3), (26, 2)):
        lens = [length, length + 9]
        scene.served.assert_exact(scene.served.step(lens, graph), lens)


# --- steps that reuse the last plan ---


def test_the_same_requests_are_planned_once(scene: Scene) -> None:
    lengths = (WIDTH - 2, WIDTH - 1, WIDTH)
    assert [is_planned(scene, length) for length in lengths] == [True, False, False]
    view = scene.served.view([WIDTH] * 2, GRAPH)
    view.seq_lens += 1
    view.seq_lens_cpu += 1
    with pytest.raises(ValueError, match=f"at most req_to_token's width {WIDTH}, got {WIDTH + 1}"):
        scene.served.prepare(view)  # this step is planned


def test_what_was_not_planned_is_counted(scene: Scene) -> None:
    for length in (31, 32, 33):
        is_planned(scene, length)
    counted = scene.counters
    assert (counted["plans_built"], counted["plans_reused"]) == (1, 2)
    assert counted["kv_tokens_query_centric"] == 2 * (31 + 32 + 33)
    assert counted["kv_tokens_planned"] == 3 * 20 + 2 * (11 + 12 + 13)
    assert counted["planning_ns"]["unchanged"].total() == 2


def test_graphs_that_are_captured_anew_are_planned_and_forget_no_count(scene: Scene) -> None:
    # A weight update may flush the cache while it pauses running requests.
    assert is_planned(scene, 34)
    assert not is_planned(scene, 35)
    before = scene.counters
    scene.served.reserve()
    scene.served.capture(GRAPH)
    assert is_planned(scene, 36)
    now = scene.counters
    assert now["plans_built"] == before["plans_built"] + 2  # at the capture and in this step
    assert now["plans_reused"] == before["plans_reused"]


def test_a_step_in_which_the_log_wants_a_line_is_planned(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    inside.log_every(scene.served.backend, 3)
    with caplog.at_level("INFO"):
        planned = [is_planned(scene, length) for length in range(31, 38)]
    assert planned == [True, False, False, True, False, False, True]
    lines = [line for line in caplog.messages if line.startswith("Pat decode")]
    assert [line[:32] for line in lines] == ["Pat decode, #plan: 0, #reuse: 3,"] * 2


def test_in_debug_mode_every_step_is_planned_and_must_grow_by_one(scene: Scene) -> None:
    inside.check_steps(scene.served.backend)
    assert is_planned(scene, 36)
    assert is_planned(scene, 37)
    with pytest.raises(RuntimeError, match="the same requests had lengths"):
        is_planned(scene, 37)
