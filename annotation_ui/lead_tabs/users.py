"""Users tab: manage users, roles and API tokens, and show the audit trail."""

from dataclasses import dataclass
from typing import Any

import gradio as gr
from sqlalchemy import select

from annotation_ui.lead_tabs.common import hide, show_user_errors, shown_if, user_id
from annotation_ui.lead_tabs.tables import show, table, when_picked
from annotation_ui.server.services import Services
from annotation_ui.store import audit
from annotation_ui.store.schema import USER_ROLES, User
from annotation_ui.store.tokens import SCOPES, Tokens


def users_tab(tab: gr.Tab, services: Services) -> None:
    """Build the form for new users and the list of users. Clicking a user shows the buttons that edit it."""
    with gr.Row():
        name = gr.Textbox(label="Name", max_length=64)
        role = gr.Dropdown(list(USER_ROLES), value="labeler", label="Role")
        add = gr.Button("Add", variant="primary", scale=0)
    users = table("Users (click to edit)", "users")
    with gr.Row(visible=False) as on_chosen:
        chosen = gr.Textbox(label="Selected user", interactive=False)
        reset, change = gr.Button("New password"), gr.Button("Change role")
        deactivate, reactivate = gr.Button("Deactivate"), gr.Button("Reactivate")
    with gr.Row(visible=False) as confirm:
        question = gr.Markdown()
        yes, no = gr.Button("Yes, deactivate", variant="stop", scale=0), gr.Button("Cancel", scale=0)
    result = gr.Textbox(label="Result", interactive=False)

    actions = _UserActions(services)
    tab.select(actions.list_users, chosen, users, show_progress="hidden")
    when_picked(users, actions.pick, [], [chosen, on_chosen, confirm])
    added = add.click(show_user_errors(actions.add), [name, role], [result, chosen, on_chosen, confirm])
    added.success(actions.list_users, chosen, users)
    deactivate.click(show_user_errors(actions.ask_to_deactivate), chosen, [confirm, question])
    no.click(hide, None, confirm, show_progress="hidden")
    for button, action in (
        (reset, actions.reset_password),
        (change, actions.change_role),
        (yes, actions.deactivate),
        (reactivate, actions.reactivate),
    ):
        done = button.click(show_user_errors(action), chosen, result).success(actions.list_users, chosen, users)
        done.then(hide, None, confirm, show_progress="hidden")
    token_fields(tab, services)


@dataclass(frozen=True)
class _UserActions:
    """Event handlers of the tab. Each takes field values and returns updates of other fields."""

    services: Services

    def list_users(self, picked: str | None) -> str:
        with self.services.database.read() as session:
            rows = [
                {
                    "name": user.name,
                    "role": user.role,
                    "active": user.active,
                    "exported as": user.pseudonym,
                    "added": user.created_at,
                }
                for user in session.scalars(select(User).order_by(User.name))
            ]
        return show(rows, "No users.", key="name", picked=picked)

    def pick(self, name: str) -> tuple[str, Any, Any]:
        """Show the buttons for the selected user, and hide the confirmation for a previous one."""
        return name, shown_if(name), hide()

    def add(self, name: str, role: str) -> tuple[Any, ...]:
        password = self.services.auth.create_user(name, role)
        message = f"Password of {name} (shown only once): {password}"
        return message, *self.pick(name)

    def reset_password(self, name: str) -> str:
        return f"Password of {name} (shown only once): {self.services.auth.set_password(name)}"

    def change_role(self, name: str) -> str:
        with self.services.database.read() as session:
            is_lead = session.scalar(select(User.role).where(User.name == name)) == "lead"
        role = "labeler" if is_lead else "lead"
        self.services.auth.set_role(name, role)
        return f"{name} is now a {role}."

    def ask_to_deactivate(self, name: str) -> tuple[Any, str]:
        effect = "The user is signed out immediately and cannot sign in. Their judgments are kept."
        return gr.update(visible=True), f"Deactivate **{name}**? {effect}"

    def deactivate(self, name: str) -> str:
        self.services.auth.set_active(name, False)
        return f"{name} is signed out and cannot sign in."

    def reactivate(self, name: str) -> str:
        self.services.auth.set_active(name, True)
        return f"{name} can sign in."


AUDIT_RECORDS = 50
_ABOUT = (
    "Programs on other machines use tokens instead of passwords. See the [API documentation](api) and the Python client "
    "`annotation_ui.client`."
)


def token_fields(tab: gr.Tab, services: Services) -> None:
    """Build the form for new tokens, the list of tokens with the Revoke button, and the audit trail."""
    tokens = Tokens(services.database)
    gr.Markdown(_ABOUT)
    with gr.Row():
        name = gr.Textbox(label="Token name", max_length=64)
        choices = [(f"{scope}: {allows}", scope) for scope, allows in SCOPES.items()]
        scopes = gr.CheckboxGroup(choices, value=["read"], label="Scopes")
        add = gr.Button("Add token", scale=0)
    listed = table("Tokens (click to revoke)", "tokens")
    with gr.Row(visible=False) as on_chosen:
        chosen = gr.Textbox(label="Selected token", interactive=False)
        revoke = gr.Button("Revoke", variant="stop", scale=0)
    result = gr.Textbox(label="Token status", interactive=False)
    trail = table("Audit trail")

    def list_tokens(picked: str) -> tuple[str, str]:
        with services.database.read() as session:
            records = audit.records(session, AUDIT_RECORDS)
        rows = show(tokens.rows(), "No tokens.", key="token", picked=picked)
        return rows, show(records, "No records yet.")

    def pick(name: str) -> tuple[str, Any]:
        return name, shown_if(name)

    def add_token(name: str, scopes: list[str], request: gr.Request) -> tuple[Any, ...]:
        token = tokens.create(name.strip(), scopes, user_id(services, request))
        return f"Token {name.strip()} (shown only once): {token}", *pick(name.strip())

    def revoke_token(name: str, request: gr.Request) -> str:
        tokens.revoke(name, user_id(services, request))
        return f"Revoked token {name}."

    shown: dict[str, Any] = {"fn": list_tokens, "inputs": chosen, "outputs": [listed, trail], "show_progress": "hidden"}
    tab.select(**shown)
    when_picked(listed, pick, [], [chosen, on_chosen])
    add.click(show_user_errors(add_token), [name, scopes], [result, chosen, on_chosen]).success(**shown)
    revoke.click(show_user_errors(revoke_token), chosen, result).success(**shown)
