"""Fixtures of tests that run SGLang's steps on backends."""

from __future__ import annotations

from types import SimpleNamespace

import inspect_backend as inside
import pytest

from sglang_pat.executors.reference import ReferenceExecutor
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, server_context: SimpleNamespace) -> None:
    """Let the torch executor count as one that graphs can capture, and clear global state."""
    server_context.observability.decode_log_interval = 1000
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
    inside.forget_requests()
    monkeypatch.setattr(REQUEST_TRACKER, "_step", None)
