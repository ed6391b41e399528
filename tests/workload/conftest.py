"""These tests read models by pat's rules, as without SGLang; other tests use SGLang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
from command_line import Answer

from sglang_pat.workload import model_reader


@pytest.fixture
def advise(cli: Callable[..., Answer]) -> Callable[..., Answer]:
    """Run `sglang-pat advise`."""
    return partial(cli, "advise")


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(model_reader, "version", version)
