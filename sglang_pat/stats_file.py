"""StatsFile: the counters of a running backend, as JSON in a file that others may read at any time.

Beside the pipeline, at its end: SGLANG_PAT_STATS_FILE names the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang_pat.step_counters import Counters


class StatsFile:
    """Replaces the file as a whole, so that no reader sees half of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new_path = path.with_name(f"{path.name}.{os.getpid()}.new")

    def write(self, counters: Counters) -> None:
        """Write the counters as they are now.

        Called in every step, which costs about 0.1 ms and only where the file is asked for: SGLang
        kills its scheduler without notice, so there is no last moment in which to write what was
        held back.
        """
        self._new_path.write_text(json.dumps(counters) + "\n")
        self._new_path.replace(self._path)
