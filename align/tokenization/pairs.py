"""Convert text pairs to token ids, for encoders."""

from collections.abc import Sequence

from align.core.errors import UserError
from align.data.records import Conversation
from align.tokenization.base import Tokenization


class PairTokenization(Tokenization):
    """Encoder (BERT) inputs: `tokenizer(prompt, response)`.

    Prompt and response include the special tokens: `[CLS] prompt [SEP]` and `response [SEP]`. If the tokenizer has no chat
    template, the prompt is plain text.
    """

    reads_pairs = True

    def _prepare(self) -> None:
        tokenizer = self.tokenizer
        if tokenizer.eos_token is None and tokenizer.sep_token is not None:
            tokenizer.eos_token = tokenizer.sep_token  # BERT's tokenizer has no EOS token
        first, second = (tokenizer(text, add_special_tokens=False).input_ids for text in ("a", "b"))
        both = tokenizer("a", "b").input_ids
        start = _find(both, first, 0)
        between = _find(both, second, start + len(first))
        self._before, self._middle = both[:start], both[start + len(first) : between]
        self._after = both[between + len(second) :]
        if not self._middle or not self._after:
            raise UserError(
                "the tokenizer inserts no separator between text pairs, so an encoder cannot distinguish prompt and response"
            )
        self.fixed_before, self.fixed_after = len(self._before), len(self._after)

    def _find_end_of_turn(self) -> int:
        return int(self._after[0])

    def prompt_ids(self, prompt: Conversation) -> list[int]:
        self.chat.require_turns(prompt)
        return [*self._before, *self.chat.conversation_ids(prompt), *self._middle]

    def answers_ids(
        self, prompt: Conversation, texts: Sequence[str], whole: bool = True, ended: Sequence[bool] | None = None
    ) -> tuple[list[int], list[list[int]]]:
        return self.prompt_ids(prompt), [self.response_ids(text) for text in texts]

    def response_ids(self, text: str) -> list[int]:  # the separator closes the pair, not the response
        return [*self.text_ids(text), *self._after]

    def whole_turn_ids(self, prompt: Conversation, text: str, ended: bool = True) -> tuple[list[int], list[int]]:
        return self.prompt_ids(prompt), self.response_ids(text)

    def reads_alike(self, other: Tokenization) -> bool:
        return isinstance(other, PairTokenization) and super().reads_alike(other)


def _find(ids: list[int], part: list[int], start: int) -> int:
    """Return the index of `part` in `ids[start:]`, or `len(ids)`."""
    places = range(start, len(ids) - len(part) + 1)
    return next((place for place in places if ids[place : place + len(part)] == part), len(ids))
