"""The HTML report in a real browser: it draws, silently, without network, and nothing overlaps."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import replay_results
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from sglang_pat.replay.report_html import write_report
from sglang_pat.replay.result import Result

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="no Chromium with chromedriver on this machine"
    ),
]

# Runs before the page's own scripts: what they throw is counted, whoever catches the log.
WATCH = "window.failures = []; onerror = (message) => { failures.push(String(message)); };"

BOXES = """
const box = (element) => {
  const {left, right, top, bottom} = element.getBoundingClientRect();
  return {left, right, top, bottom};
};
return [...document.querySelectorAll(".chart")].map((chart) => ({
  key: chart.dataset.figure,
  chart: box(chart),
  marks: chart.querySelectorAll(".trace path").length,
  texts: [...chart.querySelectorAll(".main-svg text")]
    .filter((text) => text.textContent && text.getBBox().width)
    .map((text) => ({words: text.textContent, ...box(text)})),
  buttons: [...chart.querySelectorAll(".modebar-btn")].map(
    (button) => ({words: button.dataset.title, ...box(button)})),
}));
"""

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
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
    yield driver
    driver.quit()


@pytest.fixture
def show(browser: webdriver.Chrome, tmp_path: Path) -> Open:
    """Opens the report of a result, at a width in pixels, and waits until every chart is drawn."""

    def opened(result: Result, width: int = 1600, scheme: str = "light") -> webdriver.Chrome:
        page = tmp_path / "report.html"
        write_report(result, page)
        # A window has a least width; a phone is narrower.
        metrics = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": width < 640}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_feature]})
        browser.get(page.as_uri())
        busy = "return document.querySelectorAll('.chart[aria-busy=true]').length"
        WebDriverWait(browser, 60).until(lambda driver: not driver.execute_script(busy))
        return browser

    return opened


def _overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """By more than a pixel in both directions."""
    across = min(a["right"], b["right"]) - max(a["left"], b["left"])
    down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
    return across > 1 and down > 1


def _errors(browser: webdriver.Chrome) -> list[object]:
    return [*browser.execute_script("return failures"), *browser.get_log("browser")]


def _many_nodes() -> Result:
    result = replay_results.result(steps=30)
    result["forest"] = replay_results.forest(batch=4000)
    return result


def _measured() -> Result:
    result = replay_results.result(steps=30)
    for step in result["steps"][::5]:
        step["gpu"] = {"pat": 0.12, "flashinfer": 0.3, "fa3": 0.31}
    return result


RESULTS: dict[str, Callable[[], Result]] = {
    "plain": replay_results.result,
    "no steps": lambda: replay_results.result(steps=0),
    "one step": lambda: replay_results.result(steps=1),
    "long": lambda: replay_results.result(steps=20_000),
    "many nodes": _many_nodes,
    "kernel times": _measured,
}


@pytest.mark.parametrize("width", [400, 800, 1600])
@pytest.mark.parametrize("name", RESULTS)
def test_draws_everything(show: Open, name: str, width: int) -> None:
    browser = show(RESULTS[name](), width)
    assert not _errors(browser)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    too_wide = "return document.documentElement.scrollWidth - innerWidth"
    assert browser.execute_script(too_wide) <= 0
    charts = browser.execute_script(BOXES)
    assert bool(charts) == (name != "no steps")
    for chart in charts:
        assert chart["marks"], f"{chart['key']} is empty"
        for text in chart["texts"]:
            inside = chart["chart"]
            assert text["left"] >= inside["left"] - 1, (chart["key"], text)
            assert text["right"] <= inside["right"] + 1, (chart["key"], text)
            assert text["top"] >= inside["top"] - 1, (chart["key"], text)
            assert text["bottom"] <= inside["bottom"] + 1, (chart["key"], text)
        readable = chart["texts"] + chart["buttons"]
        for index, first in enumerate(readable):
            for second in readable[index + 1 :]:
                assert not _overlap(first, second), (chart["key"], first, second)


def test_a_phone_shows_every_number(show: Open) -> None:
    """No column is cut off: every cell of every open table lies within the window."""
    browser = show(replay_results.result(), 400)
    cells = browser.execute_script(
        "return [...document.querySelectorAll('td, th')]"
        ".filter((cell) => cell.offsetParent)"
        ".map((cell) => [cell.textContent, cell.getBoundingClientRect().right,"
        " cell.scrollWidth - cell.clientWidth])"
    )
    assert len(cells) > 80
    assert any("1.04" in words for words, *_ in cells)
    for words, right, hidden in cells:
        assert right <= 400, words
        assert hidden <= 0, words
    verdict = browser.execute_script(
        "return document.querySelector('.verdict').getBoundingClientRect().top"
    )
    assert verdict < 200


def test_error_in_the_page_is_noticed(show: Open) -> None:
    """The other tests would be worth nothing if this did not hold."""
    browser = show(replay_results.result(steps=3))
    assert not _errors(browser)
    browser.execute_script("setTimeout(() => { noSuchFunction(); }, 0)")
    WebDriverWait(browser, 10).until(lambda driver: driver.execute_script("return failures.length"))
    assert any("noSuchFunction" in str(error) for error in _errors(browser))


def test_page_cannot_reach_the_network(show: Open) -> None:
    browser = show(replay_results.result(steps=3))
    fetched = (
        "fetch('https://example.org').then(() => arguments[0](true), () => arguments[0](false))"
    )
    assert browser.execute_async_script(fetched) is False
    (refused, *_) = browser.get_log("browser")
    assert "Content Security Policy" in refused["message"]


def test_no_button_uploads_the_chart(show: Open) -> None:
    browser = show(replay_results.result(steps=3))
    offered = {
        button["words"] for chart in browser.execute_script(BOXES) for button in chart["buttons"]
    }
    assert offered == {
        "Zoom",
        "Pan",
        "Zoom in",
        "Zoom out",
        "Reset axes",
        "Download plot as a PNG",
    }


def test_nothing_in_the_result_runs(show: Open) -> None:
    nasty = "</script><script>injected = 1</script><img src=x onerror='injected = 1'>"
    result = replay_results.result(steps=20, policies=["memory", nasty])
    result["trace"]["name"] = nasty
    browser = show(result)
    assert browser.execute_script("return window.injected === undefined")
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert nasty in browser.execute_script("return document.querySelector('h1').textContent")
    assert not _errors(browser)


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_follows_the_colour_scheme(show: Open, scheme: str, dark: bool) -> None:
    browser = show(replay_results.result(steps=3), scheme=scheme)
    page, text = browser.execute_script(
        "const style = (query) => getComputedStyle(document.querySelector(query));"
        "return [style('body').backgroundColor, style('.chart .xtick text').fill]"
    )

    def brightness(colour: str) -> float:
        return sum(int(part) for part in colour.strip("rgb()").split(",")) / 3

    assert (brightness(page) < 80) == dark
    assert abs(brightness(page) - brightness(text)) > 120
