"""Runs a command in such a way that Ctrl-C ends the command and all processes that it has started.

An SGLang engine has several processes. A terminal sends Ctrl-C to each of them, and each would
print a traceback. So the command gets its own session, which Ctrl-C does not reach, and this
process ends the session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 1.0
_END_S = 10.0


def run_in_session(command: Sequence[str]) -> int:
    """Run `command`, then remove its temporary files and shared memory.

    The command's TMPDIR is a new folder. If this process gets Ctrl-C, SIGTERM or SIGHUP, it kills
    the command's whole session.

    Returns
    -------
    int
        The exit status of the command; 128 + N if signal N has killed it.

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C was pressed.
    SystemExit
        This process got SIGTERM or SIGHUP.
    """
    existing = _shared_memory_files()
    used: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="sglang-pat-demo-") as folder, _signals_raise():
        process = subprocess.Popen(
            command, start_new_session=True, env=os.environ | {"TMPDIR": folder}
        )
        try:
            while process.poll() is None:
                used |= _shared_memory_of(process.pid)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_POLL_S)
        finally:
            with _deaf_to_ctrl_c():
                used |= _shared_memory_of(process.pid)
                _end(process)
                for inode, path in _shared_memory_files().items():
                    if inode in used and inode not in existing:
                        path.unlink(missing_ok=True)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill every process of the session, even those whose parents have ended."""
    deadline = time.monotonic() + _END_S
    while (members := _members(process.pid)) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
        time.sleep(0.05)
    process.wait()


def _members(session: int) -> list[int]:
    """Return the processes of a session that are still running."""
    members = []
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):  # not a process, or it has just ended
            pid = int(entry.name)
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if os.getsid(pid) == session and state != "Z":
                members.append(pid)
    return members


def _shared_memory_files() -> dict[int, Path]:
    """Return the files in shared memory, by inode.

    /proc/PID/maps shows a semaphore under another name than that of its file.
    """
    found = {}
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        with suppress(FileNotFoundError):
            found[path.stat().st_ino] = path
    return found


def _shared_memory_of(session: int) -> set[int]:
    """Return the inodes of files in shared memory that a session's processes map or have open."""
    found = set()
    for pid in _members(session):
        with suppress(OSError):  # the process may just have ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, _, _, _, inode, *name = line.split(maxsplit=5)
                if name and name[0].startswith(f"{SHARED_MEMORY}/"):
                    found.add(int(inode))
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if str(link.readlink()).startswith(f"{SHARED_MEMORY}/"):
                    found.add(link.stat().st_ino)
    return found


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit in this context, so that cleanup runs."""

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C in this context, so that a second Ctrl-C does not interrupt the cleanup."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
