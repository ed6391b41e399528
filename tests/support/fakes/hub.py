"""Stands in for the client of the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def install_hub(
    monkeypatch: pytest.MonkeyPatch, file: Path | None, error: Exception | None
) -> list[str]:
    """Fake the client. Returns the files that are downloaded.

    file: the downloaded file. error: raised by a download; `file` is then in the cache.
    """
    asked = []

    def download(name: str, file_name: str, **options: Any) -> str:
        asked.append(f"{name}/{file_name}")
        return str(file)

    def get_metadata(url: str, *, timeout: float) -> None:
        assert timeout < 5
        if error is not None:
            raise error

    cached = None if file is None or error is None else str(file)
    client = SimpleNamespace(
        try_to_load_from_cache=lambda name, file_name: cached,
        hf_hub_download=download,
        hf_hub_url=lambda name, file_name: f"https://hub/{name}/{file_name}",
        get_hf_file_metadata=get_metadata,
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    return asked
