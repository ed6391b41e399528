"""Where the time goes until a server answers, with pat and with other backends.

    python benchmarks/profile_start.py [--backends pat fa3] [--limit SECONDS] [--json FILE]

All servers start at the same moment, so that none pays alone for cold files. Every process of a
server is sampled: what its main thread does, with each import under the name of the package that is
imported. A table for each kind of process shows the seconds of each phase, those first in which
backends differ most.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from metadata import metadata
from rich.table import Table
from serving.models import MODELS, TINY
from serving.tables import console

from sglang_pat.bench.http_server import wait_for_all
from sglang_pat.bench.server import contender, running_server
from sglang_pat.cli.arguments import Parser, real_number
from sglang_pat.cli.demo.tiny_model import TinyModel
from sglang_pat.output_file import output_file
from sglang_pat.sglang.cpu import cuda_driver_is_present

PERIOD = 0.1  # seconds between two samples
SHORTEST = 0.3  # seconds of a phase that is shown
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
SAMPLER = Path(__file__).parent / "start_sampler"
_IMPORTS = "importlib._bootstrap"
# Who a process is, by a function that only it runs.
_ROLES = {
    "run_scheduler_process": "scheduler",
    "run_detokenizer_process": "detokenizer",
    "launch_server": "server",
    "run_server": "server",
}
# Functions that name a phase, whatever they call. Of those in a stack the innermost does.
_PHASES = (
    "load_model",
    "init_memory_pool",
    "init_attention_backend",
    "with_pat",
    "init_cuda_graph_state",
    "init_forward_metadata_out_graph",
    "capture_one_batch_size",
    "capture_one_shape",
    "capture",
    "kernel_warmup",
    "init_torch_distributed",
    "init_tree_cache",
    "init_cache_with_memory_pool",
    "_wait_for_scheduler_ready",
    "_execute_server_warmup",
    "around_resolution",
    "load_plugins",
    "build",  # of pat: a look into the cache of kernels, or a compilation
    "load_kernels",
)


class Frame(NamedTuple):
    file: str
    function: str


class Profile:
    """The samples of one process: its `role`, and the `seconds` of each phase."""

    def __init__(self, path: Path) -> None:
        self.role = "still starting"
        self.is_helper = False  # multiprocessing's, which does nothing
        self.seconds: Counter[str] = Counter()
        for line in path.read_text().splitlines():
            seconds, *frames = line.split("\t")
            stack = [Frame(*frame.rsplit(":", 1)) for frame in frames]
            self.is_helper = stack[0].function in ("main", "<module>") and len(stack) < 3
            for frame in stack:
                self.role = _ROLES.get(frame.function, self.role)
            self.seconds[_phase(stack)] += float(seconds)  # type: ignore[assignment]


def _phase(stack: list[Frame]) -> str:
    files = [file for file, _ in stack]
    if any(_IMPORTS in file for file in files):
        # Package files in the stack: the innermost is what is being imported.
        outer = next((f"{name}: " for _, name in stack if name in _PHASES), "")
        return f"{outer}import {_package(files)}"
    for _, function in stack:
        if function in _PHASES:
            return function
    for file, function in stack:
        if "/sglang/" in file or "/sglang_pat/" in file:
            return f"{Path(file).name}:{function}"
    return "the interpreter" if not stack else f"{Path(stack[-1][0]).name}:{stack[-1][1]}"


def _package(files: list[str]) -> str:
    """The innermost package that is being imported, by the folder that it was found in."""
    folders = sorted((path for path in sys.path if path), key=len, reverse=True)
    for file in files:
        if _IMPORTS in file:
            continue
        for folder in folders:
            if file.startswith(f"{folder}/") and folder != STANDARD_LIBRARY:
                return file.removeprefix(f"{folder}/").split("/")[0].removesuffix(".py")
    return "the standard library"


def start_all(
    backends: list[str], model: Path, arguments: dict[str, Any], folder: Path, limit: float
) -> dict[str, dict[str, Any]]:
    """Start servers at the same moment. Of each: seconds until it is ready, and its profile.

    Parameters
    ----------
    backends
        As `sglang_pat.bench.server.contender` names them.
    model
        The folder of the model.
    arguments
        As of sglang.Engine.
    folder
        For logs and samples.
    limit
        After so many seconds the servers are ended: the profile is of what they did until then.
    """
    found: dict[str, dict[str, Any]] = {}
    begun = time.time()
    with contextlib.ExitStack() as stack:
        processes = {}
        for name in backends:
            samples = folder / f"samples-{name}"
            samples.mkdir()
            environment = {
                "START_SAMPLES": str(samples),
                "START_PERIOD": str(PERIOD),
                "PYTHONPATH": os.pathsep.join([str(SAMPLER), os.environ.get("PYTHONPATH", "")]),
            }
            server = running_server(
                contender(name), model, folder, environment=environment, wait=False, **arguments
            )
            processes[name] = stack.enter_context(server).process
        found = {name: {"ready": None} for name in backends}
        try:
            for name, seconds in wait_for_all(processes, limit).items():
                found[name]["ready"] = seconds
        except (RuntimeError, TimeoutError) as error:
            for name, process in processes.items():
                found[name]["tail"] = process.tail()
            console.print(f"not all were ready after {time.time() - begun:.0f} s: {error}"[:600])
    for name in backends:
        found[name]["processes"] = _by_role(folder / f"samples-{name}")
    return found


def _by_role(samples: Path) -> dict[str, dict[str, float]]:
    """Role -> phase -> seconds. Several processes of a role add up."""
    roles: dict[str, Counter[str]] = {}
    for path in sorted(samples.glob("*.txt")):
        profile = Profile(path)
        if profile.seconds.total() < SHORTEST or profile.is_helper:
            continue
        roles.setdefault(profile.role, Counter()).update(profile.seconds)
    return {
        role: {phase: round(seconds, 2) for phase, seconds in counts.most_common()}
        for role, counts in roles.items()
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    """A table for each role of a process, of the phases that take time."""
    roles = dict.fromkeys(role for each in found.values() for role in each["processes"])
    for role in roles:
        table = Table(title=f"{role}: seconds by phase")
        table.add_column("phase")
        for name in found:
            table.add_column(name, justify="right")
        by_backend = [each["processes"].get(role, {}) for each in found.values()]
        phases = {phase for each in by_backend for phase in each}
        rows = [(phase, [each.get(phase, 0.0) for each in by_backend]) for phase in phases]
        for phase, seconds in sorted(rows, key=lambda row: min(row[1]) - max(row[1])):
            if max(seconds) >= SHORTEST:
                table.add_row(phase, *(f"{value:.1f}" for value in seconds))
        table.add_row("all", *(f"{sum(each.values()):.1f}" for each in by_backend))
        console.print(table)
    for name, each in found.items():
        ready = "not ready" if each["ready"] is None else f"ready after {each['ready']:.1f} s"
        console.print(f"{name}: {ready}")


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", metavar="NAME")
    parser.add_argument("--limit", type=real_number(1, 1e6), default=420, metavar="SECONDS")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the profile to FILE"
    )
    args = parser.parse_args()
    on_gpu = cuda_driver_is_present()
    backends = args.backends or ["pat", "fa3" if on_gpu else "torch_native"]
    shape = MODELS["llama-3-8b" if on_gpu else TINY]
    # Several servers share the device: a pool of its own size, not of what happens to be free.
    arguments = shape.arguments | {"max_total_tokens": 1 << 14, "skip_tokenizer_init": True}
    with tempfile.TemporaryDirectory(prefix="profile-start-") as folder:
        model = Path(folder, "model")
        model.mkdir()
        if on_gpu:
            (model / "config.json").write_text(json.dumps(shape.config))
        else:
            TinyModel().write(model)
        found = start_all(backends, model, arguments, Path(folder), args.limit)
    if args.json:
        args.json.write_text(json.dumps({"meta": metadata(), "backends": found}, indent=1) + "\n")
    show(found)
    return 0 if all(each["ready"] is not None for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
