"""Environment variables with which SGLang starts several ranks on the CPU."""

from __future__ import annotations

import os
from importlib.metadata import version


def environment_of_ranks(*, tp_size: int = 1, pp_size: int = 1) -> dict[str, str]:
    """Return the variables for an engine of `tp_size * pp_size` ranks.

    SGLang requires the cores of each rank; 0.5.17 only those of the ranks of one stage. Even on a
    CPU, it uses NCCL instead of gloo if it finds the library, so the library is hidden.
    """
    cores = sorted(os.sched_getaffinity(0))
    count = tp_size if version("sglang") == "0.5.17" else tp_size * pp_size
    of_ranks = (str(cores[rank % len(cores)]) for rank in range(count))
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(of_ranks),
        "SGLANG_NCCL_SO_PATH": "/no library",
    }
