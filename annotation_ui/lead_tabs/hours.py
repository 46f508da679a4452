"""Hours tab: show active hours and items per labeler and day, and export them as CSV for payment."""

from datetime import date

import gradio as gr

from align.core.errors import UserError
from annotation_ui.lead_tabs.common import export_links, show_user_errors
from annotation_ui.lead_tabs.tables import show, table
from annotation_ui.reports.hours import COLUMNS, GAP_S, hours, today
from annotation_ui.reports.row_files import to_csv, write_file
from annotation_ui.server.services import Services
from annotation_ui.server.transfers import new_export_path
from annotation_ui.tasks import Json

_ABOUT = (
    "Active time is measured in the browser while a labeler works on an item. Pauses between answers count up to a limit. "
    "Days are in UTC."
)
_NONE = "No work in this period."


def hours_tab(tab: gr.Tab, services: Services) -> None:
    """Build the date fields, the table, and the button that exports it."""
    gr.Markdown(_ABOUT)
    with gr.Row():
        first = gr.Textbox(label="First day", placeholder="2026-01-01", max_length=10)
        last = gr.Textbox(label="Last day", placeholder="2026-01-31", max_length=10)
        gap = gr.Number(GAP_S / 60, label="Longest counted pause (minutes)", minimum=0)
    with gr.Row():
        refresh, save = gr.Button("Show", variant="primary"), gr.Button("CSV file")
    worked = table("Hours", "hours")
    files = gr.HTML()

    def rows(first: str, last: str, gap: float | None) -> list[Json]:
        with services.database.read() as session:
            return hours(session, _day(first), _day(last), 60 * (gap or 0))

    def list_hours(first: str, last: str, gap: float | None) -> str:
        return show(rows(first, last, gap), _NONE)

    def write_hours(first: str, last: str, gap: float | None) -> tuple[str, str]:
        found = rows(first, last, gap)
        path = new_export_path(services.settings, "hours", "csv")
        write_file(path, to_csv(found, COLUMNS))
        return show(found, _NONE), export_links([path])

    def begin_month(first: str) -> str:
        return first or today().replace(day=1).isoformat()

    fields = [first, last, gap]
    opened = tab.select(begin_month, first, first, show_progress="hidden")
    opened.then(show_user_errors(list_hours), fields, worked, show_progress="hidden")
    refresh.click(show_user_errors(list_hours), fields, worked)
    save.click(show_user_errors(write_hours), fields, [worked, files])


def _day(text: str) -> date | None:
    """Parse a date. Return None for empty text."""
    try:
        return date.fromisoformat(text.strip()) if text.strip() else None
    except ValueError:
        raise UserError(f"'{text}' is not a day such as 2026-01-31") from None
