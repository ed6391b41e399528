"""The self-test decides whether pat runs with an untested version of SGLang."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fakes.backends import pat_backend, runner
from sglang.srt.mem_cache import radix_cache

from sglang_pat.cli import doctor
from sglang_pat.sglang.report import reports
from sglang_pat.sglang.tree import radix_paths, self_test


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the installed SGLang a version that is not in the table."""
    monkeypatch.setattr(self_test, "version", lambda package: "0.9.0")
    monkeypatch.setattr(reports, "rank_speaks", lambda: True)


def break_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the adapter: the first node of each path ends one token too late."""
    read = radix_paths.NodeObjectPaths.read

    def misread(self: Any, reqs: Any) -> Any:
        return [
            [(*path[0][:3], path[0][3] + 1, *path[0][4:]), *path[1:]] for path in read(self, reqs)
        ]

    monkeypatch.setattr(radix_paths.NodeObjectPaths, "read", misread)


def test_it_passes_and_names_the_caches() -> None:
    assert self_test.self_test() == ["RadixCache", "UnifiedRadixCache"]


def test_a_tested_version_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_test, "version", lambda package: "0.5.23")
    break_paths(monkeypatch)  # so that a self-test would fail
    self_test.check_version()
    assert not caplog.records


@pytest.mark.usefixtures("untested")
def test_another_version_starts_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    self_test.check_version()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "pat was not tested with SGLang 0.9.0: its hooks and its self-test are right" in (
        record.getMessage()
    )
    monkeypatch.setattr(reports, "rank_speaks", lambda: False)
    self_test.check_version()
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("untested")
def test_a_misread_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    break_paths(monkeypatch)
    with pytest.raises(RuntimeError) as error:
        self_test.check_version()
    assert str(error.value).startswith(
        "pat's self-test failed with SGLang 0.9.0: RadixCache: ValueError: paths: found "
        "[[(0, 9), (8, 11)], [(0, 9), (8, 13)]], expected [[(0, 8), (8, 11)], [(0, 8), (8, 13)]]; "
        "supported versions of SGLang: 0.5.17, "
    )
    with pytest.raises(RuntimeError, match="pat's self-test failed"):
        pat_backend(runner())
    check = doctor.check_self_test()
    assert check.status == "failed"
    assert "RadixCache: ValueError: paths: found" in check.found


@pytest.mark.usefixtures("untested")
def test_a_cache_that_lost_a_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_cache.RadixCache, "evict", None)
    with pytest.raises(RuntimeError, match=r"could not hook RadixCache\._evict or evict"):
        self_test.check_version()


@pytest.mark.usefixtures("untested")
def test_slots_of_another_prompt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_paths.NodeIdPaths, "shared_slots", lambda self, req: torch.arange(3))
    with pytest.raises(RuntimeError, match=r"UnifiedRadixCache: ValueError: KV slots: found"):
        self_test.check_version()


@pytest.mark.usefixtures("untested")
def test_events_that_are_not_seen_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulates a version that takes locks by another method.
    watched = radix_paths.CacheEventMonitor._watched
    monkeypatch.setattr(
        radix_paths.CacheEventMonitor,
        "_watched",
        lambda self, method, kind: method if kind == "lock" else watched(self, method, kind),
    )
    monkeypatch.setattr(self_test, "_CACHES", self_test._CACHES[:1])
    with pytest.raises(RuntimeError, match=r"events: found \{'insert': 2, 'lock': 0"):
        self_test.check_version()


@pytest.mark.usefixtures("untested")
def test_unknown_caches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_CACHES", ("sglang.srt.mem_cache.no_such:Cache",))
    with pytest.raises(RuntimeError, match="prefix caches: none of sglang"):
        self_test.check_version()
