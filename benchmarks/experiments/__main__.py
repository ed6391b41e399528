"""`python benchmarks/experiments SUITE`, from any folder: imports begin at the folder above."""

import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
sys.exit(import_module("common.suites").main(import_module("experiments"), sys.argv[1:]))
