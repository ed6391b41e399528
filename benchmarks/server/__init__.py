"""Times SGLang's server with pat and with its own backends."""

SUITES = ("compare", "traffic")
