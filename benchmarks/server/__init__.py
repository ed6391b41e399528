"""Time SGLang's server with pat and with its own backends."""

SUITES = (
    "compare",
    "gates",
    "traffic",
    "speculation",
    "trained",
    "rl",
    "planted",
    "hybrids",
    "jobs",
    "planning",
    "waits",
    "routing",
)
