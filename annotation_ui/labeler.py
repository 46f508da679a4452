"""The labelers' page: a Gradio page that holds one component, the workbench of static/workbench.js.

The workbench keeps nothing that matters in the browser or in Gradio's state: it asks /api for the open item and saves
every change there, so a refresh or another device goes on where the labeler was.
"""

from __future__ import annotations

import gradio as gr

HEAD = """
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="/ui/theme.css">
<link rel="stylesheet" href="/ui/workbench.css">
"""
_START = "import('/ui/workbench.js').then((workbench) => workbench.start(element))"


def labeler_page() -> gr.Blocks:
    """The page at /: no event, no input, nothing to call through Gradio's API."""
    with gr.Blocks(title="Labelling", analytics_enabled=False, fill_width=True) as page:
        gr.HTML('<div class="workbench"></div>', js_on_load=_START, apply_default_css=False, elem_id="workbench")
    return page
