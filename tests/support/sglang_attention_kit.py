"""SGLang's attention kit, `sglang.test.kits.attention_unittest`, with pat over its backends.

The kit makes a model runner with one layer, builds a backend by its name in SGLang's registry, and
compares the layer's output with attention in torch. These functions add pat to that backend.
"""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.test.kits.attention_unittest.attention_methods.dense_attention import (
    DenseAttentionCase,
    make_dense_cases,
    make_swa_no_prefix_input_config_cases,
    make_swa_prefix_input_config_cases,
)

from sglang_pat import PackAttention
from sglang_pat.sglang import attach
from sglang_pat.sglang.attach import with_pat
from sglang_pat.sglang.speculative import attach as speculative_attach
from sglang_pat.sglang.speculative.attach import attach_draft_extend, attach_draft_steps
from sglang_pat.sglang.speculative.planners import VerifyPlanner
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.layer_rules import layers_of_runner
from sglang_pat.sglang.start.server_options import Drafts

# The kit's window size of layers without a window.
NO_WINDOW = -1


class Decoded:
    """Counts the layers that pat decodes."""

    def __init__(self) -> None:
        self.layers = 0

    def count(self, patch: pytest.MonkeyPatch) -> None:
        """Count from now on."""
        run = PackAttention.run

        def counted(attention: PackAttention, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.layers += 1
            return run(attention, *args, **kwargs)

        patch.setattr(PackAttention, "run", counted)


def _alone() -> Any:
    """Return a parallel group of one rank. FlashInfer needs it; only some kit modules set it."""
    return get_parallel().override(attn_cp_size=1, attn_cp_rank=0)


@contextlib.contextmanager
def pat_over(
    name: str, *, head_dim: int, drafts: tuple[int, bool] | None = None
) -> Iterator[Decoded]:
    """Add pat to SGLang's backend `name` in the kit's runners.

    drafts: number of draft tokens per request in a verify step, and whether they are a chain; None:
    SGLang's backend runs verify steps.
    """
    decoded = Decoded()
    build = ATTENTION_BACKENDS[name]

    def build_with_pat(runner: Any) -> Any:
        # In 0.5.17 the kit declares windows to be chunks, and fa3 treats them so.
        runner.model_config.is_local_attention_model = False
        # The kit makes the layer after the backend, and adds it to no model.
        runner.model = torch.nn.ModuleList([_layer_of(runner, head_dim)])
        return with_pat(build(runner), name, runner)

    with pytest.MonkeyPatch.context() as patch, _alone():
        patch.setitem(ATTENTION_BACKENDS, name, build_with_pat)
        decoded.count(patch)
        _verify(patch, drafts)
        yield decoded


@contextlib.contextmanager
def drafting_by_pat(*, head_dim: int, eager: bool) -> Iterator[Decoded]:
    """Add pat to the graph of the kit's draft runner, and if `eager`, to the eager round."""
    decoded = Decoded()
    build = DraftBackendFactory.create_decode_backend
    built: list[Any] = []

    def build_with_pat(factory: Any) -> Any:
        steps = build(factory)
        built.append(steps)
        if eager or len(built) == 2:
            runner = factory.draft_model_runner
            runner.model_config.is_local_attention_model = False
            model, runner.model = runner.model, torch.nn.ModuleList([_layer_of(runner, head_dim)])
            attach_draft_steps(steps, runner, SimpleNamespace(report=lambda drafting: None))
            runner.model = model
        return steps

    with pytest.MonkeyPatch.context() as patch, _alone():
        patch.setattr(DraftBackendFactory, "create_decode_backend", build_with_pat)
        decoded.count(patch)
        yield decoded


@contextlib.contextmanager
def comparing_scores() -> Iterator[None]:
    """Let the kit compare the scores of branches, by which SGLang chooses draft tokens.

    With 4 branches, some scores differ by less than the rounding of 16-bit floats, so that two of
    the tokens that the kit compares would swap.
    """

    def scores_of(scores: list[torch.Tensor], *_: Any) -> tuple[torch.Tensor, ...]:
        logs = [each.flatten(1).log().sort(1).values for each in scores]
        # Subtract the mean, since the kit's tolerance includes 3% of a value.
        found = torch.cat([each - each.mean(1, keepdim=True) for each in logs], 1)
        return found, found, found  # in place of parents, indices and tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle_worker_v2, "organize_draft_results", scores_of)
        yield


@contextlib.contextmanager
def extending_by_pat(
    *, head_dim: int, drafts: int, requests: int, eager: bool
) -> Iterator[Decoded]:
    """Add pat to the graph of the kit's runner for draft-extend steps.

    drafts: tokens per request. requests: size of the graph. eager: also add pat to the step without
    a graph, with which the kit compares the graph.
    """
    decoded = Decoded()
    build = DraftBackendFactory.create_draft_extend_backend
    built: list[Any] = []

    def build_with_pat(factory: Any) -> Any:
        backend, runner = build(factory), factory.draft_model_runner
        built.append(backend)
        if eager or len(built) == 2:
            runner.model_config.is_local_attention_model = False
            model = getattr(runner, "model", None)
            runner.model = torch.nn.ModuleList([_layer_of(runner, head_dim)])
            layer_support = layers_of_runner(runner, runner.server_args.attention_backend)
            planner = VerifyPlanner(
                runner, Environment.read(), layer_support, speculative_attach.verify_steps(runner)
            )
            planner.reserve(requests)
            attach_draft_extend(backend, runner, planner)
            runner.model = model
        return backend

    with pytest.MonkeyPatch.context() as patch, _alone():
        patch.setattr(DraftBackendFactory, "create_draft_extend_backend", build_with_pat)
        _verify(patch, (drafts, True))
        decoded.count(patch)
        yield decoded


def _verify(patch: pytest.MonkeyPatch, drafts: tuple[int, bool] | None) -> None:
    """Add the server arguments that verify steps need. drafts: see `pat_over`."""
    made = None if drafts is None else Drafts((drafts[0],), drafts[1])
    patch.setattr(attach, "drafts_of", lambda arguments: made)
    patch.setattr(speculative_attach, "drafts_of", lambda arguments: made)
    patch.setattr(speculative_attach, "drafts_now", lambda arguments: made and made.counts[0])


def _layer_of(runner: Any, head_dim: int) -> RadixAttention:
    config = runner.model_config
    window = config.sliding_window_size
    return RadixAttention(
        num_heads=config.num_attention_heads,
        head_dim=head_dim,
        scaling=head_dim**-0.5,
        num_kv_heads=config.num_key_value_heads,
        layer_id=0,
        sliding_window_size=NO_WINDOW if window is None else window,
    )


def cases_of(backend: str) -> tuple[DenseAttentionCase, ...]:
    """Return cases of dense attention; one decodes in a layer with a window."""
    windowed = replace(
        draft_case(backend, page_size=16),
        name="swa_decode_window_edges",
        num_kv_heads=4,
        prefix_lens=(3, 4, 9),
        sliding_window_size=4,
    )
    return (
        *make_dense_cases(backend),
        *make_swa_no_prefix_input_config_cases(backend),
        *make_swa_prefix_input_config_cases(backend),
        windowed,
    )


# Kinds of drafts and their topk. Drafts branch if topk > 1; n-gram drafts may always branch.
VERIFIED = [
    ("eagle", 1),
    ("frozen_kv_mtp", 1),
    ("dflash", 1),
    ("ngram", 1),
    ("eagle", 2),
    ("frozen_kv_mtp", 2),
    ("ngram", 2),
]


def verify_by_pat(
    case: DenseAttentionCase,
    kind: str,
    topk: int,
    *,
    dtype: torch.dtype,
    device: str = "cuda",
    in_graph: bool = False,
) -> None:
    """Run the kit's verify step with drafts of a kind of VERIFIED on pat.

    in_graph: run the step eagerly, then prepared for a graph's capture and its padded replay. The
    kit then writes prefixes in order although it has shuffled the pages, so each request must fit
    into one page.
    """
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as runner,
    )

    run = runner.run_dense_spec_verify_case
    if in_graph:
        run = runner.run_dense_spec_verify_cuda_graph_case
    drafts = (case.extend_lens[0], topk == 1 and kind != "ngram")
    with pat_over(case.backend, head_dim=64, drafts=drafts) as decoded:
        run(KitTestCase(), case, topk=topk, spec_kind=kind, head_dim=64, dtype=dtype, device=device)
    assert decoded.layers == (3 if in_graph else 1)


def draft_case(backend: str, page_size: int = 1) -> DenseAttentionCase:
    """Return a step in which three requests draft."""
    return DenseAttentionCase(
        name="draft",
        backend=backend,
        forward_mode=ForwardMode.DECODE,
        num_heads=4,
        num_kv_heads=2,
        page_size=page_size,
        prefix_lens=(5, 9, 11),
    )


def verify_case(backend: str, page_size: int = 1) -> DenseAttentionCase:
    """Return a step that verifies three drafts of each of two requests."""
    return replace(
        draft_case(backend, page_size),
        name="verify",
        forward_mode=ForwardMode.TARGET_VERIFY,
        prefix_lens=(5, 9),
        extend_lens=(3, 3),
    )


def extend_case(backend: str, page_size: int = 1) -> DenseAttentionCase:
    """Return a draft-extend step of three requests."""
    return replace(
        draft_case(backend, page_size),
        name="extend",
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        extend_lens=(3, 3, 3),
    )


def is_decoded_by_pat(case: DenseAttentionCase) -> bool:
    return bool(case.forward_mode.is_decode())


class KitTestCase(unittest.TestCase):
    """A test case that fails when the kit skips, since the tests name only existing backends."""

    def skipTest(self, reason: str) -> None:
        raise AssertionError(reason)
