"""Beams share their prompt at any width; with `--disable-radix-cache` they share nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang_engines import (
    HAS_BEAMS,
    Request,
    Workload,
    beams,
    generate,
    running_engine,
    running_pat_engine,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.skipif(not HAS_BEAMS, reason="this SGLang has no beam search"),
]

WIDTHS = {4: 0.4, 64: 0.15}  # width -> largest allowed KV read ratio
ARGUMENTS: dict[str, Any] = {"max_running_requests": 72, "max_total_tokens": 32768}


@pytest.fixture(scope="module")
def searches(tiny_model: Path, workload: Workload) -> dict[int, tuple[Request, list[list[int]]]]:
    """By width: a search, and the beams that SGLang's own backend finds."""
    asked = [replace(workload.beams, beam_width=width, num_answers=4) for width in WIDTHS]
    with running_engine(tiny_model, "torch_native", **ARGUMENTS) as engine:
        found = [beams(generate(engine, [search])) for search in asked]
    return dict(zip(WIDTHS, zip(asked, found, strict=True), strict=True))


@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_beams_of_several_widths(
    disable_radix_cache: bool,
    tiny_model: Path,
    tmp_path: Path,
    searches: dict[int, tuple[Request, list[list[int]]]],
) -> None:
    arguments = {"disable_radix_cache": disable_radix_cache, **ARGUMENTS}
    with running_pat_engine(tiny_model, tmp_path, **arguments) as (engine, stats):
        for width, (search, found) in searches.items():
            assert beams(generate(engine, [search])) == found
            counted = stats.new()
            planned, apart = counted["kv_tokens_planned"], counted["kv_tokens_query_centric"]
            if disable_radix_cache:
                assert planned == apart > 0
                assert counted["steps_without_sharing"]
            else:
                assert planned < WIDTHS[width] * apart
                assert counted["steps_without_sharing"] == {}
