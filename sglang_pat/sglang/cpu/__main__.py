"""`python -m sglang_pat.sglang.cpu ...`: `sglang.launch_server`, with or without a CUDA
driver.

Takes the arguments of `sglang.launch_server` and hands them on unchanged.
"""

from __future__ import annotations

import runpy

from sglang_pat.sglang.cpu import enable_cpu_engine

# Guarded: SGLang's child processes are spawned and import the main module again.
if __name__ == "__main__":
    enable_cpu_engine()
    runpy.run_module("sglang.launch_server", run_name="__main__")
