"""Chat templates that ship, and the choice of one."""

from align.errors import UserError
from align.shipped import resolve_path

# For a tokenizer without a template: much like the dialogues of HH-RLHF, which base models continue well. Messages
# begin on a new line: a byte-pair tokenizer would join a space to the word after it, and the prompt would end in another
# token than before an earlier answer. Line breaks are quoted because transformers drops one after a `%}`.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'Human', 'assistant': 'Assistant', 'system': 'System'}[m.role] + ':\n' }}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
# Text as it is: prompts that a model continues. Each turn of a conversation is on its own line.
RAW_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
NAMED_TEMPLATES = {"plain": PLAIN_TEMPLATE, "raw": RAW_TEMPLATE}


def choose_template(own: str, name: str) -> str:
    """The chat template that a name means.

    Args:
        own: what `auto` means.
        name: `auto`, `plain`, `raw`, or the path of a Jinja file.

    Raises:
        UserError: if the file cannot be read.
    """
    if name == "auto":
        return own
    if name in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[name]
    try:
        return resolve_path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"chat_template '{name}': {error.strerror}; give auto, plain, raw or the path of a Jinja file"
        ) from error
