"""Executors of plans: one in plain torch (`reference.py`), one with CUDA kernels (`cuda.py`)."""
