"""Conversations to token ids and back, through a chat template: the only place that touches a tokenizer's settings.

Every conversation goes through a chat template, in all stages alike: the tokenizer's own, a plain dialogue if it has
none, or none at all (`raw`) for text to be continued. A response always ends with the token that ends an assistant turn.

Only a template writes special tokens. A message that spells one (`<|im_end|>`, `</s>`) is read as these characters: so a
prompt cannot end its own turn, and a labeler's text cannot end an answer.
"""

from collections.abc import Sequence
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from align.core.errors import UserError
from align.data.records import Conversation, Message
from align.tokenization.rendering import ChatRenderer, DroppedTextError, SpecialTokenError

LONGEST_CHARACTER = 4
"""Bytes, and so tokens, that a character takes at most in UTF-8."""
JOINED = ("The answer is 4.", "4")
"""Answers that show whether a tokenizer reads an answer behind a prompt as it reads it alone."""
MARKER = "The answer."


class Tokenization(ChatRenderer):
    """A tokenizer with its chat template and end tokens.

    Args:
        tokenizer: from `AutoTokenizer`.
        chat_template: `auto` (the tokenizer's own, else `plain`), `plain`, `raw`, or the path of a Jinja file.
        extra_end_ids: more ids that end a response, from the model's generation config.
        encoder_decoder: whether an encoder reads the prompt, and a decoder begins a text with the answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str = "auto",
        extra_end_ids: tuple[int, ...] = (),
        encoder_decoder: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._prepare()
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token: finished and unfinished responses would look the same"
            )
        self.has_own_template = bool(tokenizer.chat_template)
        super().__init__(tokenizer, chat_template, encoder_decoder)
        self.end_id = self._find_end_of_turn()
        self.end_ids = frozenset({self.end_id, tokenizer.eos_token_id, *extra_end_ids})
        # Padding is never read (lengths say where text ends), so any id will do where the tokenizer names none.
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._end_texts = tokenizer.convert_ids_to_tokens(sorted(self.end_ids))
        self._tails: dict[tuple[str, ...], str] = {}
        self._closings: dict[str, int | None] = {}
        asked = self.render(({"role": "user", "content": "Hi"},))
        # SentencePiece puts a space before the first word of a text, which an answer behind a line break does not have.
        self._joins = all(
            self.template_ids(asked + text) == self.template_ids(asked) + self.template_ids(text) for text in JOINED
        )

    fixed_before, fixed_after = 0, 0
    """Tokens that begin every prompt and that end every response, which shortening must leave; only pairs have any."""

    def _prepare(self) -> None:
        """Set up what this kind of tokenization needs."""

    def _find_end_of_turn(self) -> int:
        """The token that the template puts after an assistant's message; end-of-sequence if it puts none.

        Raises:
            DroppedTextError: if the template leaves out an assistant's message.
        """
        text = self.render(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARKER}), False)
        if MARKER not in text:
            raise DroppedTextError(
                "the chat template leaves out the assistant's turns; mend it, or give another by chat_template: plain, raw "
                "or the path of a Jinja file"
            )
        after = self.template_ids(text.rsplit(MARKER, 1)[-1])
        return int(after[0] if after and after[0] in self.special_ids else self.tokenizer.eos_token_id)

    def prompt_ids(self, prompt: Conversation) -> list[int]:
        """The prompt up to where the assistant's turn begins, as sampling reads it.

        Raises:
            DroppedTextError: if the template leaves out a turn.
            SpecialTokenError: if a message spells a special token that the tokenizer cannot read as characters.
        """
        self.require_turns(prompt)
        return self._conversation_ids(prompt)

    def head_length(self, prompt: Conversation) -> int:
        """Tokens of a prompt before what its first user turn says: the beginning of the text, and a system turn."""
        first = next(number for number, turn in enumerate(prompt) if turn["role"] == "user")
        ids = self.prompt_ids(prompt)
        others: list[Message] = [{"role": "user", "content": text} for text in ("A", "1")]
        return min(_shared(ids, self.prompt_ids((*prompt[:first], other))) for other in others)

    def answer_ids(
        self, prompt: Conversation, text: str, whole: bool = True, ended: bool = True
    ) -> tuple[list[int], list[int]]:
        """Prompt and recorded answer, to the token that ends it, as the template writes a conversation that ends with it.

        The prompt is that of sampling, up to where the template writes something else before a recorded answer: one that
        opens a thought for sampling (`<think>`) does not write that before an answer.

        Args:
            whole: refuse an answer of which the template leaves out a part, such as a thought.
            ended: False for a response that was cut off: the token that ends it is left out.

        Raises:
            DroppedTextError: if the template leaves out a turn, or a part of the answer.
            SpecialTokenError: if a message spells a special token that the tokenizer cannot read as characters.
        """
        prompt_ids, (response,) = self.answers_ids(prompt, [text], whole)
        return prompt_ids, response if ended else response[:-1]

    def answers_ids(
        self, prompt: Conversation, texts: Sequence[str], whole: bool = True
    ) -> tuple[list[int], list[list[int]]]:
        """A prompt and several recorded answers to it, see `answer_ids`. The prompt is what all of them share."""
        self.require_turns(prompt)
        asked = self.render(prompt)
        opening = self._conversation_ids(prompt) if self.spells_special_token(prompt) else self.template_ids(asked)
        if self.encoder_decoder:
            return opening, [self.response_ids(text) for text in texts]
        found: list[tuple[list[int], list[int]]] = []
        for text in texts:
            messages: Conversation = (*prompt, {"role": "assistant", "content": text})
            self.require_turns(messages)
            told = self.render(messages, False)
            response = self.plain_continuation(asked, told, text)
            found.append((opening, response) if response else self._cut_answer(messages, opening, whole))
        shared = min(len(ids) for ids, _ in found)
        return opening[:shared], [[*ids[shared:], *response] for ids, response in found]

    def plain_continuation(self, asked: str, told: str, text: str) -> list[int] | None:
        """The ids of an answer and its end where the template writes nothing else behind the prompt; otherwise None.

        Args:
            asked: the rendered prompt.
            told: the rendered conversation that ends with the answer.
        """
        if not self._joins or not told.startswith(asked + text):
            return None
        tail = told[len(asked) + len(text) :]
        if tail not in self._closings:
            after = self.template_ids(tail)
            ends = [token for token in after if token in self.end_ids] or [self.end_id]
            self._closings[tail] = ends[0] if after[:1] == ends[:1] or ends[0] not in after else None
        closing = self._closings[tail]
        return None if closing is None else [*self._encode_message(text), closing]

    def _cut_answer(self, messages: Conversation, opening: list[int], whole: bool) -> tuple[list[int], list[int]]:
        """Prompt and last answer of a conversation, cut from its rendering."""
        asked, told = self.render(messages[:-1]), self.render(messages, False)
        tail = self._tail(messages)
        head, _ = self._split_tail(told, tail)
        if whole and not _letters(head).endswith(_letters(messages[-1]["content"])):
            raise DroppedTextError(
                f"the chat template leaves out or changes a part of the answer {messages[-1]['content'][:40]!r}...; remove "
                "that part, or give a template that writes answers whole by chat_template"
            )
        spelled = self.spells_special_token(messages)
        if spelled:
            marked = self._marked(messages)
            asked, told = self.render(marked[:-1]), self.render(marked, False)
        head, tail = self._split_tail(told, tail)
        ends = [tail.find(text) + len(text) for text in self._end_texts if text in tail]
        text, closing = head + tail[: min(ends, default=0)], [] if ends else [self.end_id]
        ids = [*self._marked_ids(text, spelled), *closing]
        shared = _shared(opening, ids)
        if told.startswith(asked) and shared < len(opening):
            # A token spans the border, which sampling never does: it begins behind the prompt's last token.
            return opening, [*self._marked_ids(text[len(asked) :], spelled), *closing]
        shared = min(shared, len(ids) - 1)
        return ids[:shared], ids[shared:]

    def _tail(self, messages: Conversation) -> str:
        """What the template writes behind the last answer of a conversation with these roles."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._tails:
            marked: Conversation = (*messages[:-1], {"role": "assistant", "content": MARKER})
            self._tails[roles] = self.render(marked, False).rsplit(MARKER, 1)[-1]
        return self._tails[roles]

    def _split_tail(self, told: str, tail: str) -> tuple[str, str]:
        """A rendered conversation up to the end of its last answer, and the rest, which usually is `tail`."""
        if told.endswith(tail):
            return told.removesuffix(tail), tail
        place = max((told.rfind(text) for text in self._end_texts), default=-1)
        return (told[:place], told[place:]) if place >= 0 else (told.rstrip(), "")

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

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text that is no part of a conversation, without special tokens.

        Raises:
            SpecialTokenError: if the text spells a special token and the tokenizer cannot read it as anything else.
        """
        return self._encode_message(text)

    def as_whole_text(self, ids: list[int]) -> list[int]:
        """Ids with the special tokens that the tokenizer puts before every text, and for an encoder-decoder after it."""
        return [*self.opening_ids, *ids, *self.closing_ids]

    def response_ids(self, text: str, ended: bool = True) -> list[int]:
        """A text of the assistant and, unless it was cut off, the token that ends it.

        It is read alone. `answer_ids` reads it behind its prompt.
        """
        return [*self._encode_message(text), *([self.end_id] if ended else [])]

    def has_ended(self, ids: Sequence[int]) -> bool:
        """Whether sampled ids end by a token that ends a response; otherwise they were cut off."""
        return len(ids) > 0 and ids[-1] in self.end_ids

    def written_ids(self) -> set[int]:
        """Ids that stand around the texts of a conversation: what the template and the tokenizer write, and all ends."""
        asked: Conversation = ({"role": "user", "content": "a"},)
        answered: Conversation = (*asked, {"role": "assistant", "content": "a"})
        ids = {*self.prompt_ids(asked), *self.response_ids("a"), *self._conversation_ids(answered, False), *self.end_ids}
        ids.update(*self._automatic_tokens())
        with suppress(UserError):  # some templates take no system turn
            ids.update(self.prompt_ids(({"role": "system", "content": "a"}, *answered, *asked)))
        return ids

    def rendered_ids(self, prompt: str, response: str, to_the_end: bool = False) -> tuple[list[int], list[int]]:
        """Ids of a prompt and a response as a chat template wrote them: special tokens are what they spell.

        The response gets the token that ends a turn unless one is there; text behind the first is left out, for templates
        put a line break there.

        Args:
            to_the_end: take the response as it is, with that text: the reward models of other libraries read it.
        """
        prompt_ids, ids = self.template_ids(prompt), self.template_ids(response)
        if self.closing_ids and prompt_ids[-len(self.closing_ids) :] != self.closing_ids:
            prompt_ids += self.closing_ids  # T5's `</s>` behind the encoder's text
        end = next((number for number, token in enumerate(ids) if token in self.end_ids), None)
        if not to_the_end:
            ids = [*ids, self.end_id] if end is None else ids[: end + 1]
        return prompt_ids, ids

    def whole_turn_ids(self, prompt: Conversation, text: str, ended: bool = True) -> tuple[list[int], list[int]]:
        """Prompt and response as the template writes a conversation that ends with this response, to its last token.

        Together they are what `apply_chat_template` makes of that conversation, which is what other libraries' reward
        models read; the prompt is as much of it as does not depend on the response.

        Args:
            ended: False for a response that was cut off: what the template writes behind it is left out.

        Raises:
            DroppedTextError: if the template leaves out a turn.
            SpecialTokenError: if a message spells a special token that the tokenizer cannot read as characters.
        """
        messages: Conversation = (*prompt, {"role": "assistant", "content": text})
        self.require_turns(messages)
        ids = self._conversation_ids(messages, generation_prompt=False, unfinished=not ended)
        shared = min(_shared(self.prompt_ids(prompt), ids), len(ids) - 1)
        return ids[:shared], ids[shared:]

    def continuations(self, text: str, following: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Token ids of a plain text, and of each of several texts that may follow it.

        Text and continuation are tokenized as one and cut where the text's own ids end, because a byte-pair tokenizer
        joins a space to the word after it (lm-eval cuts at the same place). An encoder-decoder reads them apart.

        Raises:
            UserError: if a continuation adds no token.
        """
        text_ids, encode = self._encode_message(text), self._encode_message
        encoded = [encode(more) if self.encoder_decoder else encode(text + more)[len(text_ids) :] for more in following]
        for more, ids in zip(following, encoded, strict=True):
            if not ids:
                raise UserError(f"{more!r} adds no token after {text[-20:]!r}: nothing could be predicted")
        return self.as_whole_text(text_ids), encoded

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
            and self._conversation_ids(probe) == other._conversation_ids(probe)
            and self.end_id == other.end_id
        )


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of ids at the beginning that are the same in both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _letters(text: str) -> str:
    """A text without white space, which templates trim."""
    return "".join(text.split())
