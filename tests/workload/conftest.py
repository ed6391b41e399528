"""Models are read by the rules here, as where SGLang is not installed; other tests ask SGLang."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from sglang_pat.workload import model_reader


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(model_reader, "version", version)
