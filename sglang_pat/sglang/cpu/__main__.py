"""SGLang's server on a machine without a CUDA driver.

    python -m sglang_pat.sglang.cpu --model-path MODEL --attention-backend pat

The arguments are those of `python -m sglang.launch_server`. With a driver, both commands do the
same. `--off NAME` turns a switch off that the command line of SGLang can only turn on, such as
enable_multimodal.
"""

from __future__ import annotations

import argparse
import runpy
import sys

from sglang_pat.sglang.cpu import bound_kv_pool, enable_cpu_engine

# Guarded, because spawned processes of the server import the main module again.
if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--off", action="append", default=[])
    given, sys.argv[1:] = parser.parse_known_args()
    if enable_cpu_engine():
        sys.argv[1:] = bound_kv_pool(sys.argv[1:])
    if given.off:
        from sglang.srt.server_args import ServerArgs

        read = ServerArgs.from_cli_args

        def from_cli_args(args: argparse.Namespace) -> ServerArgs:
            vars(args).update(dict.fromkeys(given.off, False))
            return read(args)

        ServerArgs.from_cli_args = from_cli_args
    runpy.run_module("sglang.launch_server", run_name="__main__")
