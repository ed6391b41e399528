"""Programs that have made recorded numbers. They are kept as a reference and not maintained.

The tests of `rl` are in this folder: `python -m pytest benchmarks/experiments`.
"""

SUITES = ("speculation", "rl", "planted", "routing")
