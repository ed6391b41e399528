"""`sglang-pat check` finds planted errors, and reports none in a correct engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.planted_errors import FILE, KINDS, STALE
from fakes.plugins import install_plugin
from sglang_engines import flush, run, running_engine

from sglang_pat.bench import check_requests
from sglang_pat.bench.check_requests import Asked
from sglang_pat.bench.closeness import LogprobVerdict, judge
from sglang_pat.bench.prefill_scores import Distances, Reply, distances, score, serve

pytestmark = pytest.mark.engine

RUNNING = 8


def requests(seed: int, number: int = 16, tokens: int = 24) -> list[Asked]:
    return check_requests.generate(
        number, prefix=128, tokens=tokens, samples=2, chunk=128, vocab_size=768, seed=seed
    )


@dataclass
class Engines:
    """pat's engine, in which errors can be planted, and the engine that it is compared with."""

    pat: Any
    other: Any
    error: Path
    _others: dict[str, Any] = field(default_factory=dict)

    def verdict(self, asked: Sequence[Asked], error: str = "") -> LogprobVerdict:
        """Compare the two engines while this error is planted."""
        if repr(asked) not in self._others:
            self._others[repr(asked)] = self._side(self.other, asked)
        sides = self._side(self.pat, asked, error), self._others[repr(asked)]
        replies, found = zip(*sides, strict=True)
        return judge(asked, replies, found, "float32", own_prefill=True)

    def _side(
        self, engine: Any, asked: Sequence[Asked], error: str = ""
    ) -> tuple[list[Reply], list[Distances]]:
        flush(engine)
        self.error.write_text(error)
        replies, _ = serve(asks(engine), asked)
        self.error.write_text("")
        flush(self.other)
        return replies, distances(asked, replies, score(asks(self.other), asked, replies))


def asks(engine: Any) -> Any:
    """Return a function that asks an engine, as `over_http` asks a server."""

    async def all_of(bodies: Sequence[dict[str, Any]]) -> list[Any]:
        return await asyncio.gather(*(engine.async_generate(**body) for body in bodies))

    return lambda bodies: run(engine, all_of(bodies))


@contextmanager
def running_engines(model: Path, folder: Path, *backends: str) -> Iterator[Engines]:
    """Start an engine for each backend. The first one is pat, the last one the other."""
    install_plugin(folder, "fakes.planted_errors")
    error = folder / "error"
    error.write_text("")
    given = {
        "max_running_requests": RUNNING,
        "chunked_prefill_size": 128,
        "schedule_conservativeness": 0.1,
        "max_total_tokens": check_requests.pool_tokens(requests(1), RUNNING),
    }
    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
        environment.syspath_prepend(folder)  # inherited by the engines' processes
        environment.setenv(FILE, str(error))
        engines = [
            stack.enter_context(running_engine(model, backend, **given)) for backend in backends
        ]
        yield Engines(engines[0], engines[-1], error)


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("planted")
    with running_engines(tiny_model, folder, "pat", "torch_native") as running:
        yield running


def test_an_error_is_found_by_comparing_with_pat_without_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_engines(tiny_model, tmp_path, "pat") as engines:
        assert engines.verdict(requests(1), STALE).excesses() != []
        assert engines.verdict(requests(1)).excesses() == []


@pytest.mark.nightly
def test_without_an_error_pat_is_as_close(engines: Engines) -> None:
    verdict = engines.verdict(requests(1))
    assert verdict.excesses() == []
    assert verdict.tokens["pat"] > 200


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_error_is_found(kind: str, engines: Engines) -> None:
    assert engines.verdict(requests(1), kind).excesses() != []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 22))
def test_other_requests_give_no_alarm(seed: int, engines: Engines) -> None:
    assert engines.verdict(requests(seed)).excesses() == []


@pytest.mark.nightly
@pytest.mark.parametrize("error", ["", "scaled logits"])
def test_the_command(error: str, tiny_model: Path, tmp_path: Path) -> None:
    install_plugin(tmp_path, "fakes.planted_errors")
    (tmp_path / "error").write_text(error)
    folders = (str(tmp_path), str(Path(__file__).parents[1] / "support"))
    environment = {"PYTHONPATH": os.pathsep.join(folders), FILE: str(tmp_path / "error")}
    out = tmp_path / "out.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_pat", "check", "--model", str(tiny_model)),
            *("--device", "cpu", "--requests", "32", "--tokens", "96", "--prefix", "400"),
            *("--json", str(out)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | environment,
    )
    assert done.returncode == (1 if error else 0), done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["is_close"] == (not error)
    assert result["verdict"] == done.stdout.splitlines()[-1]
    assert result["meta"]["dtype"] == "float32"
    assert all(each["retractions"] > 0 for each in result["servers"].values())
    counted = result["stats"]
    assert counted["kv_tokens_planned"] < 0.8 * counted["kv_tokens_query_centric"]
    assert min(counted["batch_changes"]["split"], counted["tree_events"]["evict"]) > 0
