"""The JSON file of bench_serving.py: written after each measurement, and taken up again by the next
invocation, so that contenders can be measured one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metadata import metadata

from serving.cases import floor_ms
from serving.models import ModelShape
from serving.tables import console
from sglang_pat.bench.cases import Case

# Of the metadata, what has to be the same for numbers to be compared.
_SAME = ("commit", "gpu", "torch", "cuda", "versions")
_BY_BACKEND = ("tpot_ms", "tpot_quartiles_ms", "ttft_ms", "itl_ms", "stats", "answers", "gpu")


class Results:
    """`{meta, models, runs, cases, serving}`. In a case, what was measured is by backend.

    ValueError if `path` exists and was made by another commit, GPU or version.
    """

    def __init__(self, path: Path | None, meta: dict[str, Any]) -> None:
        self._path = path
        self._data: dict[str, Any] = {
            "meta": meta,
            "models": {},
            "runs": [],
            "cases": [],
            "serving": [],
        }
        if path is not None and path.exists():
            self._data = earlier(path, meta)
        self._earlier_runs = len(self._data["runs"])

    @property
    def cases(self) -> list[dict[str, Any]]:
        cases: list[dict[str, Any]] = self._data["cases"]
        return cases

    @property
    def serving(self) -> list[dict[str, Any]]:
        serving: list[dict[str, Any]] = self._data["serving"]
        return serving

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Runs of this invocation that failed."""
        return [run for run in self._data["runs"][self._earlier_runs :] if run.get("error")]

    def add_model(self, model: ModelShape) -> None:
        self._data["models"][model.name] = model.config | {"arguments": model.arguments}

    def add_case(
        self, model: ModelShape, case: Case, backend: str, measured: dict[str, Any]
    ) -> None:
        """`measured`: of latency.measure(), and the GPU's state around it."""
        entry = self._entry(model, case)
        for name, value in measured.items():
            assert name in _BY_BACKEND, name
            entry.setdefault(name, {})[backend] = value
        entry["answers_identical"] = identical(entry.get("answers", {}))
        self._write()

    def add_serving(self, model: str, backend: str, rate: float, measured: dict[str, Any]) -> None:
        """`measured`: of traffic.measure(), and the GPU's state around it. Replaces what was there
        for the rate."""
        key = {"model": model, "backend": backend, "request_rate": rate}
        self._data["serving"] = [
            entry for entry in self.serving if {name: entry[name] for name in key} != key
        ]
        self.serving.append(key | measured)
        self._write()

    def add_run(self, run: dict[str, Any]) -> None:
        """One server: backend, model, command, seconds, GPU, and the error if it failed."""
        self._data["runs"].append(run)
        self._write()

    def _entry(self, model: ModelShape, case: Case) -> dict[str, Any]:
        key = {
            "model": model.name,
            "batch": case.batch,
            "groups": case.groups,
            "prefix": case.prefix,
            "private": case.private,
            "generated": case.generated,
            "temperature": case.temperature,
        }
        for entry in self.cases:
            if all(entry[name] == value for name, value in key.items()):
                return entry
        self.cases.append(key | {"floor_ms": floor_ms(case, model)})
        return self.cases[-1]

    def _write(self) -> None:
        if self._path is not None:
            write(self._path, self._data)


def earlier(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """What `path` holds. ValueError if it was measured elsewhere or with other versions."""
    data: dict[str, Any] = json.loads(path.read_text())
    for name in _SAME:
        before, now = data["meta"].get(name), meta[name]
        if before != now:
            raise ValueError(
                f"{path} was measured with {name} {before!r}, this is {now!r}: "
                "write to another file"
            )
    return data


def write(path: Path, data: dict[str, Any]) -> None:
    """All at once: a file that is there is whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(path)


def identical(answers: dict[str, list[str]]) -> dict[str, float]:
    """Share of the requests that a backend answered as the first one of SGLang did. By backend."""
    own = next((name for name in answers if not name.startswith("pat")), None)
    if own is None:
        return {}
    return {
        name: sum(map(str.__eq__, digests, answers[own])) / len(digests)
        for name, digests in answers.items()
        if name != own
    }


def report(verdict: Mapping[str, Any], path: Path | None) -> int:
    """Print what a check found, and write it to `path` if given. Returns the exit status: 1 if it
    names failures."""
    console.print_json(data=verdict)
    if path is not None:
        path.write_text(json.dumps({"meta": metadata(), **verdict}, indent=1) + "\n")
    return 1 if verdict["failures"] else 0
