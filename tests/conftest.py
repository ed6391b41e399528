"""Shared by all tests: SGLang without a CUDA driver, and what the engine tests compare with."""

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

gc.disable()  # until all modules are imported, whose objects stay
# Before any test module imports SGLang. Does nothing where there is a driver.
enable_cpu_engine()

# Random cases per property. CI runs few of them; `HYPOTHESIS_PROFILE=nightly` runs many.
settings.register_profile("default", max_examples=100, deadline=None)
settings.register_profile("nightly", max_examples=800, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start engines run in one process, but for those of a group of their own.

    Each needs most of the machine. Groups are dealt out first, the largest before the others, and
    single tests last: so two processes end together.
    """
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("engine"))


def pytest_collection_finish() -> None:
    """Do what needs torch, which the process that deals out the tests does not import."""
    import torch

    # Another process of tests has the other core, and threads cost more than such small steps.
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
    """Answers of SGLang's own backend.

    The first are to the whole workload. The second are to its three levels, with the weights of the
    other model.
    """
    from sglang_engines import Expected, expected_answers, load_weights, running_engine

    with running_engine(tiny_model, "torch_native", max_total_tokens=32768) as engine:
        answers, others = expected_answers(engine, workload), Expected()
        load_weights(engine, other_model)
        others.ask(engine, workload.three_levels)
    # Float32 sums in another order differ by about 1e-6. Where two tokens come that close, backends
    # may rightly disagree: then the workload is at fault, and needs another seed.
    assert min(answers.smallest_gap, others.smallest_gap) > 1e-4
    return answers, others


@pytest.fixture(scope="session")
def expected(expected_of_both: tuple[Expected, Expected]) -> Expected:
    """The answers of SGLang's own backend to the whole workload."""
    return expected_of_both[0]


@pytest.fixture(scope="session")
def expected_of_other_model(expected_of_both: tuple[Expected, Expected]) -> Expected:
    """Its answers to the three levels with the weights of the other model."""
    return expected_of_both[1]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyEngines]:
    """Engines of families of models, for which SGLang is imported once."""
    from family_engines import family_engines

    with family_engines(tmp_path_factory.mktemp("families")) as running:
        yield running


@pytest.fixture
def server_context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's published facts about a server: one rank, no metrics. Change it before use."""
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
