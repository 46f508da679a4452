"""The labelers' page: a Gradio page with one component, the workbench of static/workbench.js.

The workbench stores nothing in Gradio's state: it reads the open item from /api and saves every change there, so that a
labeler can refresh or switch devices and continue. Only a draft that the server does not have yet is kept in the tab.
"""

from __future__ import annotations

from typing import cast

import gradio as gr

HEAD = """
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="/ui/theme.css">
<link rel="stylesheet" href="/ui/markdown.css">
<link rel="stylesheet" href="/ui/workbench.css">
"""
_START = "import('/ui/workbench.js').then((workbench) => workbench.start(element))"


def labeler_page() -> gr.Blocks:
    """Build the page at /. It has no events and no inputs, so Gradio's API offers nothing to call."""
    with gr.Blocks(title="Labeling", analytics_enabled=False, fill_width=True) as page:
        gr.HTML('<div class="workbench"></div>', js_on_load=_START, apply_default_css=False, elem_id="workbench")
    return cast(gr.Blocks, page)
