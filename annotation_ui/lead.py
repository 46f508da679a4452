"""The lead's page at /lead: a Gradio page of tabs. The guard lets only leads through to it and to its API.

Nothing is kept in Gradio's state: every table is read from the database when it is asked for.
"""

from __future__ import annotations

import gradio as gr

from annotation_ui.lead_tabs.insight import disagreements_tab, overview_tab
from annotation_ui.lead_tabs.models import models_tab
from annotation_ui.lead_tabs.office import export_tab, users_tab
from annotation_ui.lead_tabs.work import batches_tab, import_tab, texts_tab
from annotation_ui.services import Services

HEAD = '<link rel="stylesheet" href="/ui/theme.css"><link rel="stylesheet" href="/ui/lead.css">'

_TOP = """
<span class="brand" aria-hidden="true"><span></span><span></span><span></span></span><h1>Lead</h1>
<nav><a href="/">Label</a> <a href="/password">Change password</a></nav>
"""


def lead_page(services: Services) -> gr.Blocks:
    """All of a lead's work."""
    with gr.Blocks(title="Lead · Labelling", analytics_enabled=False) as page:
        gr.HTML(_TOP, elem_id="top")
        with gr.Tab("Overview"):
            overview_tab(page, services)
        with gr.Tab("Disagreements"):
            disagreements_tab(page, services)
        with gr.Tab("Import"):
            import_tab(services)
        with gr.Tab("Batches"):
            batches_tab(page, services)
        with gr.Tab("Rules and guidelines"):
            texts_tab(page, services)
        with gr.Tab("Model"):
            models_tab(page, services)
        with gr.Tab("Users"):
            users_tab(page, services)
        with gr.Tab("Export"):
            export_tab(services)
    return page
