"""The demo's session: it ends with all its processes, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_pat.cli.demo.session import SHARED_MEMORY, run_in_session

# Starts a process that outlives its parent, writes files, and does not care about Ctrl-C.
CHILD = """
import mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, name = sys.argv[1:]
open(os.path.join(os.environ["TMPDIR"], "temporary"), "w").close()
descriptor = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 4096)
memory = mmap.mmap(descriptor, 4096)
os.close(descriptor)
os.link(f"/dev/shm/{name}", f"/dev/shm/{name}_linked")
os.unlink(f"/dev/shm/{name}")
pid = os.fork()
with open(os.path.join(folder, str(os.getpid())), "w") as file:
    file.write(os.environ["TMPDIR"])
if pid == 0:
    os.setpgid(0, 0)
time.sleep(60 if len(os.listdir(folder)) < 3 else 0)
"""
PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from sglang_pat.cli import main
from sglang_pat.cli.demo import session
main.demo.run_in_session = lambda command: session.run_in_session(sys.argv[1:])
main.demo._quieten = lambda: None
sys.exit(main.main(["demo"]))
"""


@pytest.fixture
def shared_memory() -> str:
    name = f"sglang_pat_test_{os.getpid()}"
    yield name
    for path in SHARED_MEMORY.glob(f"{name}*"):
        path.unlink()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_all_and_leaves_nothing(
    number: int, status: int, tmp_path: Path, shared_memory: str
) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), shared_memory]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while len([p for p in tmp_path.iterdir() if p.read_text()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    memory = SHARED_MEMORY / f"{shared_memory}_linked"  # mapped under another name
    assert memory.exists()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    temporary = Path(next(tmp_path.iterdir()).read_text())
    assert (temporary / "temporary").exists()
    time.sleep(1.5)  # the session is looked at every second
    parent.send_signal(number)
    _, error = parent.communicate(timeout=60)
    assert parent.returncode == status
    assert error == ("sglang-pat: interrupted\n" if number == signal.SIGINT else "")
    assert not any(map(is_alive, pids))
    assert not temporary.exists()
    assert not memory.exists()


@pytest.mark.parametrize(
    ("code", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_status_is_that_of_the_command(code: str, status: int) -> None:
    assert run_in_session([sys.executable, "-c", f"import os; {code}"]) == status


def test_what_was_there_before_stays(shared_memory: str) -> None:
    path = SHARED_MEMORY / shared_memory
    path.write_bytes(bytes(8))
    code = f"import time; file = open({str(path)!r}); time.sleep(1.5)"
    assert run_in_session([sys.executable, "-c", code]) == 0
    assert path.exists()


def test_processes_that_are_left_over_are_ended(tmp_path: Path) -> None:
    """The command ends; a process that it started would go on."""
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    )
    assert run_in_session([sys.executable, "-c", code]) == 0
    assert not is_alive(int((tmp_path / "pid").read_text()))
