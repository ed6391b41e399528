"""A server that keeps no prefixes logs that once, with the option that changes it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes.backends import pat_backend, runner


@pytest.mark.parametrize(
    ("mode", "is_off", "rank", "expected"),
    [
        ("null", False, 0, None),
        ("decode", False, 0, None),
        ("null", True, 0, "--disable-radix-cache was given"),
        ("prefill", True, 0, "--disable-radix-cache was given"),
        ("decode", True, 0, "--disaggregation-decode-enable-radix-cache"),
        ("decode", True, 1, None),  # only the first rank logs it
    ],
)
def test_the_option_is_named(
    mode: str,
    is_off: bool,
    rank: int,
    expected: str | None,
    server_context: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server_context.disagg.disaggregation_mode = mode
    server_context.memory.disable_radix_cache = is_off
    server_context.parallel.attn_tp_rank = rank
    pat_backend(runner())
    said = [line for line in caplog.messages if "no KV to share" in line]
    assert len(said) == (expected is not None)
    assert expected is None or expected in said[0]
