"""Nested objects of a result as one level of names: columns of a CSV, rows of a table.

Beside the pipeline: below everything that shows a `Result`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are no objects themselves, in order; keys are joined with a dot.

    `{"kv_tokens": {"policies": {"memory": 7}}}` gives `("kv_tokens.policies.memory", 7)`.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
