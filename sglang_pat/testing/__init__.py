"""Aids for tests, the demo and benchmarks. Nothing here is imported by the plug-in itself."""
