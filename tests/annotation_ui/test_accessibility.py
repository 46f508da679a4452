"""Readable, reachable, named: contrast, focus, labels for screen readers, a phone's width, light and dark."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from .conftest import SCREENSHOTS
from .running import Server

pytestmark = pytest.mark.timeout(120)
READY = {"rank": ".card", "rules": ".rule", "demonstrate": "textarea", "compare": ".choices", "probe": ".the-rule"}

# WCAG 2.2, success criterion 1.4.3: 4.5 to 1, and 3 to 1 for large text. Colors are painted to read them as sRGB.
LOW_CONTRAST = """(root) => {
  const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (color) => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = color; paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = rgba(getComputedStyle(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll(`${root} *`)) {
    const text = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !element.checkVisibility() || element.closest('kbd')) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(rgba(style.color)), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) low.push(`${element.className}: ${element.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return low;
}"""
UNNAMED = """() => [...document.querySelectorAll('.workbench :is(button, input, textarea, a, [tabindex="0"], [role])')]
  .filter((e) => e.role !== 'status')
  .filter((e) => e.checkVisibility() && !e.labels?.length && !e.getAttribute('aria-label') && !e.textContent.trim())
  .map((e) => e.outerHTML.slice(0, 120))"""

FOCUSED = "[getComputedStyle(document.activeElement).outlineWidth, document.activeElement.outerHTML.slice(0, 200)]"


def add_everything(server: Server) -> None:
    row = {"prompt": "Why?", "responses": ["Because **so**.", "A long " + "word " * 400]}
    server.add_batch([("t", row)])
    server.add_batch([("t", row)], "rules", rule_set="sparrow-dialogue")
    server.add_batch([("t", {"prompt": "Why?"})], "demonstrate", settings={"min_words": 5, "max_words": 9})
    server.add_batch([("t", row)], "compare")
    server.add_batch([("t", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue")


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 360),
        ("dark", 1280),
        pytest.param("light", 1280, marks=pytest.mark.full),
        pytest.param("dark", 360, marks=pytest.mark.full),
    ],
)
def test_every_task_is_readable_named_and_fits(server: Server, browser: Browser, scheme: str, width: int) -> None:
    add_everything(server)
    viewport = {"width": width, "height": 800}
    page = server.page(browser, f"a11y-{scheme}-{width}", color_scheme=scheme, viewport=viewport)
    page.goto("/")
    for task, ready in READY.items():
        page.click(f'[data-task="{task}"]')
        page.wait_for_selector(ready)
        assert page.evaluate(LOW_CONTRAST, ".workbench") == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate("document.querySelector('.workbench').scrollWidth") <= width
        page.screenshot(path=SCREENSHOTS / f"{task}-{scheme}-{width}.png")
        seen = set()
        for _ in range(6):
            page.keyboard.press("Tab")
            outline, element = page.evaluate(FOCUSED)
            seen.add(element)
            assert outline != "0px", element
        assert len(seen) > 3
    page.context.close()


def test_pages_of_their_own_and_dialogs_fit_a_phone(server: Server, browser: Browser) -> None:
    server.add_batch(1)
    page = server.page(browser, "a11y-phone", viewport={"width": 390, "height": 500})
    for path in ("/login", "/password", "/nosuch", "/lead/"):
        page.goto(path)
        box = page.locator(".sign-in").bounding_box()
        assert box is not None
        assert (box["x"] >= 0, box["x"] + box["width"] <= 390) == (True, True), path
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    assert dialog.evaluate("(each) => each.scrollHeight > each.clientHeight")
    assert dialog.evaluate("(each) => each.scrollTop") == 0  # a long text begins at its beginning
    expect(page.get_by_role("button", name="Close")).to_be_in_viewport(ratio=1)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    page.context.close()
