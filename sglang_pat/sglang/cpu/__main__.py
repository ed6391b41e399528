"""SGLang's server on a machine without a CUDA driver:

    python -m sglang_pat.sglang.cpu --model-path MODEL --attention-backend pat --device cpu

The arguments are those of `python -m sglang.launch_server`. With a driver it is the same command.
"""

from __future__ import annotations

import runpy

from sglang_pat.sglang.cpu import enable_cpu_engine

# Guarded: the server's processes are spawned and import the main module again.
if __name__ == "__main__":
    enable_cpu_engine()
    runpy.run_module("sglang.launch_server", run_name="__main__")
