"""Programs by which recorded numbers were made. They are kept to read, and are not maintained.

The tests of `rl` lie beside it: `python -m pytest benchmarks/experiments`.
"""

SUITES = ("speculation", "rl", "planted", "routing")
