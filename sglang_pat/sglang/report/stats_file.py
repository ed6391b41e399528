"""StatsFile writes the counts of decode steps as JSON. A step only sets a flag; a thread writes."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from sglang_pat.output_file import replace_file
from sglang_pat.stats import Counters

logger = logging.getLogger(__name__)

# Pause between two writes. SIGKILL loses at most what was counted in one pause and one write.
WRITE_SECONDS = 0.05
_QUIET_WRITES = 10  # after this many writes without a change, the thread sleeps until mark()


class StatsFile:
    """Keeps a file up to date. Call `start()` once, and `mark()` after each decode step.

    The file is replaced atomically within 0.1 s of a step, so no reader sees half of it. It is
    written once more when the process ends, unless a signal kills the process.
    """

    latest: ClassVar[StatsFile]  # that was started in this process

    def __init__(self, path: Path, read_counters: Callable[[], Counters]) -> None:
        self._path = path
        self._read_counters = read_counters
        self._written: Counters | None = None
        self._outdated = threading.Event()
        self._writing = threading.Lock()  # held while the file is written

    def start(self) -> None:
        """Write the file, and keep it up to date until the process ends."""
        self.write()
        StatsFile.latest = self
        atexit.register(self.write)
        threading.Thread(target=self._run, name="sglang-pat stats file", daemon=True).start()

    def mark(self) -> None:
        """Tell the thread to write the file. To be called after a decode step was counted."""
        if not self._outdated.is_set():
            self._outdated.set()

    def write(self) -> bool:
        """Write the counters if they have changed, and return whether they have."""
        with self._writing:
            counters = self._read_counters()
            if counters == self._written:
                return False
            replace_file(self._path, json.dumps(counters) + "\n")
            self._written = counters
            return True

    def _run(self) -> None:
        try:
            while True:
                self._outdated.wait()
                self._outdated.clear()  # first, so that a step counted during write() sets it again
                # Draft extends, and tree changes between steps, are counted without mark(), so the
                # thread writes a few more times.
                num_quiet = 0
                while num_quiet < _QUIET_WRITES:
                    num_quiet = 0 if self.write() else num_quiet + 1
                    time.sleep(WRITE_SECONDS)
        except Exception:
            logger.exception("pat no longer writes %s; decode continues", self._path)
