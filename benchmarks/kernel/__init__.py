"""Time kernels and planning, without a server."""

SUITES = ("attention", "mla", "scheduler")
