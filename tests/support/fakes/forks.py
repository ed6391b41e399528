"""Starts the processes of engines as forks of one process that has imported SGLang.

Most of an engine's start is the import of SGLang in each of its processes. SGLang spawns these;
here multiprocessing's fork server forks them, also with pickled arguments and the current
environment. `ForkedServer` is an HTTP server from the same fork server. Only the guide's test
starts all processes as users do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, spawn
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any


class _Environment:
    """Unpickling sets the environment of the process."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (f"import os; os.environ.clear(); os.environ.update({dict(os.environ)!r})",)


_preparation_data = spawn.get_preparation_data
_set_start_method = multiprocessing.set_start_method


def _with_environment(name: str) -> dict[str, Any]:
    """Return the first data of a new process, with the environment that the parent has now."""
    return _preparation_data(name) | {"environment": _Environment()}


def _use_fork_server(*_: object, **__: object) -> None:
    """Replaces multiprocessing.set_start_method."""
    _set_start_method("forkserver", force=True)


def _kill_forked(*_: object, **__: object) -> None:
    """Replaces kill_process_tree, which would also end the fork server."""
    import psutil

    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    processes = server.children(recursive=True)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(processes, timeout=60)
    assert left == []


def _ensure_fork_server() -> None:
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        multiprocessing.set_forkserver_preload([__name__ + "_imports"])
        forkserver.ensure_running()


class ForkedServer(ForkServerProcess):
    """A server's Python script with the interface of `subprocess.Popen`, run in forks."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        import pytest

        super().__init__(target=_run_server, args=([*command], log))
        _ensure_fork_server()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spawn, "get_preparation_data", _with_environment)
            self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> None:
        self.join()

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)


def _run_server(command: list[str], log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


@contextlib.contextmanager
def forked_processes() -> Iterator[None]:
    """Fork the processes of engines that are started within the block."""
    import pytest
    from sglang.srt.entrypoints import engine

    before = multiprocessing.get_start_method(allow_none=True)
    _ensure_fork_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "set_start_method", _use_fork_server)
        patch.setattr(spawn, "get_preparation_data", _with_environment)
        patch.setattr(engine, "kill_process_tree", _kill_forked)
        try:
            yield
        finally:
            _set_start_method(before, force=True)


def pass_on_sigquit() -> None:
    """Forward SIGQUIT from the fork server: a failing process of SGLang sends it to its parent."""
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))


def patch_methods_alone() -> None:
    """Save half a second per engine: keep SGLang from searching all modules for hooked functions.

    pat hooks methods of classes, which no module imports by name.
    """
    from sglang.srt.plugins import hook_registry

    hook_registry._propagate_patch = lambda *args: 0
