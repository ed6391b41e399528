"""The documented list of the places in SGLang that pat touches is the adapter's own."""

from __future__ import annotations

import touchpoints_page


def test_the_page_has_the_list() -> None:
    assert touchpoints_page.PAGE.read_text() == touchpoints_page.written(), (
        "run: python tests/support/touchpoints_page.py"
    )
