"""Verify steps of speculative decoding (`scene`)."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import numpy as np
import pytest
import torch
from fakes.backends import (
    HEAD_DIM,
    QO_HEADS,
    config,
    decode_batch,
    drafts_to_verify,
    layers,
    mlp_padded,
    pat_backend,
    runner,
    server_arguments,
)
from scene import BRANCHES, GRAPH, ROWS, Scene, chain, grown
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang_trees import TREE_KINDS, late_lengths, place

from sglang_pat.reasons import StepReason
from sglang_pat.sglang.backend import PatMixin
from sglang_pat.sglang.speculative.rows import MAX_COMMITTED_TAIL, RowShape
from sglang_pat.sglang.speculative.tree_attention import TreeKv, square_masks
from sglang_pat.sglang.start import layer_rules
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER
from sglang_pat.support import Unsupported

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

DRAFTS = 3
CHAIN = chain(DRAFTS)
# Algorithm -> mask of the draft tokens that each draft token reads.
READS = {"EAGLE3": CHAIN, "NGRAM": BRANCHES}
both_algorithms = pytest.mark.parametrize("algorithm", READS)


def verifying(algorithm: str = "EAGLE3", kind: str = TREE_KINDS[0], **more: Any) -> Scene:
    return Scene(kind, drafts=DRAFTS, speculative_algorithm=algorithm, **more)


def mask_of(*reads: torch.Tensor) -> torch.Tensor:
    """Return SGLang's mask of two requests over their draft tokens only."""
    return torch.cat([each.flatten() for each in reads * (2 // len(reads))])


@pytest.fixture(params=TREE_KINDS)
def scene(request: pytest.FixtureRequest) -> Scene:
    """A scene that verifies chains."""
    return verifying(kind=request.param)


@pytest.fixture
def branching() -> Scene:
    """A scene that verifies trees."""
    return verifying("NGRAM")


def counts(scene: Scene) -> dict[str, int]:
    """Return the counters that planned and reused steps have in common."""
    counters = scene.counters
    tokens = {name: number for name, number in counters.items() if "tokens" in name}
    return tokens | counters["verify"]


def test_branches_do_not_read_each_other(branching: Scene) -> None:
    lens = [25, 31]
    for graph, reads in ((2, BRANCHES), (2, CHAIN), (4, BRANCHES), (0, BRANCHES)):
        lens = grown(lens, [2, 2])
        view = branching.served.step(lens, graph, mask=mask_of(reads))
        branching.served.assert_exact(view, lens, reads)
    assert branching.served.plans.main.stats.plans_reused == 0, "an eager step has plans of its own"


def test_plans_are_reused_while_requests_grow_by_what_is_accepted(scene: Scene) -> None:
    lens = [25, 31]
    for accepted in ([0, 0], [1, 3], [3, 1], [2, 2]):
        lens = grown(lens, accepted)
        scene.served.step(lens, 2)
    plans = scene.served.plans
    assert (plans.main.stats.plans_built, plans.main.stats.plans_reused) == (1, 3)
    # All rows together read the prefix once, and each request's private tokens once.
    assert plans.main.step_tokens.planned < 0.5 * plans.main.step_tokens.query_centric
    assert scene.counters["verify"] == {"steps": 4, "rows": 4 * 2 * DRAFTS}


# --- padding ---


@pytest.mark.parametrize("more_rows", range(1, 8))
@pytest.mark.parametrize("knows", ["lengths", "no lengths", "no tree"])
@both_algorithms
def test_rows_that_mlp_synchronisation_adds_are_padding(
    algorithm: str, knows: str, more_rows: int
) -> None:
    """Padding follows the requests' rows: whole requests, which are planned, and a rest."""
    scene, reads = verifying(algorithm), READS[algorithm]
    if knows == "no tree":
        scene.scheduled.tree_cache = SimpleNamespace()
    shown: dict[str, Any] = {"mask": mask_of(reads)}
    has_lengths = knows == "lengths" or algorithm == "NGRAM"
    late = {} if has_lengths else {"seq_lens_cpu": None}
    for lens in late_lengths(scene.reqs):
        view = scene.served.padded(lens, more_rows, **shown, **late)
        scene.served.prepare(view)
        scene.served.assert_exact(view, lens, reads)
        assert scene.served.num_rows(view) == 2 * DRAFTS + more_rows
        known = 2 if algorithm == "EAGLE3" else 2 + more_rows // DRAFTS
        scene.served.assert_padding_is_zero(view, known * DRAFTS)
    assert counts(scene)["rows"] == 4 * 2 * DRAFTS  # without padding
    scene.served.assert_exact(scene.served.step(lens, **shown), lens, reads)


@pytest.mark.parametrize("more_rows", range(1, 8))
@both_algorithms
def test_rows_behind_those_of_a_graph_are_padding(algorithm: str, more_rows: int) -> None:
    """Test graphs of as many and of more requests, in planned and reused steps."""
    scene, reads = verifying(algorithm, is_checked=False), READS[algorithm]
    graph = 2 + more_rows // DRAFTS
    scene.served.capture(graph)
    for i, lens in enumerate(([25, 31], [26, 34], [29, 35])):
        view = scene.served.step(lens, graph, mask=mask_of(reads))
        assert scene.served.num_repeated == i
        view.input_ids = torch.zeros(2 * DRAFTS + more_rows)
        scene.served.assert_exact(view, lens, reads)


@pytest.mark.parametrize("num_tokens", range(8))
@both_algorithms
def test_an_idle_rank_that_verifies_padding(algorithm: str, num_tokens: int) -> None:
    """SGLang gives such steps to idle ranks of hybrid models, before and after real ones."""
    scene, mask = verifying(algorithm, is_checked=False), mask_of(READS[algorithm])
    for lens in ([25, 31], [26, 33]):
        before = counts(scene), dict(scene.counters["steps_without_sharing"])
        scene.leave()
        idle = decode_batch([], [], [], spec_info=drafts_to_verify(DRAFTS, mask[:0]))
        idle.forward_mode = ForwardMode.IDLE
        padded = mlp_padded(idle, scene.served.backend, num_tokens, DRAFTS)
        padded._original_forward_mode = ForwardMode.IDLE
        padded.forward_mode = ForwardMode.TARGET_VERIFY
        scene.served.prepare(padded)
        _, out = scene.served.attend(padded)
        assert len(out) == num_tokens
        assert out.isfinite().all()
        assert algorithm == "NGRAM" or not out.any()
        assert (counts(scene), scene.counters["steps_without_sharing"]) == before
        view = scene.served.step(lens, mask=mask)
        scene.served.assert_exact(view, lens, READS[algorithm])


def test_a_step_that_lacks_requests_is_refused(scene: Scene) -> None:
    view = scene.served.step([25, 31])
    view.input_ids, view.out_cache_loc = torch.zeros(DRAFTS), view.out_cache_loc[:DRAFTS]
    with pytest.raises(ValueError, match=r"q must have shape \[6, 4, 64\], got \[3, 4, 64\]"):
        scene.served.attend(view)


# --- steps that need a new plan ---


@both_algorithms
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_step_of_another_kind_is_no_repetition(algorithm: str, is_checked: bool) -> None:
    scene = verifying(algorithm, is_checked=is_checked)
    decoding, reads = scene.decoding(), READS[algorithm]
    scene.served.capture(2)
    # Both graphs have the same number of requests, or of rows.
    graph = 2 * DRAFTS if is_checked else 2
    for length in (25, 26, 27):
        lens = [length, length + 6]
        decoding.assert_exact(decoding.step(lens, graph), lens)
        view = scene.served.step(lens, 2, mask=mask_of(reads))
        scene.served.assert_exact(view, lens, reads)
    assert scene.served.num_repeated == 0


@pytest.mark.parametrize("is_captured_anew", [True, False])
@pytest.mark.parametrize("kind", TREE_KINDS)
def test_graphs_that_do_not_write_their_rows_are_never_repeated(
    is_captured_anew: bool, kind: str
) -> None:
    """Some runners capture full masks without first asking the backend, or capture again later."""
    scene = verifying(kind=kind, is_checked=False)
    if is_captured_anew:
        scene.served.capture(2)
        scene.served.reserve()
    for lens in ([25, 31], [26, 33], [29, 34]):
        view = scene.served.view(lens, 2)
        scene.served.prepare(view, writes=False)
        scene.served.assert_exact(view, lens)
    assert scene.served.num_repeated == 0


def test_what_has_long_been_committed_is_read_once_again(scene: Scene) -> None:
    lens = [25, 31]
    scene.served.step(lens, 2)
    for _ in range(2):
        lens = grown(lens, [MAX_COMMITTED_TAIL, 1])
        scene.served.assert_exact(scene.served.step(lens, 2), lens)
    # The plan reads 32 accepted tokens per row, but shares 64.
    stats = scene.served.plans.main.stats
    assert (stats.plans_built, stats.plans_reused) == (2, 1)
    paths = inside.paths(scene.served.backend)
    assert {path[-1][2] for path in paths} == {*lens}


# --- masks of trees ---


def test_masks_of_trees_are_computed_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is planned for a log line computes them once, too."""
    scene = verifying("NGRAM", is_checked=False)
    inside.log_every(scene.served.backend, 3)
    scene.served.capture(2)
    taken: list[int] = []
    update = TreeKv.update
    monkeypatch.setattr(
        TreeKv, "update", lambda self, *args, **more: taken.append(1) or update(self, *args, **more)
    )
    masks = []
    for lens in ([25, 31], [26, 33], [29, 34], [30, 35], [31, 36], [32, 37], [33, 38]):
        taken.clear()
        scene.served.step(lens, 2, mask=mask_of(BRANCHES, CHAIN))
        masks.append(len(taken))
    assert masks == [1] * 7
    assert scene.counters["steps_planned"][StepReason.DUE] == 2


@pytest.mark.parametrize("on_cpu", [False, True])
def test_masks_over_the_drafts_alone(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, trees = torch.tensor([2, 4]), torch.stack([BRANCHES, CHAIN])
    more = torch.zeros(7 if on_cpu else 0, dtype=torch.bool)  # unused end of a buffer
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
    assert torch.equal(square_masks(torch.cat([trees.flatten(), more]), lens, DRAFTS), trees)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the module of SGLang's n-gram worker."""
    module = SimpleNamespace(USE_FULL_MASK=True)
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.ngram_worker", module)
    monkeypatch.setattr("sglang.srt.speculative.ngram_worker", module, raising=False)
    return module


@pytest.mark.parametrize(
    ("arguments", "changes", "is_full"),
    [
        ({"speculative_algorithm": "NGRAM"}, {}, False),
        ({"speculative_algorithm": "EAGLE"}, {}, True),
        ({"speculative_algorithm": "NGRAM"}, {"device": "cpu"}, True),
        # A fallback layer's default backend may read full masks.
        ({"speculative_algorithm": "NGRAM"}, {"model": layers(sliding_window_size=128)}, True),
        ({"speculative_algorithm": "NGRAM", "enable_watermark": True}, {}, True),
    ],
)
def test_full_masks_are_made_for_other_readers_alone(
    arguments: dict[str, Any],
    changes: dict[str, Any],
    is_full: bool,
    worker: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_rules, "dtypes_reason", lambda *_: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    made = server_arguments(speculative_num_draft_tokens=DRAFTS, **arguments)
    backend = pat_backend(runner(server_args=made, **({"device": "cuda"} | changes)))
    assert (backend._trees is None) is (arguments["speculative_algorithm"] != "NGRAM")
    assert worker.USE_FULL_MASK is is_full


def test_full_masks_are_made_for_a_model_that_pat_does_not_decode(worker: Any) -> None:
    """An earlier model of this process may have switched to the short masks."""
    worker.USE_FULL_MASK = False
    made = server_arguments(speculative_algorithm="NGRAM", speculative_num_draft_tokens=DRAFTS)
    backend = pat_backend(runner(server_args=made, model_config=config(is_encoder_decoder=True)))
    assert not isinstance(backend, PatMixin)
    assert worker.USE_FULL_MASK


def test_sglang_may_write_masks_over_the_drafts_alone(
    branching: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pat's buffer has the size of the largest graph. With a fallback layer there is none."""
    given = branching.served.backend.verify_mask
    assert given.mode is TreeMaskMode.QLEN_ONLY
    assert (given.fits(GRAPH), given.fits(GRAPH + 1)) == (True, False)
    assert len(given.buffer) == GRAPH * DRAFTS**2
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    lens = [25, 31]
    for graph, reads in ((2, BRANCHES), (4, CHAIN), (0, BRANCHES)):
        lens = grown(lens, [2, 2])
        given.buffer.fill_(True)
        given.buffer[: 2 * DRAFTS**2] = mask_of(reads)
        view = branching.served.step(lens, graph, mask=given.buffer)
        branching.served.assert_exact(view, lens, reads)
    fall_back(branching)
    assert branching.served.backend.verify_mask is None


@pytest.mark.parametrize("when", ["step", "buffer", "own", "padded", "warm-up", "capture"])
def test_full_masks_are_back_with_a_layer_that_is_delegated_late(
    when: str, worker: Any, branching: Scene
) -> None:
    """The default backend may read them, also in this step."""
    served, lens = branching.served, [25, 31]
    worker.USE_FULL_MASK = when in ("buffer", "own")  # own: the batch exceeds all graphs
    mask, is_known = mask_of(BRANCHES, CHAIN), when not in ("warm-up", "capture")
    if when == "buffer":
        buffer = served.backend.verify_mask.buffer
        buffer[: len(mask)] = mask
        mask = buffer
    elif not is_known:
        mask = torch.ones(100, dtype=torch.bool)
        branching.scheduled.reqs = []
    view = served.view(lens, 2 if when == "capture" else 0, mask)
    if when == "padded":
        view = mlp_padded(view, served.backend, 10, DRAFTS)
    if when == "capture":
        served.backend.init_forward_metadata_out_graph(view, in_capture=True)
    else:
        served.prepare(view)
    calls = served.backend.calls
    calls.clear()
    q = torch.zeros(10 if when == "padded" else 6, QO_HEADS * HEAD_DIM)
    served.backend.forward_extend(q, None, None, served.runner.model[0], view, rope=1)
    assert worker.USE_FULL_MASK
    assert calls[-1] == "extend"
    assert "out_graph" in calls[0]  # the default backend has been prepared
    assert 0 in served.planner.layer_support.fallback
    exact = full_mask(lens, [BRANCHES, CHAIN]) if is_known else mask
    assert torch.equal(view.spec_info.custom_mask, exact)


def full_mask(lens: list[int], trees: list[torch.Tensor]) -> torch.Tensor:
    """Return a mask in the format of SGLang's n-gram worker."""
    rows = [
        torch.cat([torch.ones(DRAFTS, length, dtype=torch.bool), tree], dim=1).flatten()
        for length, tree in zip(lens, trees, strict=True)
    ]
    return torch.cat(rows)


def test_masks_over_all_that_a_request_has(monkeypatch: pytest.MonkeyPatch) -> None:
    lens, trees = [2, 4], [BRANCHES, CHAIN]
    mask = full_mask(lens, trees)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert torch.equal(square_masks(mask, torch.tensor(lens), DRAFTS), torch.stack(trees))


# --- the default backend, and the order of calls ---


def fall_back(scene: Scene) -> None:
    """Let a layer fall back."""
    support = inside.layer_support(scene.served.backend)
    support.fall_back(0, Unsupported("attention", "of a test"))


@both_algorithms
def test_capture_verifies_requests_that_nobody_knows(algorithm: str) -> None:
    scene = verifying(algorithm)
    scene.scheduled.reqs = []
    view = scene.served.view([1, 1], 2, torch.zeros(0, dtype=torch.bool))
    scene.served.backend.init_forward_metadata_out_graph(view, in_capture=True)
    assert scene.served.attend(view)[1].isfinite().all()
    assert scene.counters["verify"]["steps"] == 0


def test_the_default_backend_prepares_no_verify_step(scene: Scene) -> None:
    # The default backend's graph tables exist, since SGLang writes drafts' masks into them.
    for graph in (2, 0):
        scene.served.step([25, 31], graph)
    assert scene.served.backend.calls == ["graphs of 4 rows"]


def test_a_step_of_a_plan_stream_is_prepared_once(scene: Scene) -> None:
    """With a fallback layer the default backend is called, which may refuse."""
    view, backend = scene.served.step([25, 31], 2), scene.served.backend
    backend.update_verify_buffers_to_fill_after_draft(view.spec_info, 2)
    scene.served.assert_exact(view, [25, 31])
    fall_back(scene)
    with pytest.raises(NotImplementedError):
        backend.update_verify_buffers_to_fill_after_draft(view.spec_info, 2)


def test_lengths_of_rows() -> None:
    lens = np.array([5, 0, 7], dtype=np.int32)
    assert RowShape.of_drafts(2, are_chains=True).lengths(lens).tolist() == [6, 7, 0, 0, 8, 9]
    assert RowShape.of_drafts(2, are_chains=False).lengths(lens).tolist() == [6, 6, 0, 0, 8, 8]


def test_a_batch_that_is_planned_before_its_forward_is_one_step(scene: Scene) -> None:
    """SGLang's graph runner loads a verify batch first, and runs it later."""
    graphs, scene.plans_ahead = SimpleNamespace(model_runner=scene.target), True
    seen: list[Any] = []
    for _ in range(2):
        batch = scene.served.view([25, 31])
        # A draft model's batch of the same requests does not move them.
        draft = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
        inside.batch_made(draft, scene.scheduled, SimpleNamespace(is_draft_worker=True))
        inside.load_batch(
            lambda runner, batch: seen.append(REQUEST_TRACKER.claim_step()), graphs, batch
        )
        inside.run_forward(lambda runner, batch: None, scene.target, batch)
    assert seen[0] is not None
    assert seen[0].reqs is seen[1].reqs
    assert place(seen[0].reqs[0]).req_pool_idx == ROWS[0]
