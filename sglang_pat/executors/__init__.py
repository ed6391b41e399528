"""Executors of plans: torch (`reference.py`) and CUDA (`cuda.py`, compiled by `jit.py`)."""
