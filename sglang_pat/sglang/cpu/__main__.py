"""SGLang's server on a machine without a CUDA driver.

    python -m sglang_pat.sglang.cpu --model-path MODEL --attention-backend pat

The arguments are those of `python -m sglang.launch_server`. With a driver, both commands do the
same.
"""

from __future__ import annotations

import runpy
import sys

from sglang_pat.sglang.cpu import bound_kv_pool, enable_cpu_engine

# Guarded, because spawned processes of the server import the main module again.
if __name__ == "__main__":
    if enable_cpu_engine():
        sys.argv[1:] = bound_kv_pool(sys.argv[1:])
    runpy.run_module("sglang.launch_server", run_name="__main__")
