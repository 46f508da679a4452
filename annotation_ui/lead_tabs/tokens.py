"""The part of the Users tab for programs: their tokens and the audit trail."""

from __future__ import annotations

from typing import Any

import gradio as gr

from align.core.errors import UserError
from annotation_ui.lead_tabs.common import show_user_errors, shown_if, user_id
from annotation_ui.lead_tabs.tables import show, table, when_picked
from annotation_ui.server.services import Services
from annotation_ui.store import audit
from annotation_ui.store.tokens import SCOPES, Tokens

AUDIT_RECORDS = 50
_ABOUT = (
    "A program on another machine uses a token instead of a password. [The API](/lead/api) lists its requests; "
    "`annotation_ui.client` is the Python client."
)


def token_fields(tab: gr.Tab, services: Services) -> None:
    """Build the form for new tokens, their list with a button that revokes one, and the audit trail."""
    tokens = Tokens(services.database)
    gr.Markdown(_ABOUT)
    with gr.Row():
        name = gr.Textbox(label="Token name", max_length=64)
        choices = [(f"{scope}: {allows}", scope) for scope, allows in SCOPES.items()]
        scopes = gr.CheckboxGroup(choices, value=["read"], label="Scopes")
        add = gr.Button("Add token", scale=0)
    listed = table("Tokens (click one to revoke it)", "tokens")
    with gr.Row(visible=False) as on_chosen:
        chosen = gr.Textbox(label="Chosen token", interactive=False)
        revoke = gr.Button("Revoke", variant="stop", scale=0)
    result = gr.Textbox(label="Outcome", interactive=False)
    trail = table("Audit trail: tokens, data, users")

    def list_tokens(picked: str) -> tuple[str, str]:
        with services.database.read() as session:
            records = audit.records(session, AUDIT_RECORDS)
        rows = show(tokens.rows(), "No program has a token.", key="token", picked=picked)
        return rows, show(records, "Nothing yet.")

    def pick(name: str) -> tuple[str, Any]:
        return name, shown_if(name)

    def add_token(name: str, scopes: list[str], request: gr.Request) -> tuple[Any, ...]:
        token = tokens.create(name.strip(), scopes, user_id(services, request))
        return f"Token {name.strip()} (shown only once): {token}", *pick(name.strip())

    def revoke_token(name: str, request: gr.Request) -> str:
        if not name:
            raise UserError("choose a token in the list first")
        tokens.revoke(name, user_id(services, request))
        return f"Token {name} is revoked."

    shown: dict[str, Any] = {"fn": list_tokens, "inputs": chosen, "outputs": [listed, trail], "show_progress": "hidden"}
    tab.select(**shown)
    when_picked(listed, pick, [], [chosen, on_chosen])
    add.click(show_user_errors(add_token), [name, scopes], [result, chosen, on_chosen]).success(**shown)
    revoke.click(show_user_errors(revoke_token), chosen, result).success(**shown)
