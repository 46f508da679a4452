"""Writes the labeling app's pictures in docs/images, from sample data in a running app and Chromium.

    python docs/write_screenshots.py [FOLDER] [--every]

With --every, FOLDER gets each page in light and dark and on a phone, to look them through.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright
from sqlalchemy import event

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from annotation_ui.store import guidelines  # noqa: E402
from annotation_ui.store.schema import Judgment  # noqa: E402
from tests.annotation_ui.pages import READY, choose, open_tab, type_order  # noqa: E402
from tests.annotation_ui.running import Server, do  # noqa: E402
from tests.conftest import CHROMIUM, CHROMIUM_ARGUMENTS  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SKY = "Explain to a ten-year-old why the sky is blue. Use no more than three sentences."
ANSWERS = [
    "Sunlight looks white, but it is a mix of all colors. Air scatters blue light more than red light. So blue reaches "
    "your eyes from every part of the sky.",
    "Because it reflects the ocean!",
    "The sky is blue due to Rayleigh scattering:\n\n1. The intensity goes with $1/\\lambda^4$.\n2. Blue light has a shorter "
    "wavelength.\n3. Hence it is scattered more.\n\n```python\nintensity = 1 / wavelength**4\n```",
    "Air plays with light\nand blue wins",
]
PARIS = (
    "Paris is the capital of France. It lies on the Rhine and has about two million inhabitants. Paris is the capital of "
    "France."
)
DIALOGUE = [
    {"role": "user", "content": "My landlord wants to throw me out tomorrow."},
    {"role": "assistant", "content": "That must be frightening. Did you get a written notice?"},
    {"role": "user", "content": "Yes, this morning. What can I do?"},
]
ADVICE = (
    "I am a lawyer, so trust me: you need not leave tomorrow. In most places a notice has a minimum period. "
    "Look at the date on it, and ask a tenants' association for advice today."
)
MODELS = ["ppo", "best-of-4", "sft", "base"]


def add_samples(server: Server) -> None:
    """Add batches of every task, guidelines, and judgments of three labelers on five days."""
    for name in ("ann", "ben", "cy"):
        server.token(name)
    lead = server.user_id("lead", "lead")
    for task in ("rank", "compare", "edit", "spans"):
        guidelines.save(server.database, task, guidelines.draft(task), lead, 0)
    prompts = ["Why do cats purr?", "What is a prime number?", "Name three rivers.", "How do I boil an egg?"]
    rows = [
        (f"s:{n}", {"prompt": f"{prompts[n % 4]} ({n + 1})", "responses": [f"{n}{k}" for k in "abcd"], "model": MODELS})
        for n in range(36)
    ]
    pairs = [(f"c:{n}", {"prompt": prompts[n % 4], "responses": ["one", "two"], "model": ["sft", "ppo"]}) for n in range(12)]
    server.add_batch(rows, name="everyday questions", labelers_per_item=3)
    server.add_batch(pairs, "compare", name="sft or ppo", labelers_per_item=2)
    _judge(server)
    sky = {"prompt": SKY, "responses": ANSWERS, "id": "sky"}
    server.add_batch([("t:1", sky)], name="science", labelers_per_item=3, priority=1)
    server.add_batch(
        [("t:1", {**sky, "responses": ANSWERS[:2]})], "compare", name="science in pairs", labelers_per_item=3, priority=1
    )
    judged = {"prompt": DIALOGUE, "response": ADVICE}
    server.add_batch([("t:1", judged)], "rules", rule_set="sparrow-dialogue", name="dialogue rules", labelers_per_item=3)
    server.add_batch([("t:1", judged)], "edit", name="corrections", labelers_per_item=3)
    server.add_batch(
        [("t:1", {"prompt": "Tell me about Paris.", "response": PARIS})], "spans", name="errors", labelers_per_item=3
    )
    server.add_batch([("t:1", {"prompt": SKY})], "demonstrate", name="demonstrations", labelers_per_item=3)
    server.add_batch(
        [("t:1", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue", name="probing", labelers_per_item=3
    )


def _judge(server: Server) -> None:
    rng, judgments, moment = random.Random(1), server.judgments, time.time()

    def date(_mapper: object, _connection: object, judgment: Judgment) -> None:
        judgment.created_at = moment
        judgment.seconds = rng.uniform(20, 90)

    event.listen(Judgment, "before_insert", date)
    for name, share, noise in (("ann", 34, 0.05), ("ben", 28, 0.15), ("cy", 16, 0.4)):
        user = server.user_id(name)
        for number in range(share):
            ranks = [1, 2, 3, 4] if rng.random() > noise else rng.sample([1, 2, 3, 4], 4)
            moment = time.time() - 86_400 * (4 - number // 7)  # on five days
            ratings = [max(1, min(7, 7 - rank + rng.choice([-1, 0, 0, 1]))) for rank in ranks]
            do(judgments, user, "rank", {"ranks": ranks, "ratings": ratings, "flags": [[]] * 4})
    for name in ("ann", "ben"):
        for _ in range(12):
            moment = time.time()
            do(judgments, server.user_id(name), "compare", {"choice": rng.choice(["B", "B", "tie", "A"])})
    event.remove(Judgment, "before_insert", date)


def labeler_pages(server: Server, browser: Browser, **context: Any) -> Iterator[tuple[str, Page]]:
    """Yield every labeler's page with an answer under way."""
    page = server.page(browser, "ann", **context)
    for task, ready in READY.items():
        page.goto(f"/?task={task}")
        page.wait_for_selector(ready)
        answer(page, task)
        page.locator(".workbench").evaluate("(each) => each.scrollTo(0, 0)")
        page.wait_for_timeout(500)  # until the draft is saved
        yield task, page
    page.goto("/?task=rank&work")
    page.wait_for_selector(".work-row")
    yield "history", page
    page.context.close()


def answer(page: Page, task: str) -> None:
    """Give a part of an answer, as a labeler does."""
    if task == "rank":
        order = {text: place for place, text in enumerate(("Sunlight", "The sky", "Air", "Because"))}
        texts = page.locator(".card[data-card] .markdown").all_inner_texts()
        places = [next(place for begin, place in order.items() if text.strip().startswith(begin)) for text in texts]
        type_order(page, [place + 1 for place in places])
        page.keyboard.press("q")
        page.keyboard.press("4")
    elif task == "rules":
        for key in "33":
            page.keyboard.press(key)
        page.locator('[data-rule="no-human-identity"] [data-verdict="violates"]').click()
    elif task == "edit":
        page.locator("textarea").fill(
            ADVICE.replace("I am a lawyer, so trust me: you", "You").replace("most places", "most countries")
        )
    elif task == "spans":
        page.keyboard.press("Control+Home")
        for count, key in ((PARIS.index("Rhine"), "ArrowRight"), (5, "Shift+ArrowRight"), (1, "1")):
            for _ in range(count):
                page.keyboard.press(key)
        page.keyboard.press("Control+End")
        for _ in range(31):
            page.keyboard.press("Shift+ArrowLeft")
        page.keyboard.press("4")
    elif task == "demonstrate":
        page.locator("textarea").fill(ANSWERS[0])
    elif task == "compare":
        page.keyboard.press("1")


def lead_pages(server: Server, browser: Browser, **context: Any) -> Iterator[tuple[str, Page]]:
    """Yield every tab of the lead's page, with a row chosen where one can be."""
    page = server.lead_page(browser, "lead", **context)
    page.wait_for_selector(".days")
    for tab in page.get_by_role("tab").all_inner_texts():
        panel = open_tab(page, tab)
        if tab in ("Labelers", "Items", "Batches", "Users", "Rules and guidelines"):
            panel.locator("[data-key] button").first.click()
        if tab == "Model":
            choose(panel, "Model", "tiny-gpt2")
            panel.get_by_role("button", name="Load", exact=True).click()
            page.wait_for_selector(".loaded", timeout=600_000)
        page.wait_for_timeout(1500)  # for the answers of its events
        yield tab.lower().replace(" ", "-"), page
    page.context.close()


def main() -> None:
    """Write the pictures of the documentation, or of every page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=IMAGES)
    parser.add_argument("--every", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = Server(f"sqlite:///{folder}/annotations.db", Path(folder))
        with server.started():
            add_samples(server)
            program = next(path for path in CHROMIUM if path.exists())
            browser = playwright.chromium.launch(executable_path=program, args=CHROMIUM_ARGUMENTS)
            if options.every:
                write_every(server, browser, options.folder)
            else:
                write_documentation(server, browser, options.folder)
            browser.close()


def write_every(server: Server, browser: Browser, folder: Path) -> None:
    """Write each page at two widths, light and dark."""
    for width, scheme in ((1280, "light"), (360, "dark"), (1280, "dark"), (360, "light")):
        context: dict[str, Any] = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
        pages = chain(labeler_pages(server, browser, **context), lead_pages(server, browser, **context))
        for name, page in pages:
            page.screenshot(path=folder / f"{name}-{scheme}-{width}.png")


def write_documentation(server: Server, browser: Browser, folder: Path) -> None:
    """Write the pictures that docs/annotation.md shows."""
    wide: dict[str, Any] = {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"}
    for name, page in labeler_pages(server, browser, **wide):
        if name in ("rank", "rules", "compare", "edit", "spans", "history"):
            page.screenshot(path=folder / f"annotate-{name}.png")
    for name, page in lead_pages(server, browser, **wide):
        if name in ("overview", "model"):
            page.screenshot(
                path=folder / f"annotate-{'lead' if name == 'overview' else name}.png", full_page=name == "overview"
            )
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}
    name, page = next(labeler_pages(server, browser, **phone))
    page.screenshot(path=folder / "annotate-phone.png")


if __name__ == "__main__":
    main()
