"""Rules for all kinds of steps: decode, verify, and draft-model steps (see `scene`)."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import inspect_backend as inside
import pytest
import torch
from fakes.backends import KVPool
from scene import BRANCHES, DefaultSteps, Scene, Steps, assert_left, grown
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnMultiStepDraftBackend
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang_trees import late_lengths

from sglang_pat.reasons import StepReason
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

DRAFTS, STEPS = 3, 3
NAMED = "speculative_draft_attention_backend"
NAMED_FLAG = "--speculative-draft-attention-backend"
WINDOW, WINDOW_FLAG = "speculative_draft_window_size", "--speculative-draft-window-size"


def served(algorithm: str | None, is_checked: bool) -> Steps:
    """Return the steps of a served model."""
    drafts = DRAFTS if algorithm else 0
    return Scene(drafts=drafts, is_checked=is_checked, speculative_algorithm=algorithm).served


def rounds(topk: int, is_checked: bool) -> Steps:
    """Return the decode steps of a draft model."""
    scene = Scene(drafts=STEPS + 2, is_checked=is_checked, speculative_eagle_topk=topk)
    steps = scene.rounds(STEPS)
    steps.reserve()
    return steps


def blocks(algorithm: str, is_checked: bool) -> Steps:
    """Return the steps of a block drafter."""
    scene = Scene(
        drafts=DRAFTS,
        is_checked=is_checked,
        speculative_algorithm=algorithm,
        speculative_draft_attention_backend="triton",  # resolved
        speculative_draft_window_size=None,
    )
    scene.arguments._sglang_pat_draft_backend = None
    return scene.blocks()


class Kind(NamedTuple):
    """A kind of step. shown: fields besides lengths. reads: mask of drafts, if not all."""

    make: Callable[[Any, bool], Steps]
    of: Any
    shown: dict[str, Any] = {}  # noqa: RUF012  # never written to
    reads: torch.Tensor | None = None

    def steps(self, *, is_checked: bool = False) -> Steps:
        """Return steps of this kind in a new scene, with graphs of 4 and of 2 requests."""
        steps = self.make(self.of, is_checked)
        for graph in (4, 2):
            steps.capture(graph)
        return steps


KINDS = {
    "decode": Kind(served, None),
    "chains": Kind(served, "EAGLE3"),
    "trees": Kind(served, "NGRAM", {"mask": BRANCHES.flatten().repeat(2)}, BRANCHES),
    "rounds": Kind(rounds, 1),
    "rounds with branches": Kind(rounds, 2),
    "blocks": Kind(blocks, "DFLASH", {"seq_lens_cpu": None}),
}
SPECULATING = {name: kind for name, kind in KINDS.items() if name != "decode"}


def counts(scene: Scene) -> Counter[str]:
    """Return the numbers of steps, rows and tokens, however the steps were planned."""
    found: Counter[str] = Counter()
    for name, counted in scene.counters.items():
        if name in ("verify", "draft", "draft_kv_tokens"):
            found.update(
                {f"{name} {what}": n for what, n in counted.items() if "plans" not in what}
            )
        elif name.startswith("kv_tokens"):
            found[name] = counted
    return found


@pytest.mark.parametrize("kind", SPECULATING.values(), ids=SPECULATING)
def test_steps_are_repeated_without_a_plan(kind: Kind) -> None:
    """Results and counters are those of planned steps. A request outgrows the plan in step four."""
    counted = []
    for is_checked in (True, False):
        steps, lens = kind.steps(is_checked=is_checked), [25, 31]
        before = counts(steps.scene)
        for accepted in ([0, 0], [1, 3], [3, 1], [1, 255], [2, 3]):
            lens = grown(lens, accepted)
            steps.scene.commit(lens)
            view = steps.step(lens, 2, **kind.shown)
            steps.assert_exact(view, lens, kind.reads)
        assert steps.num_repeated == (0 if is_checked else 3)
        counted.append(counts(steps.scene) - before)
    assert inside.reasons(steps.backend) == {StepReason.FIRST: 1, StepReason.LENGTHS: 1}
    assert counted[0] == counted[1]
    assert counted[0].total() > 0


OF_ALL = ("moved", "reset", "graph", "eager", "others")
OF_DRAFTS = ("shorter", "outgrown")  # not in decode steps, where requests grow by one token


@pytest.mark.parametrize(
    ("name", "what"),
    [(name, what) for name in KINDS for what in OF_ALL + OF_DRAFTS * (name in SPECULATING)],
)
def test_steps_that_are_no_repetition_are_planned(name: str, what: str) -> None:
    kind = KINDS[name]
    steps, lens, graph = kind.steps(), [25, 31], 2
    scene = steps.scene
    scene.commit(lens)
    for _ in range(2):
        steps.step(lens, 2, **kind.shown)
    assert steps.num_repeated == 1
    if what == "moved":
        scene.move()
    elif what == "reset":  # the cache is reset
        scene.table[:, :60] += 1
        REQUEST_TRACKER.invalidate_all()
    elif what == "graph":
        graph = 4
    elif what == "eager":
        steps.step(lens, **kind.shown)
    elif what == "shorter":  # only a moved request gets shorter
        lens = [22, 31]
    elif what == "outgrown":
        lens = [25, 290]
    elif what == "others":
        scene.scheduled.reqs = [scene.reqs[0], copy.copy(scene.reqs[1])]
    scene.commit(lens)
    view = steps.step(lens, graph, **kind.shown)
    assert steps.num_repeated == 1
    steps.assert_exact(view, lens, kind.reads)


@pytest.mark.parametrize("graph", [0, 2])
@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("kind", SPECULATING.values(), ids=SPECULATING)
def test_lengths_that_the_host_learns_late(kind: Kind, is_checked: bool, graph: int) -> None:
    """SGLang has processed results only up to the step before the last."""
    steps = kind.steps(is_checked=is_checked)
    assert not steps.backend.needs_cpu_seq_lens
    built = steps.planner.plan_counts()["plans_built"]
    for lens in late_lengths(steps.scene.reqs):
        view = steps.step(lens, graph, **kind.shown | {"seq_lens_cpu": None})
        steps.assert_exact(view, lens, kind.reads)
    assert steps.planner.plan_counts()["plans_built"] == built + 1
    assert steps.num_repeated == (3 if graph and not is_checked else 0)


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("kind", [*KINDS.values(), None], ids=[*KINDS, "extend"])
def test_a_request_that_stopped_takes_no_one_with_it(kind: Kind | None, is_repeated: bool) -> None:
    """SGLang notices a stop token one step late.

    A step still contains the row of a stopped request, while SGLang gives the row to the next
    prompt, here before the step runs. The plan reads the prefix through one of the rows.
    """
    steps = (kind or KINDS["chains"]).steps(is_checked=not is_repeated)
    shown = kind.shown if kind else {}
    for length in (25, 26) if is_repeated else (25,):
        lens = [length, length + 6]
        steps.scene.commit(lens)
        view = steps.step(lens, 2, **shown)
    assert steps.num_repeated == is_repeated
    reader = steps
    if kind is None:  # a draft-extend step uses the same plan
        reader = steps.scene.extends()
        view = reader.step(lens, 2)
    left, table = steps.scene.stop(steps)
    backwards = reversed(range(steps.num_steps))  # so that each step looks up its rows
    reads = kind.reads if kind else None
    reader.assert_exact(view, lens, reads, requests=[left], table=table, steps=backwards)


CLOSED = SimpleNamespace(init_forward_metadata=None)
IN_BF16 = {"token_to_kv_pool": KVPool(torch.bfloat16)}
IN_BF16 |= dict.fromkeys(("dtype", "kv_cache_dtype"), torch.bfloat16)
OF_NO_STEPS = SimpleNamespace(attn_backends=[])
OF_WINDOWS = SimpleNamespace(attn_backends=[object()], draft_window_size=64)  # over Triton


def test_a_window_of_drafts_that_trtllm_mha_ignores() -> None:
    """Its steps inherit the window from FlashInfer's, whose common_template() would apply it."""
    for name in ("", "_out_graph", "_in_graph"):
        method = vars(TRTLLMHAAttnMultiStepDraftBackend)[f"init_forward_metadata{name}"]
        assert "common_template" not in method.__code__.co_names
    steps = DefaultSteps(STEPS)
    steps.draft_window_size = 64
    Scene(drafts=STEPS + 2, attention_backend="trtllm_mha").rounds(steps)
    assert inside.server_info()["draft_model"]["pat_layers"] == 2


# The kind of steps, server options, changes of the runner or default backend, and the reason.
LEFT: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("rounds", {}, {"device": "npu"}, "device npu"),
    ("rounds", {NAMED: "triton"}, {}, f"{NAMED_FLAG} triton"),
    ("rounds", {}, {"draft_attention_backend": "fa3"}, f"{NAMED_FLAG} fa3"),
    ("rounds", {}, {"steps": OF_NO_STEPS}, "SimpleNamespace, which is closed"),
    ("rounds", {}, {"steps": SimpleNamespace(attn_backends=[object()])}, "object, which is closed"),
    ("rounds", {}, {"steps": OF_WINDOWS}, f"{WINDOW_FLAG} 64"),
    ("extends", {}, {"device": "npu"}, "device npu"),
    ("extends", {}, {"draft_attention_backend": "fa3"}, f"{NAMED_FLAG} fa3"),
    (
        "extends",
        {"enable_multi_layer_eagle": True},
        {"req_to_token_pool": HybridReqToTokenPool.__new__(HybridReqToTokenPool)},
        "--enable-multi-layer-eagle with states",
    ),
    ("extends", {}, {"default": CLOSED}, "SimpleNamespace, which is closed"),
    ("extends", {}, IN_BF16, "dtype of queries and KV cache torch.bfloat16 and torch.bfloat16"),
    ("blocks", {NAMED: "fa3"}, {}, f"{NAMED_FLAG} fa3"),
    ("blocks", {WINDOW: 64}, {"has_table": True}, f"{WINDOW_FLAG} 64"),
    ("blocks", {}, {"default": CLOSED}, "SimpleNamespace, which is closed"),
]


@pytest.mark.parametrize(("part", "arguments", "change", "reason"), LEFT)
def test_draft_models_that_are_left_to_the_default_backend(
    part: str,
    arguments: dict[str, Any],
    change: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sglang_pat")
    if part == "blocks":
        arguments = {"speculative_algorithm": "DFLASH"} | arguments
    scene = Scene(drafts=DRAFTS, **arguments)
    scene.arguments._sglang_pat_draft_backend = arguments.get(NAMED)
    steps = getattr(scene, part)(**change)
    assert not hasattr(steps.backend, "_pat")
    assert "draft" not in scene.counters
    assert "draft_extend" not in scene.counters
    key = "draft_extend" if part == "extends" else "draft_model"
    assert_left(key, reason)
    assert inside.server_info()[key]["default_backend"] in ("triton", "fa3")
    line = "draft model, reading what was accepted" if part == "extends" else "draft model"
    assert f"{line}: pat decodes nothing, " in caplog.text
    assert f" decodes all 2 layers: {reason}" in caplog.text
