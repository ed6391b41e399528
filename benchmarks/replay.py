"""`sglang-pat replay` from a clone: the same code."""

from __future__ import annotations

import sys

from sglang_pat.cli import main

if __name__ == "__main__":
    sys.exit(main(["replay", *sys.argv[1:]]))
