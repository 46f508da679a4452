"""What encoders read: prompt and response as two texts with marks around them."""

from collections.abc import Sequence

from align.core.errors import UserError
from align.data.records import Conversation
from align.tokenization.base import Tokenization
from align.tokenization.templates import RAW_TEMPLATE


class PairTokenization(Tokenization):
    """Prompt and response as the two texts that `tokenizer(prompt, response)` joins: what encoders (BERT) read.

    The marks before, between and after the two belong to the prompt and the response: `[CLS] prompt [SEP]`, `response
    [SEP]`. Without a chat template of the tokenizer's own, the prompt is its text as it is.
    """

    default_template = RAW_TEMPLATE

    def _prepare(self) -> None:
        tokenizer = self.tokenizer
        if tokenizer.eos_token is None and tokenizer.sep_token is not None:
            tokenizer.eos_token = tokenizer.sep_token  # BERT names no token that ends a text; this one ends each
        first, second, both = self.template_ids("a"), self.template_ids("b"), tokenizer("a", "b").input_ids
        start = _find(both, first, 0)
        between = _find(both, second, start + len(first))
        self._before, self._middle = both[:start], both[start + len(first) : between]
        self._after = both[between + len(second) :]
        if not self._middle or not self._after:
            raise UserError("the tokenizer writes no mark between two texts: an encoder could not tell prompt from response")
        self.fixed_before, self.fixed_after = len(self._before), len(self._after)

    def _complete(self, template: str) -> str:
        return template

    def _find_end_of_turn(self) -> int:
        return int(self._after[0])

    def prompt_ids(self, prompt: Conversation) -> list[int]:
        self.require_turns(prompt)
        return [*self._before, *self._conversation_ids(prompt), *self._middle]

    def answer_ids(
        self, prompt: Conversation, text: str, whole: bool = True, ended: bool = True
    ) -> tuple[list[int], list[int]]:
        return self.prompt_ids(prompt), self.response_ids(text)

    def answers_ids(
        self, prompt: Conversation, texts: Sequence[str], whole: bool = True
    ) -> tuple[list[int], list[list[int]]]:
        return self.prompt_ids(prompt), [self.response_ids(text) for text in texts]

    def response_ids(self, text: str, ended: bool = True) -> list[int]:  # the mark closes the pair, not the response
        return [*self._encode_message(text), *self._after]

    def rendered_ids(self, prompt: str, response: str, to_the_end: bool = False) -> tuple[list[int], list[int]]:
        return [*self._before, *self.template_ids(prompt), *self._middle], [*self.template_ids(response), *self._after]

    def whole_turn_ids(self, prompt: Conversation, text: str, ended: bool = True) -> tuple[list[int], list[int]]:
        return self.prompt_ids(prompt), self.response_ids(text)

    def continuations(self, text: str, following: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        return [*self._before, *self._encode_message(text), *self._middle], [self.response_ids(more) for more in following]

    def reads_alike(self, other: Tokenization) -> bool:
        return isinstance(other, PairTokenization) and super().reads_alike(other)


def _find(ids: list[int], part: list[int], start: int) -> int:
    """Where `part` begins in `ids`, from `start` on; the end if it is not there."""
    places = range(start, len(ids) - len(part) + 1)
    return next((place for place in places if ids[place : place + len(part)] == part), len(ids))
