"""Shared by all tests: SGLang without a CUDA driver, and what the engine tests compare with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang_pat.testing.cpu_engine import enable_cpu_engine
from sglang_pat.testing.tiny_model import TinyModel

if TYPE_CHECKING:
    from sglang_engines import Expected, Workload

# Before any test module imports SGLang. Does nothing where there is a driver.
enable_cpu_engine()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return TinyModel().write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def workload() -> Workload:
    from sglang_engines import Workload

    return Workload()


@pytest.fixture(scope="session")
def expected(tiny_model: Path, workload: Workload) -> Expected:
    """The answers of SGLang's own backend to the whole workload."""
    from sglang_engines import Expected, generate, running_engine

    answers = Expected()
    with running_engine(tiny_model, "torch_native", max_total_tokens=16384) as engine:
        asked = workload.all()
        answers.record(asked, generate(engine, asked, return_logprob=True, top_logprobs_num=2))
    # Float32 sums in another order differ by about 1e-6. Where two tokens come that close, backends
    # may rightly disagree: then the workload is at fault, and needs another seed.
    assert answers.smallest_gap > 1e-4
    return answers
