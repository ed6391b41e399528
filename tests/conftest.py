"""Shared by all tests: SGLang on machines without a CUDA driver, and the engine tests' fixtures."""

from sglang_pat.testing.cpu_engine import enable_cpu_engine

# Before any test module imports SGLang. Does nothing where there is a driver.
enable_cpu_engine()
