"""Lets SGLang start several ranks on the CPU."""

from __future__ import annotations

import os
from importlib.metadata import version


def environment_of_ranks(*, tp_size: int = 1, pp_size: int = 1) -> dict[str, str]:
    """Variables for an engine of so many ranks.

    SGLang wants to know the cores of each; 0.5.17 only those of the ranks of one stage. Between
    ranks it prefers NCCL to gloo where it finds the library, even for a CPU, so it must not find
    it.
    """
    cores = sorted(os.sched_getaffinity(0))
    count = tp_size if version("sglang") == "0.5.17" else tp_size * pp_size
    of_ranks = (str(cores[rank % len(cores)]) for rank in range(count))
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(of_ranks),
        "SGLANG_NCCL_SO_PATH": "/no library",
    }
