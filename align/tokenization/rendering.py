"""Conversations through a chat template: its text, the token ids of that text, and turns that it leaves out."""

import re
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import mark_control_tokens

from align.core.errors import UserError, first_line
from align.data.records import Conversation
from align.tokenization.templates import NAMED_TEMPLATES, PLAIN_TEMPLATE, choose_template, literal


class ConversationError(UserError):
    """A conversation that the tokenizer or its chat template cannot represent; the caller names its record."""


class SpecialTokenError(ConversationError):
    """A text spells a special token, and the tokenizer cannot read it as anything else."""


class DroppedTextError(ConversationError):
    """The chat template leaves out a turn, or a part of an answer."""


class ChatRenderer:
    """A tokenizer with a chat template that gives the same token ids in every program.

    The tokenizer's `chat_template` is completed in place, because a saved model is prompted through it elsewhere: a named
    template gets the tokens that the tokenizer puts before every text (Llama: `<s>`), the template of an encoder-decoder
    those after it (T5: `</s>`, which ends a prompt). A model's own template writes what it wants in front.

    Args:
        tokenizer: from `AutoTokenizer`.
        chat_template: `auto` (the tokenizer's own, else `plain`), `plain`, `raw`, or the path of a Jinja file.
        encoder_decoder: whether an encoder reads the prompt.

    Raises:
        UserError: if the template cannot be read, or does not write what a user or an assistant says.
    """

    default_template = PLAIN_TEMPLATE
    """For a tokenizer without a template of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str, encoder_decoder: bool) -> None:
        self.tokenizer, self.encoder_decoder = tokenizer, encoder_decoder
        own = tokenizer.chat_template
        if isinstance(own, dict):  # one for each use
            own = own.get("default")
        template = choose_template(own or self.default_template, chat_template)
        tokenizer.chat_template = template
        self.opening_ids, after = self._automatic_tokens()
        self.closing_ids = after if encoder_decoder else []
        added = tokenizer.added_tokens_decoder
        # Some tokenizers (Llama 3, Phi 3) list the end of a turn only among the added tokens.
        self.special_ids = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        # Gemma and GPT-NeoX list line breaks and rows of spaces among the added tokens.
        spellings = {token.content: token.special for token in added.values() if not token.content.isspace()}
        # Some templates mark turns with tokens that are not special (Command R). In an answer, a token that is not
        # special is what it spells: models write `<think>` themselves.
        self._control_tokens = _any_of(text for text, special in spellings.items() if special or text in template)
        self._special_tokens = _any_of(text for text, special in spellings.items() if special)
        self.warned_of_spelled_tokens = False
        self._dropped: dict[tuple[str, ...], str] = {}
        tokenizer.chat_template = self._complete(template)
        self.require_turns(({"role": "user", "content": "Hi"},))

    def _automatic_tokens(self) -> tuple[list[int], list[int]]:
        """Special ids that the tokenizer puts before and after every text (Llama: `<s>` before; T5: `</s>` after)."""
        plain, full = self.template_ids("a"), self.tokenizer("a").input_ids
        start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        return full[:start], full[start + len(plain) :]

    def _complete(self, template: str) -> str:
        """The template with the tokens that begin and end a prompt."""
        if template in NAMED_TEMPLATES.values() and self.opening_ids:
            opening = self._spelled(self.opening_ids)
            # Llama 2's tokenizer marks the begin of a word by a space, which it adds to a text's first word but not after
            # a special token.
            text = "Human:"
            expected = [*self.opening_ids, *self.template_ids(text)]
            gaps = [gap for gap in ("", " ") if self.template_ids(opening + gap + text) == expected]
            template = literal(opening + (gaps[0] if gaps else "")) + template
        if self.closing_ids:
            ids = self._rendering_ids(({"role": "user", "content": "Hi"},), template)
            if ids[-len(self.closing_ids) :] != self.closing_ids:
                closing = literal(self._spelled(self.closing_ids))
                template += "{% if add_generation_prompt %}" + closing + "{% endif %}"
        return template

    def _spelled(self, ids: list[int]) -> str:
        return "".join(self.tokenizer.convert_ids_to_tokens(ids))

    def _rendering_ids(self, messages: Conversation, template: str) -> list[int]:
        self.tokenizer.chat_template = template
        return self.template_ids(self.render(messages))

    def render(self, messages: Conversation, generation_prompt: bool = True, unfinished: bool = False) -> str:
        """What the template makes of a conversation.

        Args:
            generation_prompt: whether to open the assistant's next turn.
            unfinished: whether to stop behind the text of the last message.

        Raises:
            ConversationError: if it cannot be rendered, or the template refuses it.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": message["role"], "content": message["content"]} for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
                continue_final_message=unfinished,
            )
        except Exception as error:  # a template is a program from elsewhere, and fails in every way that one can
            raise ConversationError(
                f"the chat template fails for a conversation of {_roles(messages)} ({first_line(error)}); mend it, or give "
                "another by chat_template: plain, raw or the path of a Jinja file"
            ) from error
        assert isinstance(text, str)
        return text

    def require_turns(self, messages: Conversation) -> None:
        """Refuse a conversation of which the template leaves out a turn, as Phi-3's first template does system turns.

        Each sequence of roles is rendered once, with a marker in each turn.

        Raises:
            DroppedTextError: if a turn is left out.
            ConversationError: if the template refuses these roles.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._dropped:
            markers = [f"marker{number}end" for number in range(len(roles))]
            marked: Conversation = tuple({"role": role, "content": text} for role, text in zip(roles, markers, strict=True))
            text = self.render(marked, generation_prompt=roles[-1] != "assistant").lower()
            missing = [role for role, marker in zip(roles, markers, strict=True) if marker not in text]
            self._dropped[roles] = missing[0] if missing else ""
        if dropped := self._dropped[roles]:
            raise DroppedTextError(
                f"the chat template leaves out the {dropped} turn of a conversation of {_roles(messages)}; remove such "
                "turns, or give another template by chat_template: plain, raw or the path of a Jinja file"
            )

    def template_ids(self, text: str) -> list[int]:
        """Ids of what a template wrote: special tokens are what they spell."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def spelled_token(self, texts: Iterable[str]) -> str | None:
        """The first special token that one of the texts spells; None if there is none."""
        found = (self._special_tokens.search(text) for text in texts)
        return next((match[0] for match in found if match), None)

    def spells_special_token(self, messages: Conversation) -> bool:
        """Whether a message spells a token that only the template may write."""
        return any(self._controls(message["role"]).search(message["content"]) for message in messages)

    def _controls(self, role: str) -> re.Pattern[str]:
        return self._special_tokens if role == "assistant" else self._control_tokens

    def _conversation_ids(
        self, messages: Conversation, generation_prompt: bool = True, unfinished: bool = False
    ) -> list[int]:
        """What the template makes of a conversation. Tokens that messages spell are read as characters.

        Raises:
            SpecialTokenError: if the tokenizer cannot read them as such.
        """
        spelled = self.spells_special_token(messages)
        messages = self._marked(messages) if spelled else messages
        return self._marked_ids(self.render(messages, generation_prompt, unfinished), spelled)

    def _marked(self, messages: Conversation) -> Conversation:
        """The messages with the tokens that they spell marked, which tells them from the template's."""
        return tuple(
            {"role": turn["role"], "content": mark_control_tokens(turn["content"], self._controls(turn["role"]))}
            for turn in messages
        )

    def _marked_ids(self, text: str, spelled: bool = True) -> list[int]:
        """Ids of a rendering of marked messages. Raises: see `_conversation_ids`."""
        if not spelled:
            return self.template_ids(text)
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True).input_ids
        except ValueError as error:
            raise SpecialTokenError(f"{first_line(error)}; remove it") from error
        return ids


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing if there is none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _roles(messages: Sequence[object]) -> str:
    return ", ".join(message["role"] for message in messages)  # type: ignore[index]
