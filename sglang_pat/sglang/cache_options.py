"""Warns at start-up if SGLang keeps no prefixes, so that pat finds nothing to share."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def warn_without_prefix_cache(memory: Any, disaggregation: Any) -> None:
    """Log a warning that names the option, if SGLang was told to keep no prefixes.

    Takes what SGLang has published of its options: `get_memory()` and `get_disagg()`.
    """
    if not memory.disable_radix_cache:
        return
    if disaggregation.disaggregation_mode == "decode":
        cause = "a server with --disaggregation-mode decode keeps no prefixes by default"
        remedy = "start it with --disaggregation-decode-enable-radix-cache"
    else:
        cause = "--disable-radix-cache was given, or SGLang has set it for another option"
        remedy = "start SGLang without it"
    logger.warning("pat finds no KV to share between requests: %s; to share, %s", cause, remedy)
