"""`python -m sglang_pat`: the command `sglang-pat`."""

import sys

from sglang_pat.cli.main import main

if __name__ == "__main__":  # child processes of an engine import this module again
    sys.exit(main())
