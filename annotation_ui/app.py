"""The web application: the guard in front, the labelers' routes, the pages, and Gradio's two pages mounted."""

from __future__ import annotations

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before Gradio is imported: it would look for the internet

import gradio as gr
from fastapi import FastAPI, Request

from annotation_ui import labeler, lead, rule_sets
from annotation_ui.api import add_routes
from annotation_ui.guard import Guard
from annotation_ui.labeler import labeler_page
from annotation_ui.lead import lead_page
from annotation_ui.pages import add_pages
from annotation_ui.services import Services

_THEME = gr.themes.Base(primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]).set(
    button_primary_background_fill="*primary_700", button_primary_background_fill_hover="*primary_600"
)


def create_app(services: Services) -> FastAPI:
    """The application on a database that is migrated already."""
    with services.database.write() as session:
        rule_sets.store_shipped(session)
    app = FastAPI(title="Labelling", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, auth=services.auth)
    add_pages(app, services)
    add_routes(app, services)
    services.settings.exports.mkdir(parents=True, exist_ok=True)
    mount(app, lead_page(services), "/lead", lead.HEAD, [str(services.settings.exports)])
    mount(app, labeler_page(), "/", labeler.HEAD, [])
    return app


def mount(app: FastAPI, page: gr.Blocks, path: str, head: str, allowed_paths: list[str]) -> None:
    """Put a Gradio page on the app; the guard has let only those in who may see it."""
    gr.mount_gradio_app(
        app,
        page,
        path=path,
        head=head,
        allowed_paths=allowed_paths,
        auth_dependency=_signed_in,
        ssr_mode=False,
        show_error=False,
        footer_links=[],
        run_history=False,
        mcp_server=False,
        pwa=False,
        max_file_size="256mb",
        theme=_THEME,
    )


def _signed_in(request: Request) -> str | None:
    user = request.state.user
    return user.name if user else None
