"""A field for a file to upload, and links to exports: what Gradio's own file component would copy (see `transfers`)."""

from __future__ import annotations

import html
from pathlib import Path

import gradio as gr

from annotation_ui.server.transfers import EXPORT_PATH


def file_field(elem_id: str, label: str, suffixes: tuple[str, ...], most_bytes: int) -> gr.Textbox:
    """Show a field for one file; its value is the event's first input and carries the upload's key.

    The event needs `js=send_file(elem_id)`, which sends the file when the button is pressed.
    """
    gr.HTML(
        f'<label class="file-field"><span>{html.escape(label)}</span> '
        f'<input type="file" accept="{",".join(suffixes)}" data-most="{most_bytes}"></label>',
        elem_id=elem_id,
    )
    return gr.Textbox(visible=False)


def send_file(elem_id: str) -> str:
    """The JavaScript that puts the upload's key in place of the event's first input."""
    return f"async (_, ...rest) => [await (await import('/ui/files.js')).upload('{elem_id}'), ...rest]"


def export_links(paths: list[Path]) -> str:
    """Links that download exported files."""
    links = [
        f'<li><a href="{EXPORT_PATH}/{html.escape(path.name)}" download>{html.escape(path.name)}</a></li>' for path in paths
    ]
    return f'<ul class="downloads">{"".join(links)}</ul>'
