"""Export tab: download judgments as files."""

from datetime import UTC, datetime
from typing import Any

import gradio as gr

from align.core.errors import UserError
from annotation_ui.lead_tabs.common import LAST_COUNTS, batch_names, export_links, show_user_errors, user_id
from annotation_ui.reports.export import SKIPS, Selection, export, records
from annotation_ui.reports.row_files import FORMATS
from annotation_ui.server.services import Services
from annotation_ui.server.transfers import new_export_path
from annotation_ui.store.audit import Actor
from annotation_ui.tasks import TASKS


def export_tab(services: Services) -> None:
    """Build the form for an export."""
    with gr.Row():
        record = gr.Dropdown(list(records()), value="rankings", label="Records")
        kind = gr.Dropdown(list(FORMATS), value="jsonl", label="Format (csv is for spreadsheets)")
        batches = gr.Dropdown([], label="Batches (empty: all)", multiselect=True)
    with gr.Row():
        aggregated = gr.Checkbox(label="One row per item (aggregated)")
        gold = gr.Checkbox(label="Include items with known answers")
        preferences = gr.Checkbox(label="Add preference probabilities", visible=False)
        times = gr.Checkbox(label="Add times and guideline versions")
        since = gr.Textbox(label="Judged since (UTC)", placeholder="2026-01-31 12:00", max_length=40)
    button = gr.Button("Export", variant="primary")
    files = gr.HTML()
    manifest = gr.JSON(label="Manifest")

    def show_fields(record: str, aggregated: bool) -> list[Any]:
        """Show only the options that apply to these records."""
        ranked, skips = record == "rankings", record == SKIPS
        combined = any(TASKS[name].comparable for name in records()[record]) and not skips
        visible = (combined, not skips, ranked and aggregated, not (combined and aggregated))
        return [gr.update(visible=shown) for shown in visible]

    def list_batches() -> Any:
        return gr.update(choices=batch_names(services))

    def write_export(
        record: str,
        kind: str,
        batches: list[str],
        aggregated: bool,
        gold: bool,
        preferences: bool,
        times: bool,
        since: str | None,
        request: gr.Request,
    ) -> tuple[str, dict[str, Any]]:
        ranked = record == "rankings"  # ignore options that are hidden for these records
        together = aggregated and record != SKIPS
        options = (gold and record != SKIPS, preferences and ranked and together, times and not together)
        selection = Selection(record, together, _moment(since), tuple(batches or ()), *options)
        path = new_export_path(services.settings, record, kind)
        manifest = export(services.database, selection, path, Actor(user_id(services, request)))
        return export_links([path, path.with_name(f"{path.name}.manifest.json")]), manifest

    gr.on(
        [record.change, aggregated.change],
        show_fields,
        [record, aggregated],
        [aggregated, gold, preferences, times],
        **LAST_COUNTS,
    )
    batches.focus(list_batches, None, batches, show_progress="hidden")
    fields = [record, kind, batches, aggregated, gold, preferences, times, since]
    button.click(show_user_errors(write_export), fields, [files, manifest])


def _moment(text: str | None) -> float | None:
    """Parse a time, by default in UTC, into seconds since 1970. Return None for empty text."""
    if not text or not text.strip():
        return None
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UserError(f"invalid time {text!r}: use a format such as 2026-01-31 12:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
