"""Time SGLang's server with pat and with its own backends."""

SUITES = (
    "gates",
    "traffic",
    "speculation",
    "trained",
    "hybrids",
    "jobs",
    "planning",
    "waits",
    "routing",
)
