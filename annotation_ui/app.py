"""Web application: the guard, the labelers' routes, the plain pages and the two Gradio pages."""

import os
from typing import NoReturn, cast

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before the import; prevents requests to Gradio's server

import gradio as gr
from fastapi import FastAPI, Request

from annotation_ui.lead_tabs.batches import batches_tab
from annotation_ui.lead_tabs.export import export_tab
from annotation_ui.lead_tabs.hours import hours_tab
from annotation_ui.lead_tabs.imports import import_tab
from annotation_ui.lead_tabs.items import items_tab
from annotation_ui.lead_tabs.labelers import disagreements_tab, labelers_tab
from annotation_ui.lead_tabs.models import models_tab
from annotation_ui.lead_tabs.overview import overview_tab
from annotation_ui.lead_tabs.rules_and_guidelines import rules_and_guidelines_tab
from annotation_ui.lead_tabs.theme import lead_theme
from annotation_ui.lead_tabs.users import users_tab
from annotation_ui.server.api import add_routes
from annotation_ui.server.error_pages import add_error_pages
from annotation_ui.server.guard import Guard
from annotation_ui.server.pages import add_pages
from annotation_ui.server.remote_api import add_remote_api
from annotation_ui.server.root_path import BelowRoot, RootPath
from annotation_ui.server.services import Services
from annotation_ui.server.transfers import add_transfers
from annotation_ui.store import rule_sets

SECONDS_BETWEEN_LOOKS = 0.05
_VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'
_TOP = """
<span class="brand" aria-hidden="true"><span></span><span></span><span></span></span><h1>Lead</h1>
<nav><a href="{root}/">Label</a> <a href="{root}/password">Change password</a>
<form method="post" action="{root}/logout"><button>Sign out</button></form></nav>
"""
_START = "import('{root}/ui/workbench.js').then((workbench) => workbench.start(element))"


def create_app(services: Services) -> FastAPI:
    """Build the application. The database must have the newest schema."""
    with services.database.write() as session:
        rule_sets.store_shipped(session)
    app = FastAPI(title="Labeling", docs_url=None, redoc_url=None, openapi_url=None)
    root = services.settings.root_path
    if root:
        app.add_middleware(BelowRoot, root=root)
    app.add_middleware(Guard, auth=services.auth, https=services.settings.https, proxy=services.settings.proxy)
    add_error_pages(app)
    add_pages(app, services)
    add_routes(app, services)
    add_transfers(app, services)
    add_remote_api(app, services)
    mount(app, lead_page(services), "/lead", _style_sheets(root, "theme", "markdown", "lead"), root)
    mount(app, labeler_page(root), "/", _VIEWPORT + _style_sheets(root, "theme", "markdown", "workbench"), root)
    if root:
        app.add_middleware(RootPath, root=root)  # outside the guard, which sees paths without it
    return app


def _style_sheets(root: str, *names: str) -> str:
    return "".join(f'<link rel="stylesheet" href="{root}/ui/{name}.css">' for name in names)


def lead_page(services: Services) -> gr.Blocks:
    """Build the page at /lead. Tables are refreshed each time they are shown."""
    with gr.Blocks(title="Lead · Labeling", analytics_enabled=False) as page:
        gr.HTML(_TOP.format(root=services.settings.root_path), elem_id="top")
        with gr.Tabs(overflow_behavior="wrap"):  # keeps all tabs visible, also on a phone
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


def labeler_page(root: str = "") -> gr.Blocks:
    """Build the page at /. Its only component is the workbench of static/workbench.js.

    The page has no events or inputs, so Gradio's API offers nothing to call. The workbench keeps no state in Gradio. It
    reads the open item from /api and saves every change there.
    """
    with gr.Blocks(title="Labeling", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(
            '<div class="workbench"></div>',
            js_on_load=_START.replace("{root}", root),
            apply_default_css=False,
            elem_id="workbench",
        )
    return cast(gr.Blocks, page)


def mount(app: FastAPI, page: gr.Blocks, path: str, head: str, root: str = "") -> None:
    """Mount a Gradio page that cannot open files. The guard controls access.

    `root` is the root path of a proxy, which precedes `path` in addresses.
    """
    _forbid_files(page)
    gr.mount_gradio_app(
        app,
        page,
        path=path,
        head=head,
        root_path=f"{root}{path}".rstrip("/") if root else None,
        auth_dependency=_signed_in,
        ssr_mode=False,
        show_error=False,
        footer_links=[],
        run_history=False,
        mcp_server=False,
        pwa=False,
        theme=lead_theme(),
    )
    # By default, Gradio polls for events a thousand times a second, which takes 10 % of a core per page on an idle server.
    page._queue.sleep_when_free = SECONDS_BETWEEN_LOOKS


def _forbid_files(page: gr.Blocks) -> None:
    """Prevent events from reading files or fetching addresses named in a request.

    Gradio copies the file named by any {"path": ..., "meta": {"_type": "gradio.FileData"}} in a request. It checks whether
    the path is allowed only if `has_launched` is set, which mounting a page does not do.
    """
    page.has_launched = True
    for block in page.blocks.values():
        block.async_move_resource_to_block_cache = _refuse_file  # type: ignore[method-assign]
        block.move_resource_to_block_cache = _refuse_file  # type: ignore[method-assign]


def _refuse_file(url_or_file_path: object) -> NoReturn:
    raise gr.Error("files are not sent through Gradio", print_exception=False)


def _signed_in(request: Request) -> str | None:
    user = request.state.user
    return user.name if user else None
