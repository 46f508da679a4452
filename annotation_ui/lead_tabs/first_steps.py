"""First steps in an empty app, shown above the overview until all are done."""

from __future__ import annotations

from html import escape

from sqlalchemy import select
from sqlalchemy.orm import Session

from annotation_ui.store.schema import Batch, Export, Guideline, Judgment, User

# (title, what it is good for, the tab that does it, what is there once it is done)
_STEPS = (
    ("Add the people who label", "Each gets a password, which is shown once.", "Users",
     select(User.id).where(User.role == "labeler")),
    ("Write guidelines", "Labelers are asked to read them before they start, and told of every new version.",
     "Rules and guidelines", select(Guideline.id)),
    ("Import a batch", "Prompts or samples as JSON Lines, for example from <code>align sample</code>.", "Import",
     select(Batch.id)),
    ("Let people label", "They sign in at this address and see the batch at once.", "Items", select(Judgment.id)),
    ("Export", "The files are what <code>align reward</code> and <code>align sft</code> read.", "Export",
     select(Export.id)),
)  # fmt: skip


def first_steps_html(session: Session) -> str:
    """The list of steps with those that are done ticked, or nothing if all are."""
    done = [session.scalar(query.limit(1)) is not None for *_, query in _STEPS]
    if all(done):
        return ""
    current = done.index(False)
    rows = "".join(
        f'<li class="{"done" if done[i] else "current" if i == current else ""}">'
        f'<button type="button" data-tab="{escape(tab)}">{escape(title)}</button>'
        f'<span class="visually-hidden">{"done" if done[i] else "to do"}</span><p>{why}</p></li>'
        for i, (title, why, tab, _) in enumerate(_STEPS)
    )
    return f'<section class="first-steps"><h2>First steps</h2><ol>{rows}</ol></section>'


# A step opens its tab.
OPEN_TAB = """
element.addEventListener('click', (event) => {
  const step = event.target.closest('[data-tab]');
  if (!step) return;
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  tabs.find((tab) => tab.textContent.trim() === step.dataset.tab)?.click();
});
"""
