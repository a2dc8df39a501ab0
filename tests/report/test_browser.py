"""The HTML page in headless Chromium: no error, no request, tables sort, the token viewer opens, contrast holds."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from exl3eval.report.html import render_html
from exl3eval.report.sections import build_document
from exl3eval.report.study import load_study

RUN = Path(__file__).parents[1] / "data" / "report_run"
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
MIN_CONTRAST = 4.5

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine")

CONTRAST = """
(() => {
  const parse = (color) => {
    const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const worst = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    const seen = walker.currentNode.textContent.trim() && element.getClientRects().length;
    if (!seen || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const svg = element.closest("svg");
    const ink = parse(svg ? style.fill : style.color);
    const [a, b] = [light(ink.slice(0, 3)), light(paper(element).slice(0, 3))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const key = `${element.tagName}.${element.className.baseVal ?? element.className}`;
    if (!(key in worst) || ratio < worst[key]) worst[key] = ratio;
  }
  return worst;
})()
"""


class Browser:
    """Chromium over the DevTools pipe: messages end with a NUL byte."""

    def __init__(self, profile):
        command_read, self._write = os.pipe()
        self._read, events_write = os.pipe()
        flags = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" {flags} about:blank 3<&{command_read} 4>&{events_write}', CHROMIUM],
            pass_fds=(command_read, events_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(events_write)
        self._buffer, self._next, self.events, self._session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _receive(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("chromium gave no answer")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise EOFError("chromium ended")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, *, timeout=60.0, **params):
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._next:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, path, *, width=1100, height=900, dark=False):
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while self.run("document.readyState") != "complete":
            assert time.monotonic() < deadline
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def click(self, selector):
        box = self.run(
            f"(() => {{ const at = document.querySelector({json.dumps(selector)}); at.scrollIntoView({{block: 'center',"
            " behavior: 'instant'}); const r = at.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, path):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def problems(self):
        return [
            event
            for event in self.events
            if event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        ]

    def requests(self):
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self):
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(build_document(load_study([RUN]))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser, page):
    browser.events.clear()
    browser.open(page)
    return browser


def test_the_page_loads_without_errors_and_asks_for_nothing(opened, page):
    assert opened.problems() == []
    assert [url for url in opened.requests() if not url.startswith("data:")] == [page.as_uri()]


def test_a_click_on_a_heading_sorts_and_a_second_turns_the_order(opened):
    values = "[...document.querySelectorAll('#strata tbody tr')].map((row) => Number(row.cells[3].dataset.v))"
    heading = "#strata thead th:nth-child(4)"
    before = opened.run(values)
    opened.click(f"{heading} button")
    assert opened.run(values) == sorted(before) != before
    assert opened.run(f"document.querySelector({heading!r}).getAttribute('aria-sort')") == "ascending"
    opened.run(f"document.querySelector({heading + ' button'!r}).focus()")
    opened.key("Enter")
    opened.run(f"document.querySelector({heading + ' button'!r}).click()")
    assert opened.run(values) == sorted(before, reverse=True)


def test_unknown_values_stay_last_in_either_order(opened):
    values = "[...document.querySelectorAll('#strata tbody tr')].map((row) => row.cells[4].dataset.v)"
    for _ in range(2):
        opened.click("#strata thead th:nth-child(5) button")
        shown = opened.run(values)
        known = [value for value in shown if value]
        assert shown == known + [""] * (len(shown) - len(known)) and len(known) < len(shown)


def test_the_token_viewer_shows_what_moved(opened):
    assert opened.run("!document.querySelector('.viewer').hidden")
    assert opened.run("document.querySelectorAll('.tokens span').length") == 16
    opened.click(".tokens span:nth-child(3)")
    detail = "document.querySelector('.detail').innerText"
    assert "position\n2" in opened.run(detail)
    for fact in ("true token", "reference's first", "its confidence", "first of int8-embed", "KL of base", "ΔNLL"):
        assert fact in opened.run(detail)
    for key, position in (("ArrowRight", 3), ("ArrowLeft", 2), ("End", 15), ("Home", 0)):
        opened.key(key)
        assert f"position\n{position}" in opened.run(detail)
        assert opened.run("document.activeElement.getAttribute('aria-selected')") == "true"
    opened.run(
        "(() => { const arm = document.querySelector('.viewer .arm'); arm.value = '1';"
        " arm.dispatchEvent(new Event('change')); })()"
    )
    assert "first of base" in opened.run(detail)
    assert opened.problems() == []


def test_values_appear_under_the_pointer(opened):
    opened.run(
        "document.querySelector('#forest [data-tip]').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    assert opened.run("document.getElementById('tip').textContent").startswith("int8-embed 0.000")
    assert not opened.run("document.getElementById('tip').hidden")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_contrast(browser, page, dark):
    browser.open(page, dark=dark)
    opened = browser.run("getComputedStyle(document.body).backgroundColor")
    assert opened == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    worst = browser.run(CONTRAST)
    assert len(worst) > 15
    assert {where: ratio for where, ratio in worst.items() if ratio < MIN_CONTRAST} == {}


def test_the_theme_button_turns_the_look(opened):
    paper = "getComputedStyle(document.body).backgroundColor"
    before = opened.run(paper)
    opened.click("#theme")
    assert opened.run(paper) != before


def test_figures_are_named_for_those_who_cannot_see_them(opened):
    labels = opened.run("[...document.querySelectorAll('figure svg')].map((svg) => svg.getAttribute('aria-label'))")
    assert len(labels) >= 6
    assert all(label and len(label) > 20 for label in labels)
    ids = opened.run("[...document.querySelectorAll('[id]')].map((at) => at.id)")
    assert len(ids) == len(set(ids))


def test_a_phone_scrolls_tables_not_the_page(browser, page):
    browser.open(page, width=390, height=844)
    assert browser.run("document.documentElement.scrollWidth") <= 390


def test_print_shows_tables_and_hides_controls(opened):
    opened.call("Emulation.setEmulatedMedia", media="print")
    hidden = (
        "[...document.querySelectorAll('.viewer, .tools, nav')].every((at) => getComputedStyle(at).display === 'none')"
    )
    assert opened.run(hidden)
    opened.call("Emulation.setEmulatedMedia", media="")
