"""Programs by which recorded numbers were made. They are kept to read, and are not maintained.

Their tests lie beside them: `python -m pytest benchmarks/experiments`.
"""

SUITES = ("speculation", "rl", "planted", "routing")
