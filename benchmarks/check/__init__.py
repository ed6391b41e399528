"""Checks of pat's correctness: in SGLang's server, and of its kernels under NVIDIA's sanitizers."""

SUITES = (
    "logits",
    "ranks",
    "hicache",
    "deterministic",
    "soak",
    "sanitizers",
    "sanitizer-grid",
)
