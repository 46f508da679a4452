"""Steps on the app's pages, for the tests in a browser, and what they look for there."""

import time
from contextlib import contextmanager, suppress

from playwright.sync_api import TimeoutError, expect

from annotation_ui.reports.export import Selection, rows_to_export

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


WAIT_S = 60  # of a loaded machine


def soon_equal(page, script, wanted, about="", argument=None):
    """Assert that a script returns a value now, or when the page has drawn what it is drawing."""
    until = time.monotonic() + WAIT_S
    while (found := page.evaluate(script, argument)) != wanted and time.monotonic() < until:
        page.wait_for_timeout(200)
    assert found == wanted, about


READY = {
    "rank": ".card",
    "rules": ".rule",
    "demonstrate": "textarea",
    "edit": "textarea",
    "spans": ".marked-text",
    "compare": ".choices",
    "probe": ".the-rule",
}
"""By task, what its page shows when an item has come."""
TABS = ("Overview", "Labelers", "Items", "Disagreements", "Import", "Batches", "Rules and guidelines", "Model", "Users",
        "Export")  # fmt: skip


def open_task(server, browser, name, task, **context):
    """A labeler's browser page with an item of the task."""
    page = server.page(browser, name, f"/?task={task}", **context)
    page.wait_for_selector(READY[task])
    return page


def drag(page, source, target):
    """Press, move and let go; the gaps grow while something is dragged, so the target is measured again."""
    start = page.locator(source).first.bounding_box()
    page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(start["x"] + start["width"] / 2 + 9, start["y"] + start["height"] / 2 + 9)
    for _ in range(2):
        end = page.locator(target).first.bounding_box()
        page.mouse.move(end["x"] + end["width"] / 2, end["y"] + end["height"] / 2)
    page.mouse.up()


def drag_order(page, places):
    """Drag each response, from the first to the last, to its place."""
    for index, place in enumerate(places):
        drag(page, f'.tray [data-response="{index}"]', f'[data-slot="{place}"]')


def type_order(page, places):
    """Press the key of each response's place, from the first response to the last."""
    press(page, *map(str, places))


def shown_texts(page):
    return [text.strip() for text in page.locator(".card .markdown").all_inner_texts()]


def submit(page, done):
    page.locator("body").press("Enter")
    expect(page.locator(".count")).to_have_text(f"{done} done")


def exported(server, batch):
    return rows_to_export(server.database, Selection("rankings", batches=(batch,)))


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def handed_in(page, how):
    if how == "mouse":
        page.click('[data-action="submit"]')
    else:
        page.keyboard.press("Enter")
    expect(page.locator(".count")).to_have_text("1 done")


def open_tab(page, name):
    """The panel of a tab, clicked."""
    page.get_by_role("tab", name=name, exact=True).click()
    panel = page.locator('[role="tabpanel"]:visible').first
    expect(panel).to_be_visible()
    return panel


def choose(panel, label, value):
    """Pick a value from one of Gradio's lists by typing it."""
    field, option = panel.get_by_label(label, exact=True), panel.page.get_by_role("option", name=value, exact=True)
    for _ in range(WAIT_S // 5):
        field.click()
        field.fill(value)
        with suppress(TimeoutError):  # the list was opened before its values came
            return option.click(timeout=5000)
        field.press("Escape")
    raise AssertionError(f"{label}: no {value}")


class Held:
    """Requests to a path that reach the server only when `go_on` is called: it takes its time."""

    def __init__(self, page, path):
        self.page, self.path, self.routes = page, path, []
        page.route(path, lambda route: self.routes.append(route))

    def wait(self):
        """Wait for the first request, and return its route."""
        while not self.routes:
            self.page.wait_for_timeout(20)
        return self.routes[0]

    def go_on(self):
        self.wait()
        for route in self.routes:
            route.continue_()
        self.page.unroute(self.path)


@contextmanager
def answers_awaited(page):
    """The server hears of a block's events when it ends. What is yielded waits until the first of them was sent."""
    held = Held(page, "**/queue/join*")
    yield held.wait
    page.wait_for_timeout(300)  # for the others, if they are sent before the first is answered
    held.go_on()


def sign_in(server, browser, name, password):
    page = browser.new_context(base_url=server.url).new_page()
    page.goto("/login")
    page.fill('input[name="name"]', name)
    page.fill('input[name="password"]', password)
    page.click('button[type="submit"]')
    return page
