"""Loading of tokenizers, pairs of texts for encoders, and padding for saved classifiers."""

import copy
from collections.abc import Callable, Sequence

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from align.core.errors import UserError, first_line
from align.data.records import Conversation
from align.model_registry.registry import resolve_model
from align.tokenization.base import Tokenization
from align.tokenization.rendering import ConversationError

EndIds = Callable[[PreTrainedTokenizerBase], tuple[int, ...]]
"""Further ids that end a response, given the tokenizer."""
_NO_UTF8 = ("ÿ", "<0xFF>")
"""Spellings of the byte 0xFF in vocabularies. UTF-8 has no such byte: no text yields the token."""


def make_tokenization(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str,
    of_pairs: bool,
    end_ids: EndIds | None = None,
    encoder_decoder: bool = False,
) -> Tokenization:
    """Return the tokenization of a tokenizer.

    Args:
        of_pairs: for an encoder, which reads prompt and response as a pair.
        end_ids: returns the end tokens of the model's generation config.
        encoder_decoder: for a model whose encoder reads the prompt.
    """
    more = end_ids(tokenizer) if end_ids else ()
    if of_pairs:
        return PairTokenization(tokenizer, chat_template, more)
    return Tokenization(tokenizer, chat_template, more, encoder_decoder)


def load_tokenization(
    model: str,
    chat_template: str = "auto",
    of_pairs: bool = False,
    end_ids: EndIds | None = None,
    encoder_decoder: bool = False,
) -> Tokenization:
    """Load the tokenization of a built-in model, folder or hub name; arguments as for `make_tokenization`."""
    source = resolve_model(model)
    try:
        return make_tokenization(AutoTokenizer.from_pretrained(source), chat_template, of_pairs, end_ids, encoder_decoder)
    except ConversationError as error:
        raise UserError(f"model '{model}': {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"model '{model}': its tokenizer cannot be loaded ({first_line(error)})") from error


class PairTokenization(Tokenization):
    """The input of encoders (BERT): `tokenizer(prompt, response)`.

    Prompt and response include the marks: `[CLS] prompt [SEP]` and `response [SEP]`. A tokenizer without a chat template
    reads the prompt's plain text.
    """

    reads_pairs = True

    def _prepare(self) -> None:
        tokenizer = self.tokenizer
        if tokenizer.eos_token is None and tokenizer.sep_token is not None:
            tokenizer.eos_token = tokenizer.sep_token  # BERT's tokenizer names no EOS
        first, second = (tokenizer(text, add_special_tokens=False).input_ids for text in ("a", "b"))
        both = tokenizer("a", "b").input_ids
        start = _find(both, first, 0)
        between = _find(both, second, start + len(first))
        self._before, self._middle = both[:start], both[start + len(first) : between]
        self._after = both[between + len(second) :]
        if not self._middle or not self._after:
            raise UserError("the tokenizer writes no mark between two texts: an encoder could not tell prompt from response")
        self.fixed_before, self.fixed_after = len(self._before), len(self._after)

    def _find_end_of_turn(self) -> int:
        return int(self._after[0])

    def prompt_ids(self, prompt: Conversation) -> list[int]:
        self.chat.require_turns(prompt)
        return [*self._before, *self.chat.conversation_ids(prompt), *self._middle]

    def answer_ids(
        self, prompt: Conversation, text: str, whole: bool = True, ended: bool = True
    ) -> tuple[list[int], list[int]]:
        return self.prompt_ids(prompt), self.response_ids(text)

    def answers_ids(
        self, prompt: Conversation, texts: Sequence[str], whole: bool = True
    ) -> tuple[list[int], list[list[int]]]:
        return self.prompt_ids(prompt), [self.response_ids(text) for text in texts]

    def response_ids(self, text: str) -> list[int]:  # the mark closes the pair, not the response
        return [*self.text_ids(text), *self._after]

    def whole_turn_ids(self, prompt: Conversation, text: str, ended: bool = True) -> tuple[list[int], list[int]]:
        return self.prompt_ids(prompt), self.response_ids(text)

    def continuations(self, text: str, following: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        return [*self._before, *self.text_ids(text), *self._middle], [self.response_ids(more) for more in following]

    def reads_alike(self, other: Tokenization) -> bool:
        return isinstance(other, PairTokenization) and super().reads_alike(other)


def _find(ids: list[int], part: list[int], start: int) -> int:
    """Return the index at which `part` begins in `ids[start:]`, or `len(ids)`."""
    places = range(start, len(ids) - len(part) + 1)
    return next((place for place in places if ids[place : place + len(part)] == part), len(ids))


def with_unread_padding(tokenization: Tokenization, rows: int) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or a copy of it, with a padding token that ends no text.

    A saved classifier of transformers reads its score at the last token that is not padding. Candidates are the tokenizer's
    padding token, special tokens with "pad" in their names, the unknown token, other special tokens, and the byte 0xFF
    (GPT-2). If none fits, there is no padding token.

    Args:
        rows: of the embedding matrix, where the token needs one.
    """
    tokenizer = tokenization.tokenizer
    vocabulary = tokenizer.get_vocab()
    pad, ends = tokenizer.pad_token_id, tokenization.end_ids
    if pad is not None and pad not in ends and pad < rows:
        return tokenizer
    special = {token: id for token, id in vocabulary.items() if id in tokenization.chat.special_ids}
    ordered = sorted(special, key=lambda token: ("pad" not in token.lower(), token != tokenizer.unk_token, special[token]))
    known = [token for token in (*ordered, *_NO_UTF8) if token in vocabulary]
    fitting = [token for token in known if vocabulary[token] not in ends and vocabulary[token] < rows]
    tokenizer = copy.deepcopy(tokenizer)
    if not fitting:
        tokenizer.pad_token = None
        return tokenizer
    # A single word: a name that contains the letter keeps its tokens.
    is_byte = fitting[0] in _NO_UTF8
    token = AddedToken(fitting[0], single_word=True, normalized=False, special=True) if is_byte else fitting[0]
    tokenizer.add_special_tokens({"pad_token": token})
    return tokenizer
