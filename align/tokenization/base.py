"""Convert conversations to token ids and back with a chat template, and pairs of texts for encoders.

All stages use the same template: the tokenizer's own, `plain` if it has none, or `raw` for text to be continued. A complete
response ends with the token that ends an assistant turn.

Only a template writes special tokens. A message that spells a special token (`<|im_end|>`, `</s>`) is read as plain
characters, so a message cannot end a turn.
"""

import re
from collections.abc import Sequence
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from align.core.errors import UserError
from align.data.records import Conversation, Demonstration, Message
from align.tokenization.encoded import EncodedDemonstration, SampledResponse
from align.tokenization.rendering import ChatRenderer, ConversationError

LONGEST_CHARACTER = 4
"""Maximum number of bytes, and therefore tokens, of a UTF-8 character."""
JOINED = ("The answer is 4.", "4")
"""Answers used to test whether tokenizing an answer depends on the preceding prompt."""
MARKER = "The answer."
_OPENING_TAG, _CLOSING_TAG = re.compile(r"<([a-z_]+)>", re.IGNORECASE), re.compile(r"</([a-z_]+)>", re.IGNORECASE)


class Tokenization:
    """A tokenizer with its chat template and end tokens. Arguments as in `ChatRenderer`.

    Args:
        extra_end_ids: additional ids that end a response, from the model's generation config.

    Attributes:
        chat: renders conversations.
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
            raise UserError("the tokenizer has no EOS token, so finished and unfinished responses cannot be distinguished")
        self.has_own_template = bool(tokenizer.chat_template)
        self.chat = ChatRenderer(tokenizer, chat_template, encoder_decoder, self.reads_pairs)
        self.end_id = self._find_end_of_turn()
        self.end_ids = frozenset({self.end_id, tokenizer.eos_token_id, *extra_end_ids})
        # Any pad id works, because lengths define where text ends.
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._end_texts = tokenizer.convert_ids_to_tokens(sorted(self.end_ids))
        self._tails: dict[tuple[str, ...], str] = {}
        self._closings: dict[str, int | None] = {}
        self._begun, self._header = self._find_beginnings()
        prompt_text = self.chat.render(({"role": "user", "content": "Hi"},))
        # SentencePiece prepends a space to the first word of a text, but not after a newline.
        self._joins = all(
            self.chat.template_ids(prompt_text + text) == self.chat.template_ids(prompt_text) + self.chat.template_ids(text)
            for text in JOINED
        )

    reads_pairs = False
    """Whether prompt and response are encoded as a text pair."""
    fixed_before, fixed_after = 0, 0
    """Number of tokens at a prompt's start and a response's end that truncation must keep. Nonzero only for pairs."""

    def _prepare(self) -> None:
        """Prepare the tokenizer. Overridden by subclasses."""

    def _find_end_of_turn(self) -> int:
        """Return the token that the template writes after an assistant message, or EOS."""
        text = self.chat.render(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARKER}), False)
        if MARKER not in text:
            raise ConversationError(
                "the chat template drops assistant turns; fix it, or set chat_template to plain, raw "
                "or the path of a Jinja file"
            )
        after = self.chat.template_ids(text.rsplit(MARKER, 1)[-1])
        # Tokens added with `tokenizer.add_tokens` are not special. Such a token ends a turn if no special token follows it.
        only = bool(after) and self.chat.special_ids.isdisjoint(after) and self.chat.reserve(after[0])
        return int(after[0] if only or self.chat.special_ids.intersection(after[:1]) else self.tokenizer.eos_token_id)

    def _find_beginnings(self) -> tuple[str, list[int]]:
        """Find differences between the beginnings of sampled and recorded answers.

        Returns:
            The tag that only a prompt for sampling opens, such as `<think>`, with the text around it, or "". And the ids of
            a header with special tokens that the model writes before its answer (gpt-oss).
        """
        prompt: Conversation = ({"role": "user", "content": "Hi"},)
        prompt_text, full_text = (
            self.chat.render(prompt),
            self.chat.render((*prompt, {"role": "assistant", "content": MARKER}), False),
        )
        head = full_text.rsplit(MARKER, 1)[0]
        begun = prompt_text.removeprefix(head) if prompt_text.startswith(head) else ""
        if any(text in begun for text in self._end_texts):  # T5 templates end a prompt with <eos>, which looks like a tag
            begun = ""
        closed = {tag.lower() for tag in _CLOSING_TAG.findall(begun)}
        opens = any(tag.lower() not in closed for tag in _OPENING_TAG.findall(begun))
        header = self.chat.template_ids(head.removeprefix(prompt_text)) if head.startswith(prompt_text) else []
        return begun if opens else "", header if self.chat.special_ids.intersection(header) else []

    def prompt_ids(self, prompt: Conversation) -> list[int]:
        """Return the prompt up to the start of the assistant turn, as used for sampling.

        Raises:
            ConversationError: If the template drops a turn, or a message spells a special token that the tokenizer cannot
                read as plain characters.
        """
        self.chat.require_turns(prompt)
        return self.chat.conversation_ids(prompt)

    def head_length(self, prompt: Conversation) -> int:
        """Return the number of tokens before the first user message, such as the start token and a system turn."""
        first = next(number for number, turn in enumerate(prompt) if turn["role"] == "user")
        ids = self.prompt_ids(prompt)
        others: list[Message] = [{"role": "user", "content": text} for text in ("A", "1")]
        return min(_shared(ids, self.prompt_ids((*prompt[:first], other))) for other in others)

    def answer_ids(
        self, prompt: Conversation, text: str, whole: bool = True, ended: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return a prompt and a recorded answer with its end token, as rendered by the template.

        The prompt equals the prompt for sampling as far as the template writes the same text before a recorded answer. If
        the template opens a thought (`<think>`) for sampling, the tag belongs to the prompt if the answer begins with it, as
        in the output of `text`.

        Args:
            prompt: conversation up to the answer.
            text: answer.
            whole: whether to reject an answer if the template drops a part of it, such as a thought.
            ended: whether the response is complete. If not, the end token and the text before it are left out.

        Raises:
            ConversationError: As in `prompt_ids`, or if a part of the answer is dropped.
        """
        prompt_ids, (response,) = self.answers_ids(prompt, [text], whole, [ended])
        return prompt_ids, response

    def answers_ids(
        self, prompt: Conversation, texts: Sequence[str], whole: bool = True, ended: Sequence[bool] | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """Return a prompt and several recorded answers, see `answer_ids`. The prompt is the answers' common prefix."""
        self.chat.require_turns(prompt)
        prompt_text = self.chat.render(prompt)
        opening = (
            self.chat.conversation_ids(prompt)
            if self.chat.spells_special_token(prompt)
            else self.chat.template_ids(prompt_text)
        )
        # An empty answer without EOS has no tokens.
        ends = [not text or is_ended for text, is_ended in zip(texts, ended or [True] * len(texts), strict=True)]
        if self.chat.encoder_decoder:
            answers = [self.response_ids(text) for text in texts]
            return opening, [ids if end else ids[:-1] for ids, end in zip(answers, ends, strict=True)]
        encoded: list[tuple[list[int], list[int]]] = []
        for text, end in zip(texts, ends, strict=True):
            messages: Conversation = (*prompt, {"role": "assistant", "content": text})
            self.chat.require_turns(messages)
            full_text = self.chat.render(messages, False)
            response = self._plain_continuation(prompt_text, full_text, text, end)
            encoded.append((opening, response) if response else self._cut_answer(messages, opening, whole, end))
        shared = min(len(ids) for ids, _ in encoded)
        return opening[:shared], [[*ids[shared:], *response] for ids, response in encoded]

    def _plain_continuation(self, asked: str, told: str, text: str, ended: bool) -> list[int] | None:
        """Return the ids of an answer and its end token, or None if the template writes anything else after the prompt.

        Args:
            asked: rendered prompt.
            told: rendered conversation that ends with the answer.
            text: answer.
            ended: whether to add the end token.
        """
        text = text.removeprefix(self._begun) if asked.endswith(self._begun) else text
        if not self._joins or not told.startswith(asked + text):
            return None
        tail = told[len(asked) + len(text) :]
        if tail not in self._closings:
            after = self.chat.template_ids(tail)
            ends = [token for token in after if token in self.end_ids] or [self.end_id]
            self._closings[tail] = ends[0] if after[:1] == ends[:1] or ends[0] not in after else None
        closing = self._closings[tail]
        if closing is None:
            return None
        return [*self.text_ids(text), *([closing] if ended else [])]

    def _cut_answer(
        self, messages: Conversation, opening: list[int], whole: bool, ended: bool
    ) -> tuple[list[int], list[int]]:
        """Render a conversation, and split it into prompt and last answer."""
        prompt_text, full_text = self.chat.render(messages[:-1]), self.chat.render(messages, False)
        tail = self._tail(messages)
        head, _ = self._split_tail(full_text, tail)
        if whole and not _letters(head).endswith(_letters(messages[-1]["content"])):
            raise ConversationError(
                f"the chat template leaves out or changes a part of the answer {messages[-1]['content'][:40]!r}...; remove "
                "that part, or give a template that writes answers whole by chat_template"
            )
        spelled = self.chat.spells_special_token(messages)
        if spelled:
            marked = self.chat.marked(messages)
            prompt_text, full_text = self.chat.render(marked[:-1]), self.chat.render(marked, False)
        head, tail = self._split_tail(full_text, tail)
        ends = [tail.find(text) + len(text) for text in self._end_texts if text in tail]
        text, closing = head + tail[: min(ends, default=0)], [] if ends else [self.end_id]
        if not ended:
            text, closing = head, []
        ids = [*self.chat.marked_ids(text, spelled), *closing]
        shared = _shared(opening, ids)
        if full_text.startswith(prompt_text) and shared < len(opening):
            # A token spans the boundary. This cannot happen in sampling.
            return opening, [*self.chat.marked_ids(text[len(prompt_text) :], spelled), *closing]
        shared = min(shared, len(ids) - 1)
        return ids[:shared], ids[shared:]

    def _tail(self, messages: Conversation) -> str:
        """Return the text that the template writes after the last answer of a conversation with these roles."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._tails:
            marked: Conversation = (*messages[:-1], {"role": "assistant", "content": MARKER})
            self._tails[roles] = self.chat.render(marked, False).rsplit(MARKER, 1)[-1]
        return self._tails[roles]

    def _split_tail(self, told: str, tail: str) -> tuple[str, str]:
        """Split a rendered conversation after its last answer. The rest usually equals `tail`."""
        if told.endswith(tail):
            return told.removesuffix(tail), tail
        place = max((told.rfind(text) for text in self._end_texts), default=-1)
        return (told[:place], told[place:]) if place >= 0 else (told.rstrip(), "")

    def text_ids(self, text: str) -> list[int]:
        """Tokenize a message or plain text without special tokens, except for the unknown token."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        special = self.chat.special_ids.intersection(ids) - {self.chat.unknown_id}
        if special:
            raise ConversationError(
                f"the text contains the special token {self.tokenizer.decode([min(special)])!r}, which this tokenizer "
                "cannot read as plain characters; remove it"
            )
        return ids

    def as_whole_text(self, ids: list[int]) -> list[int]:
        """Add the special tokens that the tokenizer adds around text."""
        return [*self.chat.opening_ids, *ids, *self.chat.closing_ids]

    def response_ids(self, text: str) -> list[int]:
        """Tokenize an answer by itself and add the end token. `answer_ids` tokenizes it in context."""
        return [*self.text_ids(text), self.end_id]

    def has_ended(self, ids: Sequence[int]) -> bool:
        """Return whether sampled ids end with an end token. If not, they were truncated."""
        return len(ids) > 0 and ids[-1] in self.end_ids

    def written_ids(self) -> set[int]:
        """Return the ids that the template and tokenizer write around messages, and all end tokens."""
        user_message: Conversation = ({"role": "user", "content": "a"},)
        answered: Conversation = (*user_message, {"role": "assistant", "content": "a"})
        ids = {
            *self.prompt_ids(user_message),
            *self.response_ids("a"),
            *self.chat.conversation_ids(answered, False),
            *self.end_ids,
        }
        ids.update(*self.chat.automatic_tokens())
        with suppress(UserError):  # some templates do not support system turns
            ids.update(self.prompt_ids(({"role": "system", "content": "a"}, *answered, *user_message)))
        return ids

    def whole_turn_ids(self, prompt: Conversation, text: str, ended: bool = True) -> tuple[list[int], list[int]]:
        """Return prompt and response ids whose concatenation equals `apply_chat_template` of the conversation.

        This is the input of other libraries' reward models. The prompt is the part that does not depend on the response.

        Args:
            prompt: conversation up to the response.
            text: response.
            ended: whether the response is complete. If not, the text that the template writes after it is left out.
        """
        messages: Conversation = (*prompt, {"role": "assistant", "content": text})
        self.chat.require_turns(messages)
        spelled = self.chat.spells_special_token(messages)
        full_text = self.chat.render(self.chat.marked(messages) if spelled else messages, False)
        if not ended:  # `continue_final_message` fails if the template drops thoughts from the answer
            full_text, _ = self._split_tail(full_text, self._tail(messages))
        ids = self.chat.marked_ids(full_text, spelled)
        shared = min(_shared(self.prompt_ids(prompt), ids), len(ids) - 1)
        return ids[:shared], ids[shared:]

    def continuations(self, text: str, following: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Tokenize plain text and each of several continuations.

        As in lm-eval, text and continuation are tokenized together and split after the number of tokens of the text, because
        a byte-pair tokenizer merges a space with the next word. For an encoder-decoder, they are tokenized separately.
        """
        text_ids, encode = self.text_ids(text), self.text_ids
        encoded = [
            encode(continuation) if self.chat.encoder_decoder else encode(text + continuation)[len(text_ids) :]
            for continuation in following
        ]
        for continuation, ids in zip(following, encoded, strict=True):
            if not ids:
                raise UserError(f"{continuation!r} adds no token after {text[-20:]!r}, so there is nothing to predict")
        return self.as_whole_text(text_ids), encoded

    def text(self, ids: list[int]) -> str:
        """Decode a sampled response without special tokens, the template's end token and surrounding whitespace.

        If the prompt has opened a tag for the response, such as `<think>`, the text begins with it. A header that the
        template writes before recorded answers is left out.
        """
        written = ids[:-1] if ids[-1:] == [self.end_id] else ids
        if self._header and written[: len(self._header)] == self._header:
            written = written[len(self._header) :]
        # T5 tokenizers may enable clean-up, which removes the space before a period.
        text = str(self.tokenizer.decode(written, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        return (self._begun + text).strip()

    def reads_back(self, response: SampledResponse) -> bool:
        """Return whether a sampled response that is saved as text is tokenized to the same ids after the same prompt."""
        try:
            prompt, ids = self.answer_ids(response.conversation, response.text, ended=response.ended)
        except ConversationError:
            return False
        return prompt + ids == response.prompt_ids + response.ids

    def token_texts(self, ids: list[int]) -> list[str]:
        """Return the text of each token, including special tokens. A multi-token character is assigned to its last token."""

        def decode(first: int, end: int) -> str:
            return str(self.tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False))

        texts, context, start = [], 0, 0
        for end in range(1, len(ids) + 1):
            # Some tokenizers write a space only between tokens, so decode the preceding token too.
            before, text = decode(context, start), decode(context, end)
            if text.endswith("\ufffd") and end - start < LONGEST_CHARACTER and end < len(ids):
                texts.append("")
                continue
            texts.append(text[len(before) :])
            context, start = start, end
        return texts

    def reads_alike(self, other: "Tokenization") -> bool:
        """Return whether token ids have the same meaning in both, including the tokens that end a prompt and a turn."""
        roles = ("user", "assistant", "user")
        probe: Conversation = tuple({"role": role, "content": "a"} for role in roles)
        return (
            self.tokenizer.get_vocab() == other.tokenizer.get_vocab()
            and self.chat.template == other.chat.template
            and self.chat.conversation_ids(probe) == other.chat.conversation_ids(probe)
            and self.end_id == other.end_id
        )


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _letters(text: str) -> str:
    """Remove whitespace, which templates trim."""
    return "".join(text.split())


def encode_demonstration(
    tokenization: Tokenization, demonstration: Demonstration, one_row: bool
) -> list[EncodedDemonstration]:
    """Return examples that train on each assistant turn of a demonstration's continuation.

    Args:
        tokenization: tokenization of the model.
        demonstration: demonstration.
        one_row: whether to encode the continuation as one response with the user's turns masked. If not, or if the template
            rewrites earlier turns, each assistant turn is an example.
    """
    messages = (*demonstration.prompt, *demonstration.continuation)
    places = [i for i in range(len(demonstration.prompt), len(messages)) if messages[i]["role"] == "assistant"]
    cut = len(messages) - 1 if demonstration.cut_responses else None  # truncated, so no EOS was sampled
    turns = [tokenization.answer_ids(messages[:place], messages[place]["content"], ended=place != cut) for place in places]
    rows = [[*prompt, *response] for prompt, response in turns]
    # Text between two answers that spells a special token would mix template and message.
    apart = not one_row or len(turns) == 1 or tokenization.chat.spells_special_token(messages)
    if apart or any(rows[-1][: len(row)] != row for row in rows):
        return [EncodedDemonstration(prompt, response, [True] * len(response)) for prompt, response in turns]
    start, learn = len(turns[0][0]), [False] * len(rows[-1])
    for prompt, response in turns:
        learn[len(prompt) : len(prompt) + len(response)] = [True] * len(response)
    return [EncodedDemonstration(rows[-1][:start], rows[-1][start:], learn[start:])]
