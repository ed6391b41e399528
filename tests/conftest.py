"""Fixtures of all tests: SGLang without a CUDA driver, tiny models and their expected answers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from command_line import Answer, answer
from hypothesis import settings

from sglang_pat.sglang.cpu import enable_cpu_engine

if TYPE_CHECKING:
    from family_engines import FamilyEngines
    from sglang_engines import Expected, Workload

gc.disable()  # until all modules are imported: their objects are never freed
# Must run before any test module imports SGLang. Does nothing if there is a driver.
enable_cpu_engine()

# Random cases per property: few in CI, many with `HYPOTHESIS_PROFILE=nightly`.
settings.register_profile("default", max_examples=100, deadline=None)
settings.register_profile("nightly", max_examples=800, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests that start engines in one process, except those that name their own group.

    Each engine needs most of the machine. pytest-xdist gets the largest groups first and single
    tests last, so that its two processes end together.
    """
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("engine"))


def pytest_collection_finish() -> None:
    """Set up torch, which the process that distributes the tests does not import."""
    import torch

    # Another test process has the other core, and such small steps are faster without threads.
    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run a command: `cli("doctor", "--json", path)`."""
    return partial(answer, capsys)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    from sglang_engines import TINY

    return TINY.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def workload() -> Workload:
    from sglang_engines import Workload

    return Workload()


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model of the same shape with other weights."""
    from sglang_engines import TINY

    return replace(TINY, seed=23).write(tmp_path_factory.mktemp("other-model"))


@pytest.fixture(scope="session")
def expected_of_both(
    tiny_model: Path, other_model: Path, workload: Workload
) -> tuple[Expected, Expected]:
    """Return the answers of SGLang's own backend with the weights of two models.

    The tiny model answers the whole workload, the other model only its `three_levels`.
    """
    from sglang_engines import Expected, expected_answers, load_weights, running_engine

    with running_engine(tiny_model, "torch_native", max_total_tokens=32768) as engine:
        answers, others = expected_answers(engine, workload), Expected()
        load_weights(engine, other_model)
        others.ask(engine, workload.three_levels)
    # Float32 sums in another order differ by about 1e-6. If two tokens' logits come that close,
    # backends may rightly disagree: then the workload needs another seed.
    assert min(answers.smallest_gap, others.smallest_gap) > 1e-4
    return answers, others


@pytest.fixture(scope="session")
def expected(expected_of_both: tuple[Expected, Expected]) -> Expected:
    """The answers of SGLang's own backend to the whole workload."""
    return expected_of_both[0]


@pytest.fixture(scope="session")
def expected_of_other_model(expected_of_both: tuple[Expected, Expected]) -> Expected:
    """The answers of SGLang's own backend to `three_levels` with the weights of the other model."""
    return expected_of_both[1]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyEngines]:
    """Engines of all model families, started from one process that has imported SGLang."""
    from family_engines import family_engines

    with family_engines(tmp_path_factory.mktemp("families")) as running:
        yield running


@pytest.fixture
def server_context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's server context: one rank, no metrics. A test changes it before use."""
    import torch

    from sglang_pat.sglang.report import reports

    context = SimpleNamespace(
        observability=SimpleNamespace(
            enable_metrics=False,
            enable_metrics_for_all_schedulers=False,
            decode_log_interval=40,
            extra_metric_labels=None,
            stat_loggers=None,
        ),
        parallel=SimpleNamespace(
            attn_tp_rank=0, attn_cp_rank=0, tp_rank=0, pp_rank=0, moe_ep_rank=0, dp_rank=None
        ),
        serving=SimpleNamespace(served_model_name="a model"),
        disagg=SimpleNamespace(disaggregation_mode="null"),
        memory=SimpleNamespace(disable_radix_cache=False),
    )
    for name, value in vars(context).items():
        monkeypatch.setattr(reports, f"get_{name}", lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: context.parallel.tp_rank)
    return context
