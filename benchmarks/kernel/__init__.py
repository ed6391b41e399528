"""Time kernels and planning, without a server."""

SUITES = ("attention", "batch-invariance", "draft-trees", "kv-write", "mla", "scheduler", "sharing")
