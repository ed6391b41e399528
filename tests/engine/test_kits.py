"""SGLang's own test kits, which its wheel contains, against servers with `pat` on the CPU.

tests/KITS.md lists all kits: which run here, which on a GPU, and why the others do not.
"""

from __future__ import annotations

import pytest
from sglang_kit_cases import *  # noqa: F403  # the tests and their servers

from sglang_pat.sglang.cpu import cuda_driver_is_present

pytestmark = [
    pytest.mark.engine,
    pytest.mark.xdist_group("servers"),
    pytest.mark.skipif(cuda_driver_is_present(), reason="tests/gpu runs them where there is a GPU"),
]
