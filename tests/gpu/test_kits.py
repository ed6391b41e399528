"""SGLang's own test kits against servers with `pat` on a GPU: decode steps are CUDA graphs.

All of them, also those that are only run at night without a GPU:

    python -m pytest -m cuda tests/gpu/test_kits.py
"""

from __future__ import annotations

import pytest
from sglang_kit_cases import *  # noqa: F403  # the tests and their servers

pytestmark = pytest.mark.engine
