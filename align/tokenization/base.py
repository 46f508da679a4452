"""Conversations to token ids and back, through a chat template: the only place that touches a tokenizer's settings.

Every conversation goes through a chat template, in all stages alike: the tokenizer's own, a plain dialogue if it has
none, or none at all (`raw`) for text to be continued. A response always ends with the token that ends an assistant turn.

Only a template writes special tokens. A message that spells one (`<|im_end|>`, `</s>`) is read as these characters: so a
prompt cannot end its own turn, and a labeler's text cannot end an answer.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from transformers import PreTrainedTokenizerBase

from align.data.records import Conversation
from align.errors import UserError, first_line
from align.tokenization.templates import NAMED_TEMPLATES, PLAIN_TEMPLATE, choose_template

LONGEST_CHARACTER = 4
"""Bytes, and so tokens, that a character takes at most in UTF-8."""


class SpecialTokenError(UserError):
    """A text spells a special token, and the tokenizer cannot read it as anything else."""


class Tokenization:
    """A tokenizer with its chat template and end tokens.

    Args:
        tokenizer: from `AutoTokenizer`.
        chat_template: `auto` (the tokenizer's own, else `plain`), `plain`, `raw`, or the path of a Jinja file.
        extra_end_ids: more ids that end a response, from the model's generation config.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str = "auto", extra_end_ids: tuple[int, ...] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self._prepare()
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token: finished and unfinished responses would look the same"
            )
        self.has_own_template = bool(tokenizer.chat_template)
        tokenizer.chat_template = choose_template(tokenizer.chat_template or self.default_template, chat_template)
        added = tokenizer.added_tokens_decoder
        # Some tokenizers (Llama 3, Phi 3) list the end of a turn only among the added tokens.
        self.special_ids = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        # Gemma and GPT-NeoX list line breaks and rows of spaces among the added tokens.
        self._special_token_texts = tuple(token.content for token in added.values() if not token.content.isspace())
        self.end_id = self._find_end_of_turn()
        self.end_ids = frozenset({self.end_id, tokenizer.eos_token_id, *extra_end_ids})
        # Padding is never read (lengths say where text ends), so any id will do where the tokenizer names none.
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    fixed_before, fixed_after = 0, 0
    """Tokens that begin every prompt and that end every response, which shortening must leave; only pairs have any."""
    default_template = PLAIN_TEMPLATE
    """For a tokenizer without a template of its own."""

    def _prepare(self) -> None:
        """Set up what this kind of tokenization needs."""

    def _find_end_of_turn(self) -> int:
        """The token that the template puts after an assistant's message; end-of-sequence if it puts none."""
        marker = "The answer."
        text = self.render(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": marker}), False)
        after = self.tokenizer(text.rsplit(marker, 1)[-1], add_special_tokens=False).input_ids
        return int(after[0] if after and after[0] in self.special_ids else self.tokenizer.eos_token_id)

    def render(self, messages: Conversation, generation_prompt: bool = True, unfinished: bool = False) -> str:
        """What the template makes of a conversation.

        Args:
            generation_prompt: whether to open the assistant's next turn.
            unfinished: whether to stop behind the text of the last message.

        Raises:
            UserError: if it cannot be rendered, or the template refuses it.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                _as_dicts(messages),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                continue_final_message=unfinished,
            )
        except Exception as error:  # a template is a program from elsewhere, and fails in every way that one can
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template fails for a conversation of {roles} ({first_line(error)}); mend it, or give another "
                "by chat_template: plain, raw or the path of a Jinja file"
            ) from error
        assert isinstance(text, str)
        return text

    def template_ids(self, text: str) -> list[int]:
        """Ids of what a template wrote: special tokens are what they spell."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _encode_message(self, text: str) -> list[int]:
        """Ids of what a person or a model wrote, none of them special.

        Raises:
            SpecialTokenError: if the tokenizer makes a special token of it nevertheless, as sentencepiece's may.
        """
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        special = self.special_ids.intersection(ids)
        if special:
            raise SpecialTokenError(
                f"the text contains the special token {self.tokenizer.decode([min(special)])!r}, which this tokenizer "
                "cannot read as plain characters; remove it"
            )
        return ids

    def spells_special_token(self, messages: Conversation) -> bool:
        return any(spelling in message["content"] for message in messages for spelling in self._special_token_texts)

    def _encode_with_spelled_tokens(
        self, messages: Conversation, generation_prompt: bool = True, unfinished: bool = False
    ) -> list[int]:
        """Ids of a rendering in which the tokens that messages spell are read as characters."""
        try:
            ids = self.tokenizer.apply_chat_template(
                _as_dicts(messages),
                add_generation_prompt=generation_prompt,
                continue_final_message=unfinished,
                return_dict=False,
                sanitize_control_tokens=True,
            )
        except ValueError as error:
            raise SpecialTokenError(f"{first_line(error)}; remove it") from error
        return cast(list[int], ids)

    def prompt_ids(self, prompt: Conversation) -> list[int]:
        """The prompt up to where the assistant's turn begins.

        Raises:
            SpecialTokenError: if a message spells a special token that the tokenizer cannot read as characters.
        """
        ids = self._conversation_ids(prompt)
        before, after = self._automatic_tokens()
        # T5's encoder expects `</s>` after its input, which its tokenizer adds by itself and a template leaves out. A
        # model's own template writes what it wants in front; base models want the `<s>` that their tokenizer adds.
        own = self.tokenizer.chat_template not in NAMED_TEMPLATES.values()
        return [*ids, *after] if own else [*before, *ids, *after]

    def _conversation_ids(
        self, messages: Conversation, generation_prompt: bool = True, unfinished: bool = False
    ) -> list[int]:
        """What the template makes of a conversation, without tokens that the tokenizer would put around it."""
        if self.spells_special_token(messages):
            return self._encode_with_spelled_tokens(messages, generation_prompt, unfinished)
        return self.template_ids(self.render(messages, generation_prompt, unfinished))

    def _automatic_tokens(self) -> tuple[list[int], list[int]]:
        """Special ids that the tokenizer puts before and after every text (Llama: `<s>` before; T5: `</s>` after)."""
        plain, full = self.template_ids("a"), self.tokenizer("a").input_ids
        start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        return full[:start], full[start + len(plain) :]

    def written_ids(self) -> set[int]:
        """Ids that stand around the texts of a conversation: what the template and the tokenizer write, and all ends."""
        asked: Conversation = ({"role": "user", "content": "a"},)
        answered: Conversation = (*asked, {"role": "assistant", "content": "a"})
        ids = {*self.prompt_ids(asked), *self.response_ids("a"), *self._conversation_ids(answered, False), *self.end_ids}
        ids.update(*self._automatic_tokens())
        with suppress(UserError):  # some templates take no system turn
            ids.update(self.prompt_ids(({"role": "system", "content": "a"}, *answered, *asked)))
        return ids

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text that is no part of a conversation, without special tokens.

        Raises:
            SpecialTokenError: if the text spells a special token and the tokenizer cannot read it as anything else.
        """
        return self._encode_message(text)

    def as_whole_text(self, ids: list[int]) -> list[int]:
        """Ids with the special tokens that the tokenizer puts before and after every text."""
        before, after = self._automatic_tokens()
        return [*before, *ids, *after]

    def response_ids(self, text: str, ended: bool = True) -> list[int]:
        """The response and, unless it was cut off, the token that ends it."""
        return [*self._encode_message(text), *([self.end_id] if ended else [])]

    def has_ended(self, ids: Sequence[int]) -> bool:
        """Whether sampled ids end by a token that ends a response; otherwise they were cut off."""
        return len(ids) > 0 and ids[-1] in self.end_ids

    def rendered_ids(self, prompt: str, response: str, to_the_end: bool = False) -> tuple[list[int], list[int]]:
        """Ids of a prompt and a response as a chat template wrote them: special tokens are what they spell.

        The response gets the token that ends a turn unless one is there; text behind the first is left out, for templates
        put a line break there.

        Args:
            to_the_end: take the response as it is, with that text: the reward models of other libraries read it.
        """
        ids = self.template_ids(response)
        end = next((number for number, token in enumerate(ids) if token in self.end_ids), None)
        _, after = self._automatic_tokens()  # T5's `</s>` behind the encoder's text
        if not to_the_end:
            ids = [*ids, self.end_id] if end is None else ids[: end + 1]
        return [*self.template_ids(prompt), *after], ids

    def whole_turn_ids(self, prompt: Conversation, text: str, ended: bool = True) -> tuple[list[int], list[int]]:
        """Prompt and response as the template writes a conversation that ends with this response, to its last token.

        Together they are what `apply_chat_template` makes of that conversation, which is what other libraries' reward
        models read; the prompt is as much of it as does not depend on the response.

        Args:
            ended: False for a response that was cut off: what the template writes behind it is left out.

        Raises:
            SpecialTokenError: if a message spells a special token that the tokenizer cannot read as characters.
        """
        messages: Conversation = (*prompt, {"role": "assistant", "content": text})
        ids = self._conversation_ids(messages, generation_prompt=False, unfinished=not ended)
        if self.tokenizer.chat_template in NAMED_TEMPLATES.values():
            ids = [*self._automatic_tokens()[0], *ids]
        opening = self.prompt_ids(prompt)
        shared = next((i for i, (a, b) in enumerate(zip(opening, ids, strict=False)) if a != b), min(len(opening), len(ids)))
        shared = min(shared, len(ids) - 1)
        return ids[:shared], ids[shared:]

    def continuations(self, text: str, following: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Token ids of a plain text, and of each of several texts that may follow it.

        Text and continuation are tokenized as one and cut where the text's own ids end, because a byte-pair tokenizer
        joins a space to the word after it (lm-eval cuts at the same place). A tokenizer that closes every text with a
        special token, such as T5's, reads them apart.

        Raises:
            UserError: if a continuation adds no token.
        """
        before, after = self._automatic_tokens()
        text_ids, encode = self._encode_message(text), self._encode_message
        encoded = [encode(more) if after else encode(text + more)[len(text_ids) :] for more in following]
        for more, ids in zip(following, encoded, strict=True):
            if not ids:
                raise UserError(f"{more!r} adds no token after {text[-20:]!r}: nothing could be predicted")
        return [*before, *text_ids, *after], encoded

    def text(self, ids: list[int]) -> str:
        """The words of a response, without special tokens."""
        decoded = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        return decoded.strip()

    def token_texts(self, ids: list[int]) -> list[str]:
        """Each token of a response as text, special tokens too; joined, they are the text of the ids.

        A character of several tokens is shown at the last of them.
        """

        def decode(first: int, end: int) -> str:
            return str(self.tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False))

        texts, context, start = [], 0, 0
        for end in range(1, len(ids) + 1):
            # Some tokenizers write a space only between two tokens, so the text before is decoded along.
            before, text = decode(context, start), decode(context, end)
            if text.endswith("\ufffd") and end - start < LONGEST_CHARACTER and end < len(ids):
                texts.append("")
                continue
            texts.append(text[len(before) :])
            context, start = start, end
        return texts

    def reads_alike(self, other: "Tokenization") -> bool:
        """Whether token ids mean the same to both, down to what ends a prompt (T5's `</s>`) and a turn."""
        roles = ("user", "assistant", "user")
        probe: Conversation = tuple({"role": role, "content": "a"} for role in roles)
        return (
            self.tokenizer.get_vocab() == other.tokenizer.get_vocab()
            and self.tokenizer.chat_template == other.tokenizer.chat_template
            and self.prompt_ids(probe) == other.prompt_ids(probe)
            and self.end_id == other.end_id
        )


def _as_dicts(messages: Conversation) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]
