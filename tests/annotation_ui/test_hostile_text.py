"""Prompts and responses that would run, if they could."""

from __future__ import annotations

import re
import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, expect

from annotation_ui.markdown import to_html

from .running import Server

pytestmark = pytest.mark.timeout(120)

HOSTILE = """<script>window.pwned=1</script><img src=x onerror="window.pwned=2">
[click](javascript:window.pwned=3) ![](http://127.0.0.1:9/leak.png) <svg onload=window.pwned=4>
<iframe srcdoc="<script>parent.pwned=5</script>"></iframe> ${window.pwned=6} {{window.pwned=7}}
<style>*{display:none}</style>"""


def test_hostile_texts_show_as_text_and_nothing_runs(server: Server, browser: Browser) -> None:
    row = {"prompt": HOSTILE, "responses": [HOSTILE, f"# ok\n{HOSTILE}"], "model": HOSTILE, "id": HOSTILE}
    server.add_batch([("t", row)], name=f"<img src=x onerror=window.pwned=8>{secrets.token_hex(2)}", priority=1)
    page = server.page(browser, "sec-reader")
    outside: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    assert page.evaluate("window.pwned") is None
    assert page.locator(".workbench :is(img, svg, script, iframe, style, [onerror], [onload])").count() == 0
    assert page.locator('.workbench a[href^="javascript"]').count() == 0
    expect(page.locator(".card").first).to_contain_text("window.pwned=1")
    lead = server.page(browser, "sec-boss", "lead")
    lead.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
    lead.goto("/lead/")
    expect(lead.get_by_text("<img src=x").locator("visible=true").first).to_be_visible()
    assert lead.evaluate("window.pwned") is None
    assert not [url for url in outside if not url.startswith(("data:", "blob:"))]
    page.context.close()
    lead.context.close()


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("<>&\"'`=/()[]!#*_-: \n\tjavscriptonloadsgmhf")), max_size=120))
def test_rendered_markdown_never_holds_active_content(text: str) -> None:
    html = to_html(text)
    tags = set(re.findall(r"<\s*/?\s*([a-z0-9]+)", html))
    assert not tags & {"script", "img", "svg", "iframe", "style", "object", "embed", "form", "input", "math"}
    for tag in re.findall(r"<[a-z][^>]*>", html):
        assert not re.search(r"\son\w+\s*=", tag)
    assert not re.search(r'href="\s*(javascript|data|vbscript):', html, re.IGNORECASE)
