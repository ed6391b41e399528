"""SGLang's own test kits against servers with `pat` on a GPU: decode steps are CUDA graphs.

All of them, also those that are only run at night without a GPU:

    python -m pytest -m cuda tests/gpu/test_kits.py
"""

from __future__ import annotations

import pytest
import torch
from sglang_kit_cases import *  # noqa: F403  # the tests and their servers

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
