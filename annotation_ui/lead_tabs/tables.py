"""HTML tables of the lead's page. Rows can be selected by mouse or keyboard.

Text comes from prompts, models and users. It is escaped, and cannot run as a formula when copied into a spreadsheet.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

from annotation_ui.lead_tabs.common import LAST_COUNTS
from annotation_ui.reports.row_files import plain_cell

# Clicking a row, or pressing Enter on the button in its first cell, selects it.
_CHOOSE = """
element.addEventListener('click', (event) => {
  const row = event.target.closest('[data-key]');
  if (!row) return;
  element.querySelectorAll('.picked').forEach((other) => other.classList.remove('picked'));
  row.classList.add('picked');
  trigger('select');
});
"""


_LONG = 30  # characters; cells with longer text get a minimum width, and the table scrolls
_TIMES = ("at", "added", "last used")  # columns with times in seconds since 1970
_HEADS = {"labelers_per_item": "per item", "complete": "imported", "at": "when", "percent": "%", "slots": "wanted"}


def table(label: str, elem_id: str | None = None) -> gr.HTML:
    """Build a titled table for the output of `show`. `when_picked` needs `elem_id`."""
    html = f'<section class="lead-table"><h2>{escape(label)}</h2>${{value}}</section>'
    return gr.HTML(
        '<p class="loading">Loading…</p>', html_template=html, js_on_load=_CHOOSE, apply_default_css=False, elem_id=elem_id
    )


def when_picked(
    rows: gr.HTML, action: Callable[..., Any], inputs: Sequence[Component], outputs: Any, **options: Any
) -> Dependency:
    """Call `action(*inputs, key)` whenever a row of a table is selected.

    JavaScript reads the key when the request is sent, not when the row is clicked. If several rows are clicked while a
    request is pending, Gradio sends one more request, for the last row. The event data cannot be used because a delayed
    event carries the data of the first click, and parallel requests could arrive out of order.
    """
    key = gr.Textbox(visible=False)
    picked = f"document.querySelector('#{rows.elem_id} .picked')?.dataset.key ?? ''"  # empty if the list was replaced

    def act(*values: Any) -> Any:
        return action(*values) if values[-1] else gr.skip()

    read_key = f"(...values) => [...values.slice(0, -1), {picked}]"
    return rows.select(act, [*inputs, key], outputs, js=read_key, **{**LAST_COUNTS, **options})


def show(rows: Sequence[dict[str, Any]], empty: str, key: str = "", picked: Any = None) -> str:
    """Return the rows as an HTML table.

    Args:
        rows: dictionaries with the same keys. The keys are the column headings. `percent` is drawn as a bar, and `at`,
            `added` and `last used` are formatted as times.
        empty: text to show if there are no rows.
        key: column that identifies a row. If empty, rows cannot be selected.
        picked: key of the selected row.
    """
    if not rows:
        return f'<p class="empty">{escape(empty)}</p>'
    columns = list(rows[0])
    head = "".join(f'<th scope="col">{escape(_HEADS.get(column, column))}</th>' for column in columns)
    body = "".join(_row(row, columns, key, picked) for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(row: dict[str, Any], columns: list[str], key: str, picked: Any) -> str:
    cells, attributes = [_cell(column, row[column]) for column in columns], ""
    if key:
        cells[0] = cells[0][0], f'<button type="button">{cells[0][1]}</button>'
        attributes = f' data-key="{escape(str(row[key]))}"' + (' class="picked"' if row[key] == picked else "")
    return f"<tr{attributes}>{''.join(f'<td{kind}>{text}</td>' for kind, text in cells)}</tr>"


def _cell(column: str, value: Any) -> tuple[str, str]:
    """Return the attributes and the content of a cell."""
    if value is None or value == "":
        return "", '<span class="none">–</span>'
    if isinstance(value, bool):
        return "", "yes" if value else "no"
    if column == "percent":
        return ' class="number"', f'<span class="bar"><span style="width:{value:.0f}%"></span></span>{value:g} %'
    if column in _TIMES:
        return ' class="time"', datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M UTC")
    if isinstance(value, int | float):
        return ' class="number"', f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return ' class="long"' if len(str(value)) > _LONG else "", escape(plain_cell(str(value)))
