"""SGLang's own test kits against servers with `pat` and CUDA graphs on a GPU.

This command runs all kits, also those that are nightly on a CPU:

    python -m pytest -m cuda tests/gpu/test_kits.py
"""

from __future__ import annotations

import pytest
from sglang_kit_cases import *  # noqa: F403  # the tests and their servers

pytestmark = pytest.mark.engine
