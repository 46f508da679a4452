import secrets

import pytest
from playwright.sync_api import expect

from tests.annotation_ui.pages import LOW_CONTRAST, READY, TABS, UNNAMED, open_tab, soon_equal

# WCAG 2.2, success criterion 1.4.3: 4.5 to 1, and 3 to 1 for large text. Colors are painted to read them as sRGB.

FOCUSED = "[getComputedStyle(document.activeElement).outlineWidth, document.activeElement.outerHTML.slice(0, 200)]"


def add_everything(server):
    row = {"prompt": "Why?", "responses": ["Because **so**.", "A long " + "word " * 400]}
    server.add_batch([("t", row)])
    server.add_batch([("t", row)], "rules", rule_set="sparrow-dialogue")
    server.add_batch([("t", {"prompt": "Why?"})], "demonstrate", settings={"min_words": 5, "max_words": 9})
    server.add_batch([("t", row)], "edit")
    server.add_batch(
        [("t", {**row, "responses": ["It is so."], "spans": [{"start": 0, "end": 2, "type": "incorrect"}]})], "spans"
    )
    server.add_batch([("t", row)], "compare")
    server.add_batch([("t", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue")


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 360),
        ("dark", 1280),
        pytest.param("light", 1280, marks=pytest.mark.slow),
        pytest.param("dark", 360, marks=pytest.mark.slow),
    ],
)
def test_every_task_is_readable_named_and_fits(server, browser, scheme, width):
    add_everything(server)
    viewport = {"width": width, "height": 800}
    page = server.page(browser, f"a11y-{scheme}-{width}", "/", color_scheme=scheme, viewport=viewport)
    for task, ready in READY.items():
        page.click(f'[data-task="{task}"]')
        page.wait_for_selector(f".stage:not([inert]) {ready}")  # not the one of the task before
        assert page.evaluate(LOW_CONTRAST, ".workbench") == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate("document.querySelector('.workbench').scrollWidth") <= width
        stops = set()
        while len(stops) < 4:  # a wait that fails if the focus does not move
            page.evaluate("() => { window.before = document.activeElement; }")
            page.keyboard.press("Tab")
            page.wait_for_function("() => document.activeElement !== window.before")
            outline, element = page.evaluate(FOCUSED)
            assert outline != "0px", element
            stops.add(element)


def test_pages_of_their_own_and_dialogs_fit_a_phone(server, browser):
    server.add_batch(1)
    page = server.page(browser, "a11y-phone", viewport={"width": 390, "height": 500})
    for path in ("/login", "/password", "/nosuch", "/lead/"):
        page.goto(path)
        box = page.locator(".sign-in").bounding_box()
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


WIDTH = 390
# What can be seen and stands out of the screen, but for what lies in a part that scrolls by itself.
OUTSIDE = """() => {
  const scrolls = (each) => /auto|scroll/.test(getComputedStyle(each).overflowX) && each.scrollWidth > each.clientWidth;
  const inside = (each) => each && each !== document.body && (scrolls(each) || inside(each.parentElement));
  const found = [...document.querySelectorAll('body *')].filter((each) => {
    const box = each.getBoundingClientRect();
    const seen = each.checkVisibility() && box.width && !each.closest('.visually-hidden');
    return seen && (box.right > innerWidth + 1 || box.left < -1) && !inside(each.parentElement);
  });
  return [document.documentElement.scrollWidth - innerWidth, found.map((each) => each.outerHTML.slice(0, 150))];
}"""
# WCAG 2.2, success criterion 2.5.8: what is tapped is at least 24 pixels wide and high. Gradio's fields have a box around.
SMALL = """() => [...document.querySelectorAll('button, input, select, textarea, [role="tab"]')]
  .filter((each) => each.checkVisibility() && !each.closest('.visually-hidden'))
  .map((each) => [each.closest('td, label') ?? (each.tagName === 'INPUT' ? each.closest('.block') : each), each])
  .filter(([box]) => box.getBoundingClientRect().width < 24 || box.getBoundingClientRect().height < 24)
  .map(([, each]) => each.outerHTML.slice(0, 150))"""
CODE = "```python\n" + "x = call(" + ", ".join(f"argument_{i}=value_{i}" for i in range(30)) + ")\n```"


def add_real_work(server):
    """Answers as models write them, long names, and labelers who differ and skip."""
    responses = [CODE, "1. eins\n2. zwei\n\n" + "x" * 120, "مرحبا! اسمي **سلمى**.", "你好" * 60]
    models = [f"runs/model-{k}/step-1000" for k in range(4)]
    row = {"prompt": "Write " + "a-long-word" * 9, "responses": responses, "model": models}
    rows = [("t", {**row, "id": f"an-item-with-a-long-name-{n}"}) for n in range(3)]
    server.add_batch(rows, labelers_per_item=10, name=f"round-{secrets.token_hex(24)}")
    others = [(f"cleopatra-{n}", [1, 2, 2, 3]) for n in range(8)]  # more than a legend has room for
    for name, ranks in (("ann" * 12, [1, 2, 3, 4]), ("bob", [4, 3, 2, 1]), *others):
        server.rank(name, ranks, ratings=[1, 7, 4, None], flags=[["hallucination"], [], [], []])
        user, judgments = server.user_id(name), server.judgments
        waiting = judgments.leases.next(user, "rank")
        judgments.skip(user, waiting.id, secrets.token_hex(8), "I do not know enough to judge it", 3.0)


def settled(panel):
    """Gradio draws a tab, asks for its tables, and draws again."""
    for table in panel.locator(".lead-table").all():
        expect(table.locator("table, .empty").first).to_be_visible()
    panel.page.wait_for_timeout(400)  # what is checked next waits longer if it must


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_every_tab_fits_and_is_readable(server, browser, scheme):
    add_real_work(server)
    viewport = {"width": WIDTH, "height": 844}
    page = server.lead_page(browser, "boss", viewport=viewport, color_scheme=scheme, has_touch=True, is_mobile=True)
    for name in TABS:
        panel = open_tab(page, name)
        settled(panel)
        row = panel.locator("[data-key] button").first
        if name in ("Labelers", "Items", "Batches", "Users"):  # a tap on a disagreement opens it on the other page
            row.tap()
            settled(panel)
            if name == "Items":
                expect(panel.locator(".one-item")).to_be_in_viewport()
        soon_equal(page, OUTSIDE, [0, []], name)  # a chart is drawn again when it learns its width
        soon_equal(page, SMALL, [], name)
        soon_equal(page, LOW_CONTRAST, [], name, "gradio-app")
