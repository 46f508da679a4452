"""Items tab: browse items and judgments, including skipped and stuck items."""

import re
from difflib import SequenceMatcher
from html import escape
from typing import Any

import gradio as gr

from annotation_ui.lead_tabs.common import LAST_COUNTS, batch_names, user_names
from annotation_ui.lead_tabs.tables import show, table, when_picked
from annotation_ui.rendering.markdown import text_view
from annotation_ui.reports.browsing import PAGE, STATES, Filter, browse_items, browse_judgments, item_history
from annotation_ui.server.services import Services
from annotation_ui.store.schema import PURPOSES, Batch, Item
from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.fields import model_names, prompt_view

_NOTHING = "No matches. Remove filters, or import a batch."


def items_tab(tab: gr.Tab, services: Services) -> None:
    """Build the filters, the list of results, and the view of one item."""
    filters = [(text, value) for task in TASKS.values() for value, text in task.answer_filters.items()]
    with gr.Row():
        what = gr.Radio(["Items", "Judgments"], value="Items", label="Show", scale=1)
        text = gr.Textbox(label="Text", placeholder="in the prompt, responses, id or answer", max_length=200, scale=2)
        find = gr.Button("Find", variant="primary", scale=0)
    with gr.Row():
        batch = gr.Dropdown([("any", "")], value="", label="Batch")
        labeler = gr.Dropdown([("any", "")], value="", label="Labeler")
        state = gr.Dropdown([(label, name) for name, label in STATES.items()], value="", label="State")
        flag = gr.Dropdown([("any", ""), *filters], value="", label="Flag or answer")
        purpose = gr.Dropdown([("any", ""), *((name, name) for name in PURPOSES)], value="", label="Purpose")
    found = table("Results", "found")
    last = gr.Number(0, visible=False, precision=0)
    more = gr.Button("Show the next page", visible=False)
    item = gr.HTML(apply_default_css=False, elem_id="one-item")

    def list_page(start: int, what: str, *values: str) -> tuple[str, Any, Any, str]:
        wanted = Filter(*(value or "" for value in values))
        with services.database.read() as session:
            browse = browse_items if what == "Items" else browse_judgments
            rows, is_more = browse(session, wanted, start)
        end = rows[-1]["item" if what == "Items" else "judgment"] if rows else 0
        button = gr.update(visible=is_more, value=f"Show the next {PAGE}")
        return show(rows, _NOTHING, key="item"), end, button, ""

    def first_page(*values: str) -> tuple[str, Any, Any, str]:
        return list_page(0, *values)

    def next_page(start: float, *values: str) -> tuple[str, Any, Any, str]:
        return list_page(int(start), *values)

    def show_item(number: str) -> str:
        with services.database.read() as session:
            known = item_history(session, int(number))
        return item_html(*known) if known else ""

    def list_choices() -> tuple[Any, Any]:
        batches, users = batch_names(services), user_names(services)
        return gr.update(choices=[("any", ""), *batches]), gr.update(choices=[("any", ""), *users])

    conditions = [what, batch, labeler, state, flag, text, purpose]
    outputs = [found, last, more, item]
    tab.select(list_choices, None, [batch, labeler], show_progress="hidden")
    chosen = [tab.select, find.click, text.submit, *(field.change for field in (what, batch, labeler, state, flag, purpose))]
    gr.on(chosen, first_page, conditions, outputs, **LAST_COUNTS)
    more.click(next_page, [last, *conditions], outputs, show_progress="hidden")
    when_picked(found, show_item, [], item).then(
        None, js="() => document.querySelector('#one-item').scrollIntoView({ block: 'start' })"
    )


def item_html(item: Item, batch: Batch, history: list[Json]) -> str:
    """Render an item for a lead, with responses in the imported order, model names, and history."""
    content = item.content
    prompt = "".join(
        f'<h3>{escape(message["role"].capitalize())}</h3><div class="markdown" dir="auto">{message["html"]}</div>'
        for message in prompt_view(content["prompt"])
    )
    responses = content.get("responses") or ([content["response"]] if "response" in content else [])
    models = model_names(content, len(responses))
    cards = "".join(
        f'<article class="answer"><h3>{chr(65 + i)}{f" · {escape(str(model))}" if model else ""}</h3>'
        f'<div class="markdown" dir="auto">{text_view(response)["html"]}</div></article>'
        for i, (response, model) in enumerate(zip(responses, models, strict=True))
    )
    known = f"<p><b>Known answer</b> <code>{escape(str(item.gold))}</code></p>" if item.gold else ""
    about = f"Item {item.id} · {escape(item.external_id or 'no id')} · batch {escape(batch.name)} · {item.purpose}"
    rows = [{column: value for column, value in row.items() if column != "written"} for row in history]
    history_html = show(rows, "No activity on this item yet.")
    texts = "".join(written_html(row["labeler"], text, content) for row in history for text in row["written"])
    return (
        f'<section class="one-item"><h2>{about}</h2><div class="prompt">{prompt}</div>'
        f'<div class="answers">{cards}</div>{known}<h2>History</h2>{history_html}{texts}</section>'
    )


def written_html(labeler: str, text: str, content: Json) -> str:
    """Render text written by a labeler. A correction is shown as changes to the model's answer."""
    if "response" not in content:
        return (
            f'<h2>Written by {escape(labeler)}</h2><div class="answer markdown" dir="auto">{text_view(text)["html"]}</div>'
        )
    changes = difference_html(content["response"], text)
    return f'<h2>Corrected by {escape(labeler)}</h2><div class="answer changes" dir="auto">{changes}</div>'


MAX_WORDS = 4000  # before and after together; SequenceMatcher takes quadratic time
_WORD = re.compile(r"\s+|\w+|.", re.DOTALL)


def difference_html(before: str, after: str) -> str:
    """Mark removed words with `<del>` and added words with `<ins>`.

    With more than `MAX_WORDS` words, `before` is marked as removed and `after` as added.
    """
    old, new = _WORD.findall(before), _WORD.findall(after)
    if len(old) + len(new) > MAX_WORDS:
        return _part("del", before) + _part("ins", after)
    parts = []
    for kind, start, end, new_start, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(escape("".join(old[start:end])))
        else:
            parts.append(_part("del", "".join(old[start:end])) + _part("ins", "".join(new[new_start:new_end])))
    return "".join(parts)


def _part(tag: str, text: str) -> str:
    return f"<{tag}>{escape(text)}</{tag}>" if text else ""
