"""Block drafters and their verify steps (see `scene`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from scene import Blocks, Scene
from sglang_trees import TREE_KINDS, late_lengths

from sglang_pat.sglang.speculative.draft_requests import BLOCK_WORKERS, block_hook
from sglang_pat.sglang.start import argument_rewrite
from sglang_pat.sglang.start.hooks import check_hooks

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

BLOCK = 4


def scene_of(kind: str = TREE_KINDS[0], *, algorithm: str = "DFLASH") -> tuple[Scene, Blocks]:
    """Return a served model and its draft model."""
    scene = Scene(
        kind,
        drafts=BLOCK,
        speculative_algorithm=algorithm,
        speculative_draft_attention_backend="triton",  # resolved
        speculative_draft_window_size=None,
    )
    scene.arguments._sglang_pat_draft_backend = None
    return scene, scene.blocks()


def bounded(lens: list[int], graph: int, bound: int | None = BLOCK) -> dict[str, Any]:
    """Return lengths on the host that are too long by `bound`, or None."""
    lens = lens + [1] * max(graph - 2, 0)
    return {"seq_lens_cpu": None if bound is None else torch.tensor(lens) + bound}


@pytest.mark.parametrize("bound", [0, 3, 20, None])
@pytest.mark.parametrize("graph", [0, 2, 4])
@pytest.mark.parametrize("tree_kind", TREE_KINDS)
def test_each_token_of_a_block_reads_its_block(
    tree_kind: str, graph: int, bound: int | None
) -> None:
    """The host knows only late upper bounds of the lengths."""
    scene, blocks = scene_of(tree_kind)
    if graph:
        blocks.capture(graph)
    for lens in late_lengths(scene.reqs):
        view = blocks.step(lens, graph, **bounded(lens, graph, bound))
        blocks.assert_exact(view, lens)
    assert scene.counters["draft"]["rows"] == 4 * 2 * BLOCK
    builder = inside.microbatch(blocks.backend).builder
    assert sum(builder.steps_without_sharing.values()) == bool(graph), "the capture alone"
    assert builder.changes["join"] == 2 * BLOCK, "the requests stay the same"


@pytest.mark.parametrize("bound", [0, 3, 20, None])
@pytest.mark.parametrize("graph", [0, 2, 4])
@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_blocks_are_verified_as_chains(algorithm: str, graph: int, bound: int | None) -> None:
    """Lengths on the host may be late. Eager steps are planned before their forward."""
    scene, _ = scene_of(algorithm=algorithm)
    served, scene.plans_ahead = scene.served, True
    if graph:
        served.capture(graph)
    for lens in late_lengths(scene.reqs):
        view = served.view(lens, graph, **bounded(lens, graph, bound))
        if graph:
            graphs = SimpleNamespace(model_runner=scene.target)
            inside.load_batch(lambda _, batch: served.prepare(batch), graphs, view)
        else:
            served.prepare(view)
            # 0.5.23 calls the backend again when the batch runs.
            inside.run_forward(lambda _, batch: served.prepare(batch), scene.target, view)
        served.assert_exact(view, lens)
    assert scene.counters["verify"] == {"steps": 4, "rows": 4 * 2 * BLOCK}
    assert sum(scene.counters["steps_without_sharing"].values()) == bool(graph), "the capture alone"
    assert scene.counters["batch_changes"]["join"] == 2 * BLOCK, "the requests stay the same"


def test_a_graph_reads_a_block_where_it_was_captured() -> None:
    """The graph reads slots from SGLang's buffer and pat's memory at fixed addresses."""
    scene, blocks = scene_of()
    captured = blocks.capture(4)
    (step_type,) = blocks.planner.step_types
    before = [step_type.extra_kv_of(layer) for layer in blocks.runner.model]
    held = [apart.keys(captured, 4 * BLOCK) for apart in before]
    for lens in late_lengths(scene.reqs):
        blocks.step(lens, 4)
    for apart, (slots, biases) in zip(before, held, strict=True):
        now = apart.keys(captured, 4 * BLOCK)
        assert [each.data_ptr() for each in now] == [slots.data_ptr(), biases.data_ptr()]
        assert slots.data_ptr() == blocks.slots.data_ptr()
        assert biases.is_contiguous()


def test_outside_of_its_worker_a_draft_model_knows_no_requests() -> None:
    scene, blocks = scene_of()
    view = blocks.view([25, 31])
    blocks.backend.init_forward_metadata(view)
    blocks.assert_exact(view, [25, 31])
    scene.scheduled.reqs = []
    blocks.prepare(view)
    assert scene.counters["draft"]["steps"] == 0


def test_a_layer_that_is_passed_more_is_left_to_the_default_backend() -> None:
    scene, blocks = scene_of()
    scene.commit([25, 31])
    blocks.attend(blocks.step([25, 31]), rope=1)
    assert blocks.backend.calls[-1] == "extend"
    assert inside.server_info()["draft_model"]["default_layers"] == {"the argument rope": 1}


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_the_workers_are_hooked(algorithm: str) -> None:
    """The hooks fit the installed SGLang."""
    scene_of(algorithm=algorithm)
    check_hooks([block_hook(BLOCK_WORKERS[algorithm])])


def test_the_backend_that_was_named_for_the_draft_model_is_kept() -> None:
    """SGLang overwrites the named backend with the resolved one."""
    for named in (None, "fa3"):
        names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        arguments = SimpleNamespace(
            **dict.fromkeys(names), speculative_draft_attention_backend=named
        )
        arguments.attention_backend = "pat"
        argument_rewrite._substitute(arguments)
        assert argument_rewrite.named_draft_backend(arguments) == named
