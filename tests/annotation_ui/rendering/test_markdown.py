"""What a model wrote is what the rendering shows."""

import re
import secrets
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import expect

from annotation_ui.rendering.markdown import is_visible, text_view, to_html

MARKDOWN = st.text(alphabet=st.sampled_from(list("ab1 \n\t*_`~#>-+.)([]!|=\\&;<:\"'/x\u200b\u00a0é字")), max_size=40)


def shown(text):
    return unescape(re.sub("<[^>]*>", "", to_html(text)))


@settings(max_examples=500, deadline=None)
@given(MARKDOWN)
def test_no_text_with_visible_characters_is_blank(text):
    assert is_visible(shown(text)) or not is_visible(text)


@pytest.mark.parametrize(
    "text",
    [
        "![a pond](http://x/pond.png)", '![a](b "title")', "[1]: http://example.com", "5*6*7", "x*2 and y*3", "2**3**4",
        "__init__ and snake_case_name", r"\( x_1 and \{1, 2\} \] and \\", "&lt;b&gt; &amp;", "***", "-", "#", ">",
        "* * *", "<b>bold</b>", "Total\n---", "[](http://x)", "``", "1)",
    ],
)  # fmt: skip
def test_characters_that_markdown_would_drop_are_shown(text):
    assert shown(text).split() == text.split() or shown(text).strip() == text.replace("\n---", "").strip()


def test_the_columns_of_a_table_keep_their_alignment():
    html = to_html("| a | b | c |\n|:--|--:|:-:|\n| 1 | 2 | 3 |")
    assert re.findall(r'<t[hd](?: align="(\w+)")?>(\w)', html) == [
        ("left", "a"), ("right", "b"), ("center", "c"), ("left", "1"), ("right", "2"), ("center", "3"),
    ]  # fmt: skip
    assert "<td" not in to_html('<td style="color: red">')


def test_formatting_still_works():
    assert to_html("**a** *b* `c` ~~d~~ \\*e\\*") == ("<p><strong>a</strong> <em>b</em> <code>c</code> <s>d</s> *e*</p>\n")
    assert "<strong>重点</strong>" in to_html("这是**重点**内容")
    assert to_html("old pond\na frog") == "<p>old pond<br>\na frog</p>\n"


def test_lists_keep_the_numbers_that_were_written():
    html = to_html("1) one\n3) three\n\nand\n\n7. seven\n7. again")
    written = re.findall(r'<li value="(\d+)" data-mark="([^"]*)">', html)
    assert written == [("1", "1)"), ("3", "3)"), ("7", "7."), ("7", "7.")]


def test_the_language_of_a_code_block_is_shown():
    assert to_html("```python\nprint()\n```") == "<pre><small>python</small>\n<code>print()\n</code></pre>\n"
    assert shown("```only a name").strip() == "only a name"


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "(empty answer)"), (" \n", "(empty answer)"), ("\u200b", "(no visible text in this answer)"), ("a", "a")],
)
def test_a_text_that_nobody_could_see_says_so(text, says):
    view = text_view(text)
    assert re.sub("<[^>]*>", "", view["html"]).strip() == says
    assert view["text"] == text


HOSTILE = """<script>window.pwned=1</script><img src=x onerror="window.pwned=2">
[click](javascript:window.pwned=3) ![](http://127.0.0.1:9/leak.png) <svg onload=window.pwned=4>
<iframe srcdoc="<script>parent.pwned=5</script>"></iframe> ${window.pwned=6} {{window.pwned=7}}
<style>*{display:none}</style>"""


def test_hostile_texts_show_as_text_and_nothing_runs(server, browser):
    row = {"prompt": HOSTILE, "responses": [HOSTILE, f"# ok\n{HOSTILE}"], "model": HOSTILE, "id": HOSTILE}
    server.add_batch([("t", row)], name=f"<img src=x onerror=window.pwned=8>{secrets.token_hex(2)}", priority=1)
    page = server.page(browser, "sec-reader")
    outside = []
    page.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    assert page.evaluate("window.pwned") is None
    assert page.locator(".workbench :is(img, svg, script, iframe, style, [onerror], [onload])").count() == 0
    assert page.locator('.workbench a[href^="javascript"]').count() == 0
    expect(page.locator(".card").first).to_contain_text("window.pwned=1")
    lead = server.page(browser, "sec-boss", role="lead")
    lead.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
    lead.goto("/lead/")
    expect(lead.get_by_text("<img src=x").locator("visible=true").first).to_be_visible()
    assert lead.evaluate("window.pwned") is None
    assert not [url for url in outside if not url.startswith(("data:", "blob:"))]
