"""Progress lines on stderr, for commands that work for a long time without printing anything.

`python -m sglang_pat.cli.progress TEXT COMMAND...` runs a command with progress lines. The Makefile
uses it with a Python that has no packages.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

SECONDS = 8.0  # between two lines if stderr is not a terminal
_TERMINAL_SECONDS = 1.0


@contextmanager
def sign_of_life(text: str | Callable[[], str]) -> Iterator[None]:
    """Print on stderr what is being done, and for how long, until the block ends.

    On a terminal, there is one line, which is rewritten, and removed at the end. Elsewhere, a new
    line is printed every few seconds, so short work prints nothing.

    Parameters
    ----------
    text
        What is being done, without a full stop. Or a function that returns this text: another
        thread calls the function for each line.
    """
    on_terminal = sys.stderr.isatty()
    ended = threading.Event()
    begun = time.monotonic()

    def line() -> str:
        doing = text if isinstance(text, str) else text()
        return f"{doing}: {time.monotonic() - begun:.0f} s"

    def repeat() -> None:
        while not ended.wait(_TERMINAL_SECONDS if on_terminal else SECONDS):
            _write(f"\r\x1b[K{line()}" if on_terminal else f"{line()}\n")

    thread = threading.Thread(target=repeat, name="sglang-pat sign of life", daemon=True)
    if on_terminal:
        _write(line())
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if on_terminal:
            _write("\r\x1b[K")


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.write(text)
        sys.stderr.flush()


def run(text: str, command: Sequence[str]) -> int:
    """Run `command` with progress lines. Return its exit status; 128 + N if signal N ended it."""
    with sign_of_life(text):
        status = subprocess.run(command).returncode
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
