"""`python benchmarks/experiments SUITE`, from any folder: imports begin at the folder above."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import experiments  # noqa: E402
from common.suites import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(experiments, sys.argv[1:]))
