"""Chat templates, and rendering of conversations: text, token ids, dropped turns."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import mark_control_tokens

from align.core.errors import UserError, first_line
from align.core.files import resolve_path
from align.data.records import Conversation

# Default template in the style of HH-RLHF. Messages start on a new line, because a
# byte-pair tokenizer would merge a space with the next word. Newlines are quoted: transformers drops one after a `%}`.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'Human', 'assistant': 'Assistant', 'system': 'System'}[m.role] + ':\n' }}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
# Plain text: one turn per line, except for a final answer, which continues its prompt.
RAW_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% if not loop.last and not (loop.revindex == 2 and messages[-1].role == 'assistant') %}"
    "{{ '\n' }}{% endif %}{% endfor %}"
)
NAMED_TEMPLATES = {"plain": PLAIN_TEMPLATE, "raw": RAW_TEMPLATE}
_CALL_OF_DATE = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?("[^"]*"|'[^']*')\s*\)""")
_date = date.today()


def set_template_date(day: str) -> None:
    """Set the date, such as 2026-11-25, that subsequently loaded chat templates use as the current date."""
    global _date
    _date = date.fromisoformat(day)


def template_date() -> str:
    """Return the date that chat templates use as the current date."""
    return _date.isoformat()


def choose_template(own: str | Mapping[str, str], name: str) -> str:
    """Return a chat template.

    Args:
        own: template of the tokenizer, or a mapping of names to templates.
        name: `auto` (the tokenizer's template), `plain`, `raw`, the path of a Jinja file, or a name in `own`. May end with
            template variables, as in `auto[enable_thinking=false]`.
    """
    name, variables = _split_variables(name)
    if isinstance(own, Mapping) and (name in own or name == "auto"):
        if name == "auto" and "default" not in own:
            raise UserError(
                f"the tokenizer has the chat templates {', '.join(own)} and no default; name one, such as chat_template "
                f"{min(own)}"
            )
        template = _with_fixed_date(own["default" if name == "auto" else name])
    elif name == "auto":
        template = _with_fixed_date(str(own))
    elif name in NAMED_TEMPLATES:
        template = NAMED_TEMPLATES[name]
    else:
        try:
            template = _with_fixed_date(resolve_path(name).read_text(encoding="utf-8"))
        except OSError as error:
            named = f", {', '.join(own)}" if isinstance(own, Mapping) else ""
            wrong = f"chat_template '{name}': {error.strerror}"
            raise UserError(f"{wrong}; use auto, plain, raw{named} or the path of a Jinja file") from error
    return _with_variables(template, variables)


_VARIABLES = re.compile(r"(?P<name>[^\[\]]+)\[(?P<variables>[^\[\]]*)\]\s*")


def _split_variables(name: str) -> tuple[str, dict[str, object]]:
    """Parse `NAME[VARIABLE=VALUE, ...]`. A value is JSON, or text without quotes."""
    match = _VARIABLES.fullmatch(name)
    if match is None or resolve_path(name).exists():
        return name, {}
    variables: dict[str, object] = {}
    for part in match["variables"].split(","):
        variable, equals, value = (word.strip() for word in part.partition("="))
        if not (equals and value and variable.isidentifier()):
            raise UserError(f"chat_template '{name}': use [VARIABLE=VALUE, ...], such as auto[enable_thinking=false]")
        try:
            variables[variable] = json.loads(value.lower() if value in ("True", "False", "None") else value)
        except ValueError:
            variables[variable] = value
    return match["name"].strip(), variables


def _with_variables(template: str, variables: Mapping[str, object]) -> str:
    """Set variables at the beginning of a template, so that every program that renders it uses them."""
    if not variables:
        return template
    read = _variables_of(template)
    for variable in variables:
        if variable not in read:
            raise UserError(
                f"chat_template: the template does not use the variable '{variable}'; it uses "
                f"{', '.join(sorted(read)) or 'none'}"
            )
    values = {name: "none" if value is None else json.dumps(value, ensure_ascii=False) for name, value in variables.items()}
    return "".join(f"{{% set {name} = {value} %}}" for name, value in values.items()) + template


def _variables_of(template: str) -> set[str]:
    try:
        # `generation` is a transformers extension that marks assistant turns, not a Jinja tag.
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", template))
    except TemplateError as error:
        raise UserError(f"chat_template: invalid template ({first_line(error)})") from error
    return find_undeclared_variables(parsed) - {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}


_GENERATION_TAG = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


def _with_fixed_date(template: str) -> str:
    """Replace each call of `strftime_now` with a constant, because its result changes from day to day."""
    now = datetime.combine(_date, datetime.min.time())
    fixed = _CALL_OF_DATE.sub(lambda call: json.dumps(now.strftime(call[1][1:-1]), ensure_ascii=False), template)
    if "strftime_now(" in fixed:
        raise UserError(
            "the chat template calls strftime_now with a computed format, so its text would change during a run; give "
            "another template by chat_template, with the format or the date as a constant"
        )
    return fixed


def _literal(text: str) -> str:
    """Return the Jinja expression for a string."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}"


class ConversationError(UserError):
    """Raised for text that the tokenizer or its chat template drops, changes or cannot represent.

    Callers add the name of the record.
    """


class ChatRenderer:
    """A tokenizer with a chat template that gives the same token ids in every program.

    The template is completed with the tokens that the tokenizer adds to all text: a named template with those at the start
    (Llama: `<s>`), and the template of an encoder-decoder with those at the end (T5: `</s>`). It becomes the tokenizer's
    default `chat_template`, in place, because other programs prompt a saved model through it.

    Args:
        tokenizer: tokenizer, whose `chat_template` is replaced.
        chat_template: see `choose_template`. For a tokenizer without a template, `auto` is `plain`.
        encoder_decoder: whether the model is an encoder-decoder.
        reads_pairs: whether the model reads text pairs. The template then defaults to `raw` and is not completed.

    Raises:
        UserError: If the template cannot be read or drops a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str, encoder_decoder: bool, reads_pairs: bool
    ) -> None:
        self.tokenizer, self.encoder_decoder = tokenizer, encoder_decoder
        tokenizer_template = tokenizer.chat_template
        template = self.template = choose_template(
            tokenizer_template or (RAW_TEMPLATE if reads_pairs else PLAIN_TEMPLATE), chat_template
        )
        self.opening_ids, after = self.automatic_tokens()
        self.closing_ids = after if encoder_decoder else []
        added = tokenizer.added_tokens_decoder
        # Llama 3 and Phi 3 list the end-of-turn token only among the added tokens.
        self.special_ids = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        unknown = tokenizer.unk_token_id  # GPT-2 uses EOS
        self.unknown_id = None if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id) else unknown
        # Gemma and GPT-NeoX list newlines and runs of spaces among the added tokens.
        self._spellings = {id: token.content for id, token in added.items() if not token.content.isspace()}
        # Some templates mark turns with tokens that are not special (Command R). In an answer, such a token is allowed:
        # models write `<think>`.
        controls = (text for id, text in self._spellings.items() if id in self.special_ids or text in template)
        self._control_tokens = _any_of(controls)
        self._special_tokens = self._spelled_special_tokens()
        self._dropped: dict[tuple[str, ...], str] = {}
        self.template = template if reads_pairs else self._complete(template)
        named = tokenizer.chat_template
        tokenizer.chat_template = {**named, "default": self.template} if isinstance(named, dict) else self.template
        self.require_turns(({"role": "user", "content": "Hi"},))

    def _spelled_special_tokens(self) -> re.Pattern[str]:
        return _any_of(text for id, text in self._spellings.items() if id in self.special_ids)

    def reserve(self, token: int) -> bool:
        """Treat an added token as special, because it ends turns. Return False if it is not an added token."""
        if token in self._spellings:
            self.special_ids |= {token}
            self._special_tokens = self._spelled_special_tokens()
        return token in self._spellings

    def automatic_tokens(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer adds before and after all text (Llama: `<s>` before; T5: `</s>` after)."""
        plain, full = self.template_ids("a"), self.tokenizer("a").input_ids
        start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        return full[:start], full[start + len(plain) :]

    def _complete(self, template: str) -> str:
        if template in NAMED_TEMPLATES.values() and self.opening_ids:
            opening = self._spelled(self.opening_ids)
            # Llama 2's tokenizer prepends a space to the first word, but not after a special token.
            text = "Human:"
            expected = [*self.opening_ids, *self.template_ids(text)]
            gaps = [gap for gap in ("", " ") if self.template_ids(opening + gap + text) == expected]
            template = _literal(opening + (gaps[0] if gaps else "")) + template
        if self.closing_ids:
            self.template = template
            ids = self.template_ids(self.render(({"role": "user", "content": "Hi"},)))
            if ids[-len(self.closing_ids) :] != self.closing_ids:
                closing = _literal(self._spelled(self.closing_ids))
                template += "{% if add_generation_prompt %}" + closing + "{% endif %}"
        return template

    def _spelled(self, ids: list[int]) -> str:
        return "".join(self.tokenizer.convert_ids_to_tokens(ids))

    def render(self, messages: Conversation, generation_prompt: bool = True) -> str:
        """Render a conversation as text.

        Args:
            messages: conversation.
            generation_prompt: whether to open the assistant's next turn.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": message["role"], "content": message["content"]} for message in messages],
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # templates are external code
            raise ConversationError(
                f"the chat template fails for a conversation of {_roles(messages)} ({first_line(error)}); mend it, or give "
                "another by chat_template: plain, raw or the path of a Jinja file"
            ) from error
        assert isinstance(text, str)
        return text

    def require_turns(self, messages: Conversation) -> None:
        """Raise ConversationError if the template drops a turn, as Phi-3's first template drops system turns.

        Each sequence of roles is rendered once, with a marker in each turn.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._dropped:
            markers = [f"marker{number}end" for number in range(len(roles))]
            marked: Conversation = tuple({"role": role, "content": text} for role, text in zip(roles, markers, strict=True))
            text = self.render(marked, generation_prompt=roles[-1] != "assistant").lower()
            missing = [role for role, marker in zip(roles, markers, strict=True) if marker not in text]
            self._dropped[roles] = missing[0] if missing else ""
        if dropped := self._dropped[roles]:
            raise ConversationError(
                f"the chat template leaves out the {dropped} turn of a conversation of {_roles(messages)}; remove such "
                "turns, or give another template by chat_template: plain, raw or the path of a Jinja file"
            )

    def template_ids(self, text: str) -> list[int]:
        """Return the ids of rendered text, including special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def spelled_token(self, texts: Iterable[str]) -> str | None:
        """Return the first special token spelled in one of the strings, or None."""
        matches = (self._special_tokens.search(text) for text in texts)
        return next((match[0] for match in matches if match), None)

    def spells_special_token(self, messages: Conversation) -> bool:
        """Return whether a message spells a token that only the template may write."""
        return any(self._controls(message["role"]).search(message["content"]) for message in messages)

    def _controls(self, role: str) -> re.Pattern[str]:
        return self._special_tokens if role == "assistant" else self._control_tokens

    def conversation_ids(self, messages: Conversation, generation_prompt: bool = True) -> list[int]:
        """Return the ids of a rendered conversation. Special tokens spelled in messages are read as plain characters."""
        spelled = self.spells_special_token(messages)
        messages = self.marked(messages) if spelled else messages
        return self.marked_ids(self.render(messages, generation_prompt), spelled)

    def marked(self, messages: Conversation) -> Conversation:
        """Mark special tokens that are spelled in messages, to distinguish them from those of the template."""
        return tuple(
            {"role": turn["role"], "content": mark_control_tokens(turn["content"], self._controls(turn["role"]))}
            for turn in messages
        )

    def marked_ids(self, text: str, spelled: bool = True) -> list[int]:
        """Return the ids of rendered marked messages."""
        if not spelled:
            return self.template_ids(text)
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True).input_ids
        except ValueError as error:
            raise ConversationError(f"{first_line(error)}; remove it") from error
        return ids


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the strings, longest first."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _roles(messages: Sequence[object]) -> str:
    return ", ".join(message["role"] for message in messages)  # type: ignore[index]
