"""Check that pat is right: in SGLang's server, and its kernels below NVIDIA's sanitizers."""

SUITES = (
    "logits",
    "ranks",
    "hicache",
    "deterministic",
    "soak",
    "sanitizers",
    "sanitizer-grid",
)
