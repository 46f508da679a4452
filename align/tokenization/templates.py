"""Chat templates that ship, the choice of one, and what is written into one so that it gives the same text elsewhere."""

import json
import re
from datetime import date, datetime

from align.core.errors import UserError
from align.core.files import resolve_path

# For a tokenizer without a template: much like the dialogues of HH-RLHF, which base models continue well. Messages
# begin on a new line: a byte-pair tokenizer would join a space to the word after it, and the prompt would end in another
# token than before an earlier answer. Line breaks are quoted because transformers drops one after a `%}`.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'Human', 'assistant': 'Assistant', 'system': 'System'}[m.role] + ':\n' }}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
_RAW_TURNS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
# Text as it is: prompts that a model continues. Each turn of a conversation is on its own line, except a last answer,
# which continues its prompt.
RAW_TEMPLATE = (
    _RAW_TURNS + "{% if not loop.last and not (loop.revindex == 2 and messages[-1].role == 'assistant') %}"
    "{{ '\n' }}{% endif %}{% endfor %}"
)
NAMED_TEMPLATES = {"plain": PLAIN_TEMPLATE, "raw": RAW_TEMPLATE}
# Earlier versions saved this one with their models and trained without its line break before the last answer.
EARLIER_TEMPLATES = {_RAW_TURNS + "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}": RAW_TEMPLATE}

_CALL_OF_DATE = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?("[^"]*"|'[^']*')\s*\)""")
_date = date.today()


def set_template_date(day: str) -> None:
    """Set the date that chat templates loaded from now on read as the current one: the day on which the run started.

    Args:
        day: as in 2026-11-25.
    """
    global _date
    _date = date.fromisoformat(day)


def choose_template(own: str, name: str) -> str:
    """The chat template that a name means.

    Args:
        own: what `auto` means.
        name: `auto`, `plain`, `raw`, or the path of a Jinja file.

    Raises:
        UserError: if the file cannot be read, or computes the format of a date.
    """
    if name == "auto":
        return with_fixed_date(EARLIER_TEMPLATES.get(own, own))
    if name in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[name]
    try:
        return with_fixed_date(resolve_path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"chat_template '{name}': {error.strerror}; give auto, plain, raw or the path of a Jinja file"
        ) from error


def with_fixed_date(template: str) -> str:
    """A template with a constant in place of each call of `strftime_now`, which would give another text tomorrow.

    Raises:
        UserError: if such a call remains because its format is computed.
    """
    now = datetime.combine(_date, datetime.min.time())
    fixed = _CALL_OF_DATE.sub(lambda call: json.dumps(now.strftime(call[1][1:-1]), ensure_ascii=False), template)
    if "strftime_now(" in fixed:
        raise UserError(
            "the chat template calls strftime_now with a computed format, so its text would change during a run; give "
            "another template by chat_template, with the format or the date as a constant"
        )
    return fixed


def literal(text: str) -> str:
    """The Jinja expression that writes a text."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}"
