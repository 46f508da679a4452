"""What a model wrote is what the rendering shows."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation_ui.markdown import is_visible, text_view, to_html

MARKDOWN = st.text(alphabet=st.sampled_from(list("ab1 \n\t*_`~#>-+.)([]!|=\\&;<:\"'/x\u200b\u00a0é字")), max_size=40)


def shown(text: str) -> str:
    return unescape(re.sub("<[^>]*>", "", to_html(text)))


@settings(max_examples=500, deadline=None)
@given(MARKDOWN)
def test_no_text_with_visible_characters_is_blank(text: str) -> None:
    assert is_visible(shown(text)) or not is_visible(text)


@pytest.mark.parametrize(
    "text",
    [
        "![a pond](http://x/pond.png)", '![a](b "title")', "[1]: http://example.com", "5*6*7", "x*2 and y*3", "2**3**4",
        "__init__ and snake_case_name", r"\( x_1 \) and \[ \{1, 2\} \] and \\", "&lt;b&gt; &amp;", "***", "-", "#", ">",
        "* * *", "<b>bold</b>", "Total\n---", "[](http://x)", "``", "1)",
    ],
)  # fmt: skip
def test_characters_that_markdown_would_drop_are_shown(text: str) -> None:
    assert shown(text).split() == text.split() or shown(text).strip() == text.replace("\n---", "").strip()


def test_formatting_still_works() -> None:
    assert to_html("**a** *b* `c` ~~d~~ \\*e\\*") == ("<p><strong>a</strong> <em>b</em> <code>c</code> <s>d</s> *e*</p>\n")
    assert "<strong>重点</strong>" in to_html("这是**重点**内容")
    assert to_html("old pond\na frog") == "<p>old pond<br>\na frog</p>\n"


def test_lists_keep_the_numbers_that_were_written() -> None:
    html = to_html("1) one\n3) three\n\nand\n\n7. seven\n7. again")
    written = re.findall(r'<li value="(\d+)" data-mark="([^"]*)">', html)
    assert written == [("1", "1)"), ("3", "3)"), ("7", "7."), ("7", "7.")]


def test_the_language_of_a_code_block_is_shown() -> None:
    assert to_html("```python\nprint()\n```") == "<pre><small>python</small>\n<code>print()\n</code></pre>\n"
    assert shown("```only a name").strip() == "only a name"


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "(empty answer)"), (" \n", "(empty answer)"), ("\u200b", "(no visible text in this answer)"), ("a", "a")],
)
def test_a_text_that_nobody_could_see_says_so(text: str, says: str) -> None:
    view = text_view(text)
    assert re.sub("<[^>]*>", "", view["html"]).strip() == says
    assert view["text"] == text
