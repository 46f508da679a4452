"""The lead's page at /lead: a Gradio page with tabs. The guard lets only leads reach it and its API.

Nothing is kept in Gradio's state: every table is read from the database each time it is shown.
"""

from typing import cast

import gradio as gr

from annotation_ui.lead_tabs.batches import batches_tab
from annotation_ui.lead_tabs.export import export_tab
from annotation_ui.lead_tabs.hours import hours_tab
from annotation_ui.lead_tabs.imports import import_tab
from annotation_ui.lead_tabs.items import items_tab
from annotation_ui.lead_tabs.labelers import disagreements_tab, labelers_tab
from annotation_ui.lead_tabs.models import models_tab
from annotation_ui.lead_tabs.overview import overview_tab
from annotation_ui.lead_tabs.rules_and_guidelines import rules_and_guidelines_tab
from annotation_ui.lead_tabs.users import users_tab
from annotation_ui.server.services import Services

HEAD = "".join(f'<link rel="stylesheet" href="/ui/{name}.css">' for name in ("theme", "markdown", "lead"))

_TOP = """
<span class="brand" aria-hidden="true"><span></span><span></span><span></span></span><h1>Lead</h1>
<nav><a href="/">Label</a> <a href="/password">Change password</a>
<form method="post" action="/logout"><button>Sign out</button></form></nav>
"""


def lead_page(services: Services) -> gr.Blocks:
    """Build the page with all of its tabs."""
    with gr.Blocks(title="Lead · Labeling", analytics_enabled=False) as page:
        gr.HTML(_TOP, elem_id="top")
        with gr.Tabs(overflow_behavior="wrap"):  # all of them in sight, on a phone, too
            with gr.Tab("Overview"):
                overview_tab(page, services)
            with gr.Tab("Labelers") as tab:
                labelers_tab(tab, services)
            with gr.Tab("Hours") as tab:
                hours_tab(tab, services)
            with gr.Tab("Items") as tab:
                items_tab(tab, services)
            with gr.Tab("Disagreements") as tab:
                disagreements_tab(tab, services)
            with gr.Tab("Import"):
                import_tab(services)
            with gr.Tab("Batches") as tab:
                batches_tab(tab, services)
            with gr.Tab("Rules and guidelines") as tab:
                rules_and_guidelines_tab(tab, services)
            with gr.Tab("Model"):
                models_tab(page, services)
            with gr.Tab("Users") as tab:
                users_tab(tab, services)
            with gr.Tab("Export"):
                export_tab(services)
    return cast(gr.Blocks, page)
