"""A real browser draws the HTML report without network or console messages, wide and narrow."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from sglang_pat.cli.main import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="no Chromium with chromedriver on this machine"
    ),
]

WORKLOADS = {
    "shared": ("--generate", "few-shot", "--limit", "200"),
    "unshared": ("--generate", "no-sharing", "--limit", "20"),
    "one step": ("--generate", "no-sharing", "--limit", "1", "--max-new-tokens", "2"),
    "no step": ("--generate", "no-sharing", "--limit", "3", "--max-new-tokens", "1"),
}
Open = Callable[..., webdriver.Chrome]


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    # Containers run as root and have little shared memory.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser: webdriver.Chrome, tmp_path: Path) -> Open:
    """Open the report of a workload at a width in pixels."""

    def opened(name: str = "shared", width: int = 1600, scheme: str = "light") -> webdriver.Chrome:
        page = tmp_path / "report.html"
        assert main(["advise", *WORKLOADS[name], "--html", str(page)]) == 0
        # Chrome's windows have a minimum width; a phone is narrower.
        metrics = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": width < 640}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_feature]})
        browser.get(page.as_uri())
        return browser

    return opened


@pytest.mark.parametrize("width", [360, 800, 1600])
@pytest.mark.parametrize("name", WORKLOADS)
def test_everything_is_within_the_page(show: Open, name: str, width: int) -> None:
    browser = show(name, width)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('h1, h2, p, td, th, b, span, i, svg, pre')]"
        ".map((each) => [each.tagName + each.textContent, each.getBoundingClientRect()])"
        ".map(([words, box]) => [words, box.left, box.right])"
    )
    assert len(boxes) > 40
    for words, left, right in boxes:
        assert left >= 0, words
        assert right <= width + 1, words
    drawn = browser.execute_script("return document.querySelectorAll('polyline, rect').length")
    assert (drawn > 2) == (name != "no step")


def test_words_are_large_enough_on_a_phone(show: Open) -> None:
    sizes = show(width=360).execute_script(
        "return [...document.querySelectorAll('h1, p, td, th, span, b, pre, text')]"
        ".map((each) => parseFloat(getComputedStyle(each).fontSize))"
    )
    assert min(sizes) >= 12


def test_the_verdict_is_seen_first(show: Open) -> None:
    top = show(width=360).execute_script(
        "return document.querySelector('h1').getBoundingClientRect().top"
    )
    assert top < 200


def test_page_cannot_reach_the_network(show: Open) -> None:
    fetched = (
        "fetch('https://example.org').then(() => arguments[0](true), () => arguments[0](false))"
    )
    browser = show()
    assert browser.execute_async_script(fetched) is False
    (refused, *_) = browser.get_log("browser")
    assert "Content Security Policy" in refused["message"]


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_follows_the_colour_scheme(show: Open, scheme: str, dark: bool) -> None:
    page, text = show(scheme=scheme).execute_script(
        "const style = (query) => getComputedStyle(document.querySelector(query));"
        "return [style('body').backgroundColor, style('h1').color]"
    )

    def brightness(colour: str) -> float:
        return sum(int(part) for part in colour.strip("rgb()").split(",")) / 3

    assert (brightness(page) < 80) == dark
    assert abs(brightness(page) - brightness(text)) > 120
