"""Time kernels and planning, without a server."""

SUITES = ("attention", "batch-invariance", "kv-write", "mla", "scheduler", "sharing")
